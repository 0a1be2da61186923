"""The environment of a `%%ddp` cell against that of real torchrun, name by name, and the rendezvous."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.begun import PROGRAM
from tests.kernels import Kernel
from tests.ports import held_port

DUMP = """
import json, os, sys, torch
facts = {"env": dict(os.environ), "threads": torch.get_num_threads(), "main": __name__}
json.dump(facts, open(os.path.join(sys.argv[1], os.environ["RANK"] + ".json"), "w"))
"""

# One of ours is allowed to differ (a worker here outlives a failed collective); the others are
# facts of a launch: ports, ids and files.
MAY_DIFFER = {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}
OF_A_LAUNCH = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}


def torchrun(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    script = folder / "dump.py"
    script.write_text(DUMP)
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "PYTEST_CURRENT_TEST")}
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(folder)]
    return subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def read(folder: Path) -> dict[int, dict[str, object]]:
    return {int(f.stem): json.loads(f.read_text()) for f in folder.glob("*.json")}


def added(facts: dict[str, object]) -> dict[str, str]:
    """Variables that the launcher set: those that the test's own process does not have with that value."""
    env = facts["env"]
    assert isinstance(env, dict)
    return {k: v for k, v in env.items() if os.environ.get(k) != v}


def compare(ours: dict[int, dict[str, object]], theirs: dict[int, dict[str, object]], launch: set[str]) -> None:
    assert sorted(ours) == sorted(theirs)
    for rank, facts in theirs.items():
        wanted, got = added(facts), ours[rank]["env"]
        assert isinstance(got, dict)
        missing = {k for k in wanted if k not in got} - {"PYTEST_CURRENT_TEST"}
        assert not missing, f"rank {rank} lacks {missing}"
        for name in set(wanted) - MAY_DIFFER - launch:
            assert got[name] == wanted[name], f"rank {rank}: {name}"
        assert ours[rank]["threads"] == facts["threads"], f"rank {rank}: torch threads"
        assert ours[rank]["main"] == facts["main"] == "__main__"


def older(theirs: dict[int, dict[str, object]]) -> set[str]:
    """Older torchruns (2.10 does) give the loopback address by number where newer ones, and we, give its name."""
    env = theirs[0]["env"]
    assert isinstance(env, dict)
    return {"MASTER_ADDR"} if env["MASTER_ADDR"] == "127.0.0.1" else set()


@pytest.mark.torchrun
@pytest.mark.parametrize("nproc", [1, 4])  # two are in test_each_process_begins_as_one_that_torchrun_starts
def test_one_node_equals_torchrun(new_kernel: Kernel, tmp_path: Path, nproc: int) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    assert torchrun(theirs, "--nproc-per-node", str(nproc)).wait(100) == 0
    new_kernel.run("import os; os.environ.pop('OMP_NUM_THREADS', None)")
    shown = new_kernel.run(f"%%ddp --nproc {nproc} -- {ours}\n{DUMP}")
    assert shown.ok, shown.error
    compare(read(ours), read(theirs), OF_A_LAUNCH | older(read(theirs)))


@pytest.mark.torchrun
def test_two_simulated_nodes_equal_two_torchrun_agents(new_kernel: Kernel, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    with held_port() as port:
        agents = [
            torchrun(
                theirs, "--nnodes", "2", "--node-rank", str(n), "--nproc-per-node", "2",
                "--master-addr", "127.0.0.1", "--master-port", str(port),
            )
            for n in range(2)
        ]  # fmt: skip
        assert [a.wait(100) for a in agents] == [0, 0]
    shown = new_kernel.run(f"%%ddp --nnodes 2 --nproc 2 -- {ours}\n{DUMP}")
    assert shown.ok, shown.error
    compare(read(ours), read(theirs), OF_A_LAUNCH | {"MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"})


@pytest.mark.more
def test_a_users_thread_count_wins(new_kernel: Kernel) -> None:
    new_kernel.run("import os; os.environ['OMP_NUM_THREADS'] = '2'")
    shown = new_kernel.run(
        "%%ddp --nproc 2\nimport os, torch; print(os.environ['OMP_NUM_THREADS'], torch.get_num_threads())"
    )
    assert shown.text() == "ranks 0–1 │ 2 2\n"


def test_a_variable_that_torch_reads_at_import_is_there_before_it(new_kernel: Kernel) -> None:
    new_kernel.run("import os; os.environ['TORCH_DISTRIBUTED_DEBUG'] = 'INFO'")
    shown = new_kernel.run("%%ddp --nproc 2\nimport torch.distributed as dist\nprint(dist.get_debug_level())")
    assert shown.text() == "ranks 0–1 │ DebugLevel.INFO\n"


def test_cpu_workers_speak_over_loopback_only(four: Kernel) -> None:
    shown = four.run(
        "%%ddp\nimport os, psutil, torch, torch.distributed as dist\n"
        "dist.init_process_group(); dist.all_reduce(torch.ones(1))\n"
        "p = psutil.Process(); connections = getattr(p, 'net_connections', None) or p.connections\n"  # psutil 5.9
        "own = {c.laddr.ip for c in connections('inet')}\n"
        "print(os.environ['GLOO_SOCKET_IFNAME'], {a.removeprefix('::ffff:') for a in own})\n"
        "dist.destroy_process_group()"
    )
    assert shown.text() == "ranks 0–3 │ lo {'127.0.0.1'}\n"


INIT = "import torch, torch.distributed as dist\n"
SUM = "t = torch.ones(1); dist.all_reduce(t); print(int(t.item()))\n"


def test_init_and_destroy_again_and_again(four: Kernel) -> None:
    for _ in range(10):
        shown = four.run(f"%%ddp\n{INIT}dist.init_process_group()\n{SUM}dist.destroy_process_group()")
        assert shown.text() == "ranks 0–3 │ 4\n", shown.error


def test_twice_in_one_cell_after_destroy(four: Kernel) -> None:
    once = f"dist.init_process_group()\n{SUM}dist.destroy_process_group()\n"
    assert four.run(f"%%ddp\n{INIT}{once}{once}").text() == "ranks 0–3 │ 4\n          │ 4\n"


def test_forgotten_destroy_does_no_harm(four: Kernel) -> None:
    for _ in range(4):
        assert four.run(f"%%ddp\n{INIT}dist.init_process_group()\n{SUM}").text() == "ranks 0–3 │ 4\n"
    four.run("%%ddp\ndist.destroy_process_group()")


def test_group_stays_usable_in_the_next_cells(four: Kernel) -> None:
    four.run(f"%%ddp\n{INIT}dist.init_process_group()")
    for _ in range(3):
        assert four.run(f"%%ddp\n{SUM}").text() == "ranks 0–3 │ 4\n"
    new = four.run(
        "%%ddp\ng = dist.new_group([0, 1]); t = torch.ones(1)\n"
        "if dist.get_rank() < 2: dist.all_reduce(t, group=g)\nprint(int(t))"
    )
    assert new.text() == "ranks 0–1 │ 2\nranks 2–3 │ 1\n", new.error
    four.run("%%ddp\ndist.destroy_process_group()")


def test_group_survives_an_error_that_all_ranks_make_alike(four: Kernel) -> None:
    four.run(f"%%ddp\n{INIT}dist.init_process_group()")
    assert not four.run("%%ddp\nno_such_name").ok
    assert four.run(f"%%ddp\n{SUM}").text() == "ranks 0–3 │ 4\n"
    four.run("%%ddp\ndist.destroy_process_group()")


def test_init_again_after_a_failed_run(four: Kernel) -> None:
    shown = four.run(f"%%ddp\n{INIT}dist.init_process_group()\nif dist.get_rank() == 1: raise ValueError\n")
    assert not shown.ok
    assert four.run(f"%%ddp\n{INIT}dist.init_process_group()\n{SUM}dist.destroy_process_group()").text() == (
        "ranks 0–3 │ 4\n"
    )


def test_second_init_within_a_cell_is_torchs_own_error(four: Kernel) -> None:
    shown = four.run(f"%%ddp\n{INIT}dist.init_process_group()\ndist.init_process_group()")
    assert "trying to initialize the default process group twice" in shown.evalue
    four.run("%%ddp\ndist.destroy_process_group()")


def test_a_cell_may_set_its_own_address_and_port(four: Kernel) -> None:
    with held_port() as port:
        shown = four.run(
            f"%%ddp\nimport os\nos.environ['MASTER_ADDR'], os.environ['MASTER_PORT'] = '127.0.0.1', '{port}'\n"
            f"{INIT}dist.init_process_group('gloo')\n{SUM}dist.destroy_process_group()"
        )
    assert shown.text() == "ranks 0–3 │ 4\n", shown.error


def test_a_failed_run_leaves_its_store_behind(four: Kernel) -> None:
    ports = []
    for failing in (False, True, False):
        four.run("%%ddp -o port\nimport os; os.environ['MASTER_PORT']")
        ports.append(four.run("print(set(port))").text())
        if failing:
            four.run("%%ddp\n1 / 0")
    assert ports[0] == ports[1] != ports[2]


@pytest.mark.torchrun
def test_a_hundred_groups_leave_no_descriptors_behind(four: Kernel) -> None:
    count = "import os; len(os.listdir('/proc/self/fd'))"
    four.run(f"%%ddp\n{INIT}dist.init_process_group()\n{SUM}dist.destroy_process_group()")
    four.run(f"%%ddp -o before\n{count}")
    for _ in range(100):
        assert four.run(f"%%ddp\n{INIT}dist.init_process_group()\n{SUM}dist.destroy_process_group()").ok
    four.run(f"%%ddp -o after\n{count}")
    assert four.run("print(max(b - a for a, b in zip(before, after)) <= 2)").text() == "True\n"


def begun(folder: Path) -> list[dict[str, dict[str, object]]]:
    """What the processes have written that ran `tests.contract.begun`, by rank."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(list(folder.glob("*.json"))))]


@pytest.mark.parametrize("spawns", [False, pytest.param(True, marks=pytest.mark.torchrun)], ids=["", "spawned too"])
def test_each_process_begins_as_one_that_torchrun_starts(new_kernel: Kernel, tmp_path: Path, spawns: bool) -> None:
    """What it draws is its own in cells, after --fresh, in scripts, in replaced ranks; what it is given is equal, and
    so are a cell's variables. Only spawned ranks have interpreters of their own, which hash strings differently
    (docs/limits.md)."""
    script, theirs, ours = tmp_path / "begun.py", tmp_path / "theirs", tmp_path / "ours"
    script.write_text(PROGRAM)
    (tmp_path / "dumps.py").write_text(DUMP + PROGRAM)
    theirs.mkdir()
    ours.mkdir()
    ways = ("torchrun", "cell", "fresh", "replaced", "script", "torchrun line", *["spawned"] * spawns)
    folders = [tmp_path / name for name in ways]
    for folder in folders:
        folder.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "PYTEST_CURRENT_TEST")}
    said = {"TZ": "Asia/Tokyo", "TMPDIR": str(tmp_path), "BEGUN": str(folders[0])}
    program = [str(tmp_path / "dumps.py"), str(theirs)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *program]
    subprocess.run(command, env={**env, **said}, cwd=tmp_path, check=True, capture_output=True)
    new_kernel.run(f"import os; os.environ.pop('OMP_NUM_THREADS', None); os.environ.update({said})")
    cells = [f"%%ddp {options}\n{PROGRAM}" for options in ("--nproc 2", "--fresh", "")]
    scripts = [f"%ddp run {script}", f"%ddp torchrun --nproc-per-node 2 {script}"]
    spawned = [f"%%ddp --nproc 2 --start-method spawn\n{PROGRAM}"] * spawns
    for folder, cell in zip(folders[1:], [*cells, *scripts, *spawned], strict=True):
        if folder.name == "replaced":
            assert not new_kernel.run("%%ddp\nimport os; os._exit(3)").ok
        new_kernel.run(f"os.environ['BEGUN'] = {str(folder)!r}")
        shown = new_kernel.run(cell)
        assert shown.ok, (folder.name, shown.error)
        if folder.name == "cell":
            assert new_kernel.run(f"%%ddp -- {ours}\n{DUMP}").ok
    compare(read(ours), read(theirs), OF_A_LAUNCH | {"BEGUN"} | older(read(theirs)))
    found = {folder.name: begun(folder) for folder in folders}
    assert all(len(ranks) == 2 for ranks in found.values())
    for name in found["cell"][0]["drawn"]:
        unlike = ("torchrun", *["spawned"] * spawns) if name == "hash" else ways
        values = [str(rank["drawn"][name]) for way in unlike for rank in found[way]]
        assert len({*values}) == len(values), (name, values)
    for way, ranks in found.items():
        for rank, theirs in zip(ranks, found["torchrun"], strict=True):
            assert rank["given"] == theirs["given"], way


def test_ddp_trains_equally_on_all_ranks(four: Kernel) -> None:
    shown = four.run(
        f"%%ddp\n{INIT}from torch.nn.parallel import DistributedDataParallel as DDP\ndist.init_process_group()\n"
        "torch.manual_seed(dist.get_rank())\nmodel = DDP(torch.nn.Linear(8, 4))\n"
        "opt = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(5):\n    opt.zero_grad(); model(torch.randn(16, 8)).square().mean().backward(); opt.step()\n"
        "print(sum(p.double().sum().item() for p in model.parameters()))\ndist.destroy_process_group()"
    )
    assert shown.text().startswith("ranks 0–3 │ "), shown.text() + shown.error
