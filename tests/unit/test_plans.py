"""Tables for the pure part: placement, options, environment, devices."""

from __future__ import annotations

import os
import re
from dataclasses import fields, replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.agent.hardware import own_threads
from nbddp.capabilities.capacity import on_agent
from nbddp.capabilities.capacity.part import Limit, crowded, refuse_crowd
from nbddp.capabilities.completion.lines import complete_cell, complete_command
from nbddp.capabilities.gpus import on_agent as devices
from nbddp.capabilities.sanitizer.options import Sanitize
from nbddp.capabilities.scripts.logs import LogOptions
from nbddp.capabilities.scripts.program import ScriptProgram
from nbddp.errors import BadInput
from nbddp.launch import options, torchrun_env
from nbddp.launch.topology import Device, Node, Topology, rank_words
from nbddp.notebook import commands
from nbddp.protocol.request import Options, Request
from nbddp.protocol.run_spec import RunSpec
from tests import places


def host(gpus: int = 0, cores: int = 8, masks: list[str] | None = None) -> Node:
    return Node(0, "h", tuple(Device(i, (masks or list("01234567"))[i]) for i in range(gpus)), cores)


def nodes(count: int, gpus: int) -> list[Node]:
    return [replace(host(gpus), index=i) for i in range(count)]


def test_two_nodes_of_four_gpus_with_two_gpus_each_map_as_the_guides_say() -> None:
    placed = Topology.plan(nodes(2, 4), nnodes=2, gpus_per_proc=2)
    assert [(w.rank, w.node, w.local_rank, [d.index for d in w.devices]) for w in placed.workers] == [
        (0, 0, 0, [0, 1]),
        (1, 0, 1, [2, 3]),
        (2, 1, 0, [0, 1]),
        (3, 1, 1, [2, 3]),
    ]
    assert placed.equation() == "world size 4 = 2 nodes × 2 processes; each owns 2 GPUs"


@pytest.mark.parametrize(
    ("gpus", "asked", "equation"),
    [
        (0, {}, "world size 2 = 1 node × 2 processes; on CPU"),
        (0, {"nproc": "cpu"}, "world size 8 = 1 node × 8 processes; on CPU"),
        (8, {}, "world size 8 = 1 node × 8 processes; each owns 1 GPU"),
        (8, {"gpus_per_proc": 4}, "world size 2 = 1 node × 2 processes; each owns 4 GPUs"),
        (8, {"nproc": 2, "nnodes": 2}, "world size 4 = 2 simulated nodes × 2 processes; each owns 1 GPU"),
        (8, {"nproc": 1, "device": "cpu"}, "world size 1 = 1 node × 1 process; on CPU"),
        (2, {"nproc": 4, "oversubscribe": True}, "world size 4 = 1 node × 4 processes; GPUs are shared"),
        (4, {"nnodes": 5, "device": "cpu"}, "world size 10 = 5 simulated nodes × 2 processes; on CPU"),
    ],
)
def test_plan_states_its_equation(gpus: int, asked: dict[str, object], equation: str) -> None:
    assert Topology.plan([host(gpus)], **asked).equation() == equation  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpus", "asked", "advice"),
    [
        (8, {"nproc": 9}, "use --nproc 8, or add --oversubscribe"),
        (8, {"nproc": 3, "gpus_per_proc": 3}, "use --nproc 2"),
        (1, {"nproc": 1, "gpus_per_proc": 2}, "use --gpus-per-proc 1"),
        (2, {"nproc": 1, "nnodes": 3}, "use --nnodes 2 or fewer"),
        (0, {"gpus_per_proc": 1}, "remove the option to run on CPU"),
        (0, {"nproc": "gpu"}, "use --nproc 2"),
        (4, {"device": "cpu", "gpus_per_proc": 1}, "remove one of them"),
        (0, {"nproc": 0}, "use a positive number"),
        (0, {"nproc": "three"}, "use a number such as 2, or auto, gpu or cpu"),
    ],
)
def test_impossible_plans_say_what_to_type(gpus: int, asked: dict[str, object], advice: str) -> None:
    with pytest.raises(BadInput) as caught:
        Topology.plan([host(gpus)], **asked)  # type: ignore[arg-type]
    assert advice in str(caught.value)


MIB = 1 << 20
MEMORY, THREADS = Limit("memory", 50 * MIB, 1000 * MIB), Limit("threads", 13, 130)


@pytest.mark.parametrize(
    ("living", "wanted", "nnodes", "limits", "answer"),
    [
        (0, 20, 1, [MEMORY], ""),
        (0, 21, 1, [MEMORY], "21 workers would need about 1050 MiB of memory, but only 1000 MiB of memory are free; "
         "use --nproc 20 or fewer, or add --oversubscribe to start them anyway"),
        (0, 5000, 1, [MEMORY], "need about 244 GiB of memory"),
        (0, 21, 1, [], ""),
        (5, 25, 1, [MEMORY], ""),
        (5, 26, 1, [MEMORY], "21 more workers would need about 1050 MiB"),
        (5, 26, 1, [MEMORY], "use --nproc 25 or fewer"),
        (30, 20, 1, [MEMORY], ""),
        (30, 30, 1, [Limit("memory", 50 * MIB, -5)], ""),
        (0, 24, 3, [MEMORY], "use --nproc 6 or fewer"),
        (0, 3, 3, [Limit("memory", 50 * MIB, 60 * MIB)], "end other programs"),
        (0, 11, 1, [MEMORY, THREADS], "need about 143 threads, but only 130 threads are free; use --nproc 10"),
        (1, 2, 1, [MEMORY, Limit("open files", 6, -7)],
         "1 more worker would need about 6 open files, but only 0 open files"),
    ],
)  # fmt: skip
def test_what_the_machine_cannot_hold_is_refused(
    living: int, wanted: int, nnodes: int, limits: list[Limit], answer: str
) -> None:
    try:
        refuse_crowd(living, wanted, nnodes, limits)
        said = ""
    except BadInput as e:
        said = str(e)
    assert said == answer if not answer else answer in said


def test_many_more_workers_than_cores_get_a_word() -> None:
    assert crowded(64, 2) == ""
    assert crowded(300, 2).startswith(
        "300 workers share 2 cores, so that starts, steps and answers are slow; --nproc 2 "
    )


@pytest.mark.parametrize(
    ("version", "files", "free"),
    [
        ("0::/", {"memory.max": "2147483648", "memory.current": "1073741824"}, 1 << 30),
        ("0::/", {"memory.max": "3000", "memory.current": "2900", "memory.stat": "anon 5\ninactive_file 400"}, 500),
        ("0::/", {"memory.max": "3000", "memory.current": "3900"}, 0),
        ("0::/", {"memory.max": "max", "memory.current": "100"}, None),
        ("0::/", {}, None),
        ("0::/a/b", {"a/memory.max": "3000", "a/memory.current": "1000", "a/b/memory.max": "max"}, 2000),
        ("0::/../elsewhere", {"memory.max": "3000", "memory.current": "1000"}, 2000),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": "900", "memory/a/memory.usage_in_bytes": "200"}, 700),
        ("4:cpu,memory:/gone", {"memory/memory.limit_in_bytes": "9", "memory/memory.usage_in_bytes": "2"}, 7),
        ("4:cpu:/a", {"cpu/a/memory.max": "3000", "cpu/a/memory.current": "1000"}, None),
    ],
)
def test_memory_is_bounded_by_the_tightest_control_group(
    version: str, files: dict[str, str], free: int | None, tmp_path: Path
) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    for name, text in {"self/cgroup": version, **{f"../cgroup/{n}": t for n, t in files.items()}}.items():
        file = Path(os.path.normpath(proc / name))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    found = on_agent.free_memory(proc, root)
    if free is None:
        assert found == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    else:
        assert found == free


def test_threads_are_bounded_by_the_control_group(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("8:pids:/\n0::/\n")
    (tmp_path / "pids").mkdir()
    (tmp_path / "pids/pids.max").write_text("100\n")
    (tmp_path / "pids/pids.current").write_text("40\n")
    found = on_agent.free_threads(tmp_path, tmp_path)
    assert found is not None
    assert found <= 60
    assert own_threads() >= psutil.Process().num_threads()


def test_no_hosts_are_refused_in_words() -> None:
    with pytest.raises(BadInput, match="does not match the 0 hosts"):
        Topology.plan([])


def test_worker_prints_values_and_totals() -> None:
    assert repr(Topology.plan(nodes(2, 4), nnodes=2, gpus_per_proc=2).workers[3]) == (
        "Worker(local_rank=1(2), node=1(2), rank=3(4), device=GPUs 2, 3)"
    )


@given(st.sets(st.integers(0, 40), min_size=1))
def test_rank_sets_survive_being_written(ranks: set[int]) -> None:
    written = rank_words(ranks).split(" ", 1)[1].replace("–", "-").replace(" ", "")
    assert options.parse_cell(f"--ranks {written}").ranks == tuple(sorted(ranks))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", options.LaunchSpec()),
        ("--nproc 4", options.LaunchSpec(nproc=4)),
        ("--nproc_per_node=2", options.LaunchSpec(nproc=2)),
        ("-n gpu --visible own", options.LaunchSpec(nproc="gpu", visible="own")),
        ("-o x --fresh", options.LaunchSpec(output="x", fresh=True)),
        ("--ranks 0,2-3 --show none", options.LaunchSpec(ranks=(0, 2, 3), show=())),
        ("-- --nproc 9 'a b'", options.LaunchSpec(argv=("--nproc", "9", "a b"))),
    ],
)
def test_lines_become_specs(line: str, expected: options.LaunchSpec) -> None:
    assert options.parse_cell(line) == expected


@pytest.mark.parametrize("name", [each.name for each in fields(Options)])
def test_each_option_of_a_run_goes_from_its_line_to_the_request(name: str) -> None:
    said = {"ranks": (0,), "show": (1,), "hang_after": None, "timeout": 7.0, "shutdown_timeout": 8.0, "max_restarts": 2,
            "argv": ("--lr",), "check": True, "timings": False, "memory": True, "program": ScriptProgram("t.py"),
            "logs": LogOptions("out"), "trace": "t.json", "show_timings": True,
            "sanitize": Sanitize(allow=("overlap",))}  # fmt: skip
    asked = options.LaunchSpec(**{name: said[name]}).as_request("pass", 3)
    assert getattr(asked, name) == said[name] != getattr(Request(), name)
    assert (asked.code, asked.cell, asked.argv0) == ("pass", 3, "Cell In[3]")


CLIENTS = {  # no worker has to know these
    "ranks", "show", "hang_after", "timeout", "shutdown_timeout", "max_restarts", "state", "logs",
    "show_timings", "meets",
}  # fmt: skip
APART = {"code", "buffers"}  # of a message
OTHERS = {"op": "push", "fields": {"names": ["x"]}}


@pytest.mark.parametrize("name", [each.name for each in fields(Request)])
def test_what_a_worker_needs_of_a_request_is_in_what_it_is_sent(name: str) -> None:
    said = {"cell": 3, "argv": ("--lr",), "argv0": "t.py", "want_value": True, "check": True, "timings": False,
            "trace": True, "memory": True, "program": ScriptProgram("t.py"), "sanitize": Sanitize()}  # fmt: skip
    known = [CLIENTS, APART, set(OTHERS), set(said)]
    assert sum(name in group for group in known) == 1, "who needs it?"
    if name in OTHERS:
        assert Request(**OTHERS).spec(1) == RunSpec("push", 1, fields={"names": ["x"]})  # type: ignore[arg-type]
    elif name in said:
        assert Request(**{name: said[name]}).spec(1) != Request().spec(1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("--nprok 2", "did you mean --nproc?"),
        ("--nproc", "--nproc needs a value; write it as --nproc N"),
        ("--nproc 2.5", "'2.5' is not a number of workers"),
        ("--nnodes 0", "'0' is not a positive whole number"),
        ("--ranks 3-1", "write it as 1-3"),
        ("--ranks a", "write it as 0,2-3"),
        ("--ranks 0-9999999999", "use ranks below 100000"),
        ("--ranks ²", "'²' is not a set of ranks; write it as 0,2-3"),
        ("-o class", "use one such as loss"),
        ("--fresh=1", "--fresh takes no value; write it as --fresh"),
        ("-o 3x", "not a valid Python name"),
        ("words", "go after --"),
        ("'open", "close the quote"),
        ("--visible some", "--visible: 'some' is not one of its values; write it as --visible all|own"),
    ],
)
def test_bad_lines_name_the_option_and_the_way_out(line: str, answer: str) -> None:
    with pytest.raises(BadInput) as caught:
        options.parse_cell(line)
    assert answer in str(caught.value)
    assert str(caught.value).startswith("%%ddp")


def test_only_a_cell_has_words_for_its_program() -> None:
    with pytest.raises(BadInput, match="%ddp stop does not take '--'"):
        commands.parse_command("stop -- x")
    with pytest.raises(BadInput, match="'²' is not a rank; use one number, such as 0"):
        commands.parse_command("log --rank ²")


@given(st.text(max_size=40))
def test_any_line_is_a_spec_an_answer_or_bad_input(line: str) -> None:
    for parse in (options.parse_cell, commands.parse_command):
        try:
            parse(line)
        except (BadInput, options.HelpAsked):
            continue


@pytest.mark.parametrize("line", ["--help", "-h"])
def test_help_is_an_answer(line: str) -> None:
    with pytest.raises(options.HelpAsked, match="--gpus-per-proc"):
        options.parse_cell(line)


def test_help_alone_tells_of_the_options_too() -> None:
    """`%%ddp --help` with nothing below it is a cell magic without a body, which IPython refuses."""
    assert commands.parse_command("--help").args == {"options": True}
    assert commands.parse_command("").args == {"options": False}
    assert "%ddp --help lists its options" in commands.overview()


def test_every_subcommand_has_help_and_completion() -> None:
    for name, command in commands.known().items():
        if name != "help":
            with pytest.raises(options.HelpAsked, match=command.help.split()[0]):
                commands.parse_command(f"{name} --help")
    assert complete_command("re") == ["restart"]
    assert complete_command("restart --ra") == ["--ranks"]
    assert complete_cell("--nproc ") == list(options.NPROC_WORDS)
    assert complete_cell("--show 1 -- --n") == []


def variables(placed: Topology, rank: int, visible: str = "all", base: dict[str, str] | None = None) -> dict[str, str]:
    return torchrun_env.of_worker(placed.workers[rank], placed, base or {}, visible=visible)


def test_threads_follow_torchruns_rule() -> None:
    one, two = Topology.plan([host()], nproc=1), Topology.plan([host()], nproc=2)
    assert "OMP_NUM_THREADS" not in variables(one, 0)
    assert variables(two, 0)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in variables(two, 0, base={"OMP_NUM_THREADS": "3"})


def test_own_devices_are_masked_through_the_parents_list() -> None:
    placed = Topology.plan([host(4, masks=["5", "GPU-a", "2", "7"])], gpus_per_proc=2)
    own = variables(placed, 1, visible="own")
    assert (own["CUDA_VISIBLE_DEVICES"], own["LOCAL_RANK"], own["RANK"]) == ("2,7", "0", "1")
    everything = variables(placed, 1)
    assert "CUDA_VISIBLE_DEVICES" not in everything
    assert everything["LOCAL_RANK"] == "1"


def test_simulated_nodes_hide_each_others_gpus_and_cpu_runs_hide_all() -> None:
    placed = Topology.plan([host(4)], nproc=2, nnodes=2)
    assert [variables(placed, r)["CUDA_VISIBLE_DEVICES"] for r in range(4)] == ["0,1", "0,1", "2,3", "2,3"]
    assert variables(Topology.plan([host(4)], nproc=2, device="cpu"), 0)["CUDA_VISIBLE_DEVICES"] == ""


def test_only_what_is_read_at_import_needs_a_new_agent() -> None:
    assert torchrun_env.needs_new_agent({"A": "1", "TORCH_LOGS": "x"}, {"A": "2"}) == ["TORCH_LOGS"]
    assert torchrun_env.needs_new_agent({"HOME": "1"}, {"HOME": "2", "MY_RUN": "3"}) == []
    assert torchrun_env.needs_new_agent({}, {"CUDA_VISIBLE_DEVICES": "1"}) == ["CUDA_VISIBLE_DEVICES"]


RECORDED = [
    {"name": "NVIDIA H100", "memory": 85_520_809_984, "uuid": f"GPU-{i:04d}", "bus_id": f"{i}"} for i in range(8)
]


@pytest.mark.parametrize(
    ("listed", "masks", "uuids"),
    [
        (None, [str(i) for i in range(8)], [f"GPU-{i:04d}" for i in range(8)]),
        ("3,1", ["3", "1"], ["GPU-0003", "GPU-0001"]),
        ("GPU-0007,GPU-0001", ["GPU-0007", "GPU-0001"], ["GPU-0007", "GPU-0001"]),
        ("GPU-0007,0", ["GPU-0007"], ["GPU-0007"]),
        ("0,GPU-0007", ["0"], ["GPU-0000"]),
        ("1,2,1", [], []),
        ("1,²", ["1"], ["GPU-0001"]),
        ("2,99,1", ["2"], ["GPU-0002"]),
        ("", [], []),
        ("-1", [], []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(listed: str | None, masks: list[str], uuids: list[str]) -> None:
    env = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    found = devices.visible(RECORDED, env)
    assert [d["mask"] for d in found] == masks
    assert [d["uuid"] for d in found] == uuids
    assert [d["index"] for d in found] == list(range(len(masks)))


DIVIDED = [
    {**RECORDED[0], "instances": [{"name": "H100 MIG 3g.40gb", "uuid": f"MIG-{i}", "memory": 40} for i in range(2)]},
    RECORDED[1],
]


@pytest.mark.parametrize(
    ("listed", "masks", "names"),
    [
        (None, ["MIG-0"], ["H100 MIG 3g.40gb"]),
        ("MIG-1,MIG-0", ["MIG-1", "MIG-0"], ["H100 MIG 3g.40gb"] * 2),
        ("MIG-elsewhere", ["MIG-elsewhere"], [""]),
        ("MIG-1,0", ["MIG-1"], ["H100 MIG 3g.40gb"]),
        ("MIG-1,MIG-1", [], []),
    ],
)
def test_instances_of_a_divided_gpu_are_devices(listed: str | None, masks: list[str], names: list[str]) -> None:
    env = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    found = devices.visible(DIVIDED, env)
    assert [d["mask"] for d in found] == masks
    assert [d.get("name", "") for d in found] == names
    told = devices.node_facts(found)
    assert all(set(d) <= {"index", "mask", "name", "uuid", "memory"} for d in told["devices"])
    wanted = [devices.FIRST_INSTANCE] if listed is None else [devices.ONE_INSTANCE] if len(masks) > 1 else []
    assert told["untold"] == wanted


def test_facts_are_left_out_where_cudas_order_is_unknown() -> None:
    mixed = [RECORDED[0], {**RECORDED[1], "name": "NVIDIA T4"}]
    assert "name" not in devices.visible(mixed, {})[0]
    assert devices.visible(mixed, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})[1]["name"] == "NVIDIA T4"


def test_the_manual_names_every_command_of_the_terminal() -> None:
    page = (places.ROOT / "docs" / "commands.md").read_text()
    section = page.partition("## From a terminal\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(?:python -m nbddp )?([a-z]+)`", section))
    assert named == set(commands.known("python -m nbddp"))
