"""torchrun's command line as it is understood behind `%ddp`: flags, spellings, `PET_*`, and what is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbddp.capabilities.completion.lines import complete_command
from nbddp.capabilities.scripts import torchrun
from nbddp.capabilities.scripts.logs import LogOptions
from nbddp.errors import BadInput
from nbddp.launch.options import HelpAsked
from nbddp.notebook.commands import CommandLine, command_parser, parse_command
from nbddp.pool.pool import WorkerPool


def test_no_flag_has_two_answers() -> None:
    tables = [*torchrun.HONOURED, *torchrun.NOTED, *torchrun.REFUSED]
    assert len(tables) == len(set(tables))


def asked(line: str, monkeypatch: pytest.MonkeyPatch | None = None, **env: str) -> CommandLine:
    for name, value in env.items():
        assert monkeypatch is not None
        monkeypatch.setenv(name, value)
    return parse_command(line)


def test_a_pasted_line_is_a_launch() -> None:
    spec = asked("torchrun --standalone --nproc_per_node=4 --max-restarts=3 train.py --lr 0.1 -m x").launch
    assert (spec.nproc, spec.nnodes, spec.max_restarts, spec.fresh) == (4, None, 3, True)
    assert spec.program is not None
    assert (spec.program.target, spec.program.module, spec.argv) == ("train.py", False, ("--lr", "0.1", "-m", "x"))


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nproc-per-node 2 -m pack.tool a",
        "/opt/venv/bin/torchrun --nproc_per_node 2 -m pack.tool a",
        "python -m torch.distributed.run --nproc-per-node=2 --module pack.tool a",
        "python3.11 -u -m torch.distributed.run --nproc-per-node=2 -m pack.tool a",
        "python /usr/lib/torch/distributed/run.py --nproc-per-node=2 -m pack.tool a",
        "torchrun --nproc-per-n 2 -m pack.tool a",
        "!torchrun --nproc-per-node 2 -m pack.tool a",
        "! python -m torch.distributed.run --nproc-per-node 2 -m pack.tool a",
        "PET_NPROC_PER_NODE=2 torchrun -m pack.tool a",
    ],
)
def test_each_way_of_typing_it_is_the_same_launch(line: str) -> None:
    command = asked(line)
    assert command.launch == asked("torchrun --nproc-per-node=2 -m pack.tool a").launch
    assert command.launch.program is not None
    assert command.launch.program.module
    assert not command.launch.program.local_rank


@pytest.mark.parametrize(
    ("line", "local_rank"),
    [
        ("python -m torch.distributed.launch --nproc_per_node=2 train.py", "--local-rank"),
        ("python /path/to/launch.py --nnode=1 --node_rank=0 --nproc_per_node=8 example.py", "--local-rank"),
        ("python -m torch.distributed.launch --use-env train.py", ""),
        ("python -m torch.distributed.launch --use_env train.py", ""),
    ],
)
def test_launch_gives_each_rank_its_local_rank(line: str, local_rank: str) -> None:
    program = asked(line).launch.program
    assert program is not None
    assert program.local_rank == local_rank
    assert program.argv(("--lr", "1"), 3) == ([f"{local_rank}=3"] if local_rank else []) + ["--lr", "1"]


@pytest.mark.parametrize(
    "line",
    [
        "OMP_NUM_THREADS=1 NCCL_DEBUG='a b' torchrun --nproc-per-node 2 train.py",
        "env OMP_NUM_THREADS=1 NCCL_DEBUG='a b' python -m torch.distributed.run --nproc-per-node 2 train.py",
        "!OMP_NUM_THREADS=1 NCCL_DEBUG='a b' torchrun --nproc-per-node 2 train.py",
        "torchrun --env OMP_NUM_THREADS=1 --env NCCL_DEBUG='a b' --nproc-per-node 2 train.py",
    ],
)
def test_variables_before_a_pasted_line_are_those_of_the_ranks(line: str) -> None:
    spec = asked(line).launch
    assert spec.env == (("OMP_NUM_THREADS", "1"), ("NCCL_DEBUG", "a b"))
    assert (spec.nproc, spec.argv) == (2, ())


def test_a_variable_that_the_pool_sets_is_refused_in_a_sentence() -> None:
    with pytest.raises(BadInput, match="torchrun --env: the pool sets RANK for each rank"):
        asked("RANK=1 torchrun train.py")


def test_what_is_pasted_and_is_no_torchrun_is_named_as_typed() -> None:
    for line in ("A=1 python train.py", "!ls"):
        with pytest.raises(BadInput, match=f"has no subcommand '{line.split()[0]}'"):
            asked(line)


def test_a_terminals_answers_name_its_own_options() -> None:
    words = ["torchrun", "--rdzv-endpoint", "h:1", "train.py"]
    assert "%ddp start --hosts nodea,nodeb names machines" in parse_command(words).notes[0]
    assert "python -m nbddp run --hosts nodea" in parse_command(words, "python -m nbddp").notes[0]


def test_torchruns_macro_is_carried_out() -> None:
    program = asked("torchrun train.py").launch.program
    assert program is not None
    assert program.argv(("--out=${local_rank}.txt", "$other"), 2) == ["--out=2.txt", "$other"]


def test_defaults_are_torchruns_and_pet_variables_come_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked("torchrun train.py").launch.nproc == 1
    command = asked(
        "torchrun train.py", monkeypatch, PET_NPROC_PER_NODE="3", PET_MAX_RESTARTS="2", PET_VIRTUAL_LOCAL_RANK="1",
        PET_STANDALONE="0", PET_NNODES="1:2", PET_TEE="3", PET_RDZV_ENDPOINT="nodea:29400",
    )  # fmt: skip
    spec = command.launch
    assert (spec.nproc, spec.max_restarts, spec.visible, spec.elastic) == (3, 2, "own", (1, 2))
    assert spec.logs is not None
    assert spec.logs.written(7) == {"stdout", "stderr"}
    assert command.notes[0].startswith("--rdzv-endpoint: the pool starts a new store")
    assert asked("torchrun --nproc-per-node 5 train.py").launch.nproc == 5
    monkeypatch.setenv("PET_STANDALONE", "yes")
    with pytest.raises(BadInput, match="PET_STANDALONE is 'yes'; it is a switch, so set it to 1 or 0"):
        asked("torchrun train.py")


def test_what_a_launch_says_of_its_ranks_goes_with_the_program() -> None:
    line = "torchrun --rdzv-id job7 --role trainer --signals-to-handle SIGTERM,SIGUSR1 --shutdown-timeout 5 train.py"
    spec = asked(line).launch
    assert spec.program is not None
    assert (spec.program.run_id, spec.program.role, spec.program.signals, spec.shutdown_timeout) == (
        "job7", "trainer", "SIGTERM,SIGUSR1", 5.0,
    )  # fmt: skip
    standalone = asked("torchrun --standalone --rdzv-id job7 train.py").launch.program
    assert standalone is not None
    assert standalone.run_id == "", "torchrun ignores it too"


def test_logs_are_those_of_torchrun() -> None:
    line = (
        "torchrun --log-dir logs -r 0:1,1:2 --tee 1:3 --local-ranks-filter 1 --duplicate-stdout-filters a,b,,c train.py"
    )
    logs = asked(line).launch.logs
    assert logs is not None
    assert (logs.folder, logs.only, logs.filters) == ("logs", (1,), (("a", "b,c"), ()))
    assert [sorted(logs.written(r)) for r in range(3)] == [["stdout"], ["stderr", "stdout"], []]
    assert [sorted(logs.unseen(r)) for r in range(3)] == [["stderr", "stdout"], [], ["stderr", "stdout"]]
    cell = parse_command("run --redirects 1 train.py").launch.logs
    assert cell == LogOptions(redirects={None: frozenset({"stdout"})})


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            "--rdzv-backend=c10d --rdzv-endpoint h:1",
            "--rdzv-backend, --rdzv-endpoint: the pool starts a new store for each run",
        ),
        (
            "--master_addr h --master_port 29500",
            "--master-addr, --master-port: the pool starts a new store for each run",
        ),
        ("--start-method spawn", "--start-method: torchrun itself ignores it for scripts; %ddp start --start-method"),
        ("--monitor-interval 1", "--monitor-interval: the operating system reports an exit to the pool at once"),
        ("--numa-binding node", "--numa-binding: a worker uses the cores of the notebook kernel"),
        ("--event-log-handler console", "--event-log-handler: torchrun's agent does not run"),
        ("--run-path", "--run-path: a rank of a pool always runs the script in its own interpreter"),
        ("--local-addr ::1", "--local-addr: the pool finds the addresses"),
    ],
)
def test_what_has_no_meaning_here_is_answered_beside_the_run(option: str, words: str) -> None:
    command = asked(f"torchrun {option} train.py")
    assert len(command.notes) == 1
    assert command.notes[0].startswith(words)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("torchrun --no-python tool", "--no-python: a rank of a pool is a Python process"),
        ("torchrun --logs-specs mine train.py", "--logs-specs: torchrun's plug-ins for logs run in its agent"),
        ("torchrun --nnodes 2 --node-rank 1 train.py", "--node-rank: one command starts all nodes of a pool"),
        ("torchrun --nproc-per-node xpu train.py", "'xpu' is not a number of workers"),
        ("torchrun --tee 5 train.py", "'5' names no streams; use 1"),
        ("torchrun --signals-to-handle TERM train.py", "'TERM' is not a signal on this system"),
        ("torchrun --local-ranks-filter a train.py", "'a' is not a list of local ranks"),
        ("torchrun", "torchrun needs SCRIPT; write it as %ddp torchrun [options] SCRIPT [arguments]"),
        ("torchrun --no train.py", "--no abbreviates --node-rank and --no-python; write one of them"),
        ("torchrun --node-rank one train.py", "--node-rank cannot read 'one'; write it as --node-rank X"),
        ("torchrun --nproc_per_nod=2 --stand train.py --x", None),
        ("torchrun --nproc_per_nod 2 --local-r 0 train.py --no", None),
        ("torchrun --nprok 2 train.py", "has no option --nprok"),
        ("run --nproc_per_nod=2 train.py", "has no option --nproc_per_nod; did you mean --nproc_per_node?"),
        ("run --keep --max-restarts 2 train.py", "starts new processes, so --keep cannot work"),
        ("run --shutdown-timeout soon train.py", "'soon' is not a time in seconds"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(line: str, words: str | None) -> None:
    if words is None:
        assert asked(line).launch.nproc == 2
        return
    with pytest.raises(BadInput) as found:
        asked(line)
    assert words in str(found.value)


def test_options_after_the_script_are_its_own() -> None:
    spec = asked("run -n 2 'my script.py' --nproc 7 -- -m").launch
    assert spec.program is not None
    assert (spec.nproc, spec.program.target, spec.argv) == (2, "my script.py", ("--nproc", "7", "--", "-m"))


def test_help_is_an_answer() -> None:
    for line in ("run --help", "torchrun --help", "launch -h"):
        with pytest.raises(HelpAsked) as found:
            asked(line)
        assert "SCRIPT" in found.value.text


@pytest.mark.parametrize("form", [torchrun.TORCHRUN, torchrun.LAUNCH])
def test_help_has_a_text_for_every_flag(form: str) -> None:
    parser = command_parser(form)
    assert [action.dest for action in parser._actions if not action.help] == []
    text = " ".join(parser.format_help().split())
    assert "refused: a rank of a pool is a Python process" in text
    assert "no effect: the pool starts a new store for each run" in text


def test_the_script_is_completed_behind_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.py", "my test.py", "notes.txt", "tools/tool.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert complete_command("run t") == ["tools/", "train.py"]
    assert complete_command("run --nproc 2 tools/") == ["tools/tool.py"]
    assert complete_command("torchrun --standalone my") == ["my\\ test.py"]
    assert complete_command("python -m torch.distributed.run tr") == ["train.py"]
    assert complete_command("run --keep-") == ["--keep-warm", "--keep-alive"]
    assert complete_command("run --nproc ") == ["auto", "gpu", "cpu"]
    assert complete_command("torchrun --nproc-per-node ") == ["auto", "gpu", "cpu"]
    assert complete_command("run train.py t") is None, "which IPython completes"
    assert complete_command("run -m tr") is None, "a module, which IPython completes"
    assert "train.py" in complete_command("run ")
    assert "--keep" in complete_command("run ")


@pytest.mark.parametrize("typed", ["--debug info", "--debug", "--trace x.json", "--trace", "--slurm 12", "--slurm"])
def test_the_script_is_completed_behind_an_option_whose_value_may_be_missing(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    found = complete_command(f"run {typed} ")
    assert "train.py" in found
    assert "--nproc" in found
    assert complete_command(f"run {typed} tr") == ["train.py"]
    assert complete_command(f"run {typed} train.py ") is None


def test_a_files_option_offers_files_and_others_offer_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.py", "work.ipynb", "job.sbatch", "tools/tool.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert complete_command("export --notebook ") == ["tools/", "work.ipynb"]
    assert complete_command("export --rendezvous ") == ["c10d", "static", "srun"]
    assert complete_command("submit --on-stop ") == ["cancel", "leave"]
    assert complete_command("submit --follow ") == []
    assert complete_command("run --log-dir ") == ["tools/"]
    assert complete_command("run --ssh-config ") == ["job.sbatch", "tools/", "train.py", "work.ipynb"]
    assert complete_command("run --timeout ") == []
    assert complete_command("submit jo") == ["job.sbatch"]
    assert complete_command("submit job.sbatch jo") is None, "its arguments, which IPython completes"
    assert complete_command("export work.py --output jo") == ["job.sbatch"]
    assert complete_command("bench all_reduce all") == ["all_gather", "all_to_all"], "not the same once more"


def test_flags_of_a_newer_torchrun_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    command = asked("torchrun --log-line-prefix-template '${hostname}: ' train.py")
    assert command.notes == (
        "--log-line-prefix-template: each line is shown under its rank, so torchrun's prefix is not written",
    )
    for line in ("torchrun --print-completion bash", "torchrun --print_completion=zsh"):
        with pytest.raises(BadInput, match="nbddp does not print shell completions; use !torchrun --print-completion"):
            asked(line)
    monkeypatch.setenv("PET_LOG_LINE_PREFIX_TEMPLATE", "${rank}")
    monkeypatch.setenv("PET_PRINT_COMPLETION", "zsh")  # torchrun reads no variable for it
    assert asked("torchrun train.py").notes == command.notes


def test_torchcomms_is_refused_with_a_reason() -> None:
    with pytest.raises(BadInput, match="cannot inspect or unblock ranks in torchcomms; remove TORCH"):
        asked("start --env TORCH_DISTRIBUTED_USE_TORCHCOMMS=1")
    with pytest.raises(BadInput, match="cannot inspect or unblock ranks in torchcomms"):
        asked("start --env TORCH_DISTRIBUTED_USE_TORCHCOMMS=false")  # torch takes it for a yes
    assert asked("start --env TORCH_DISTRIBUTED_USE_TORCHCOMMS=0").launch.env


WHOLE, PLACEHOLDER, MISSING = ("__init__.py", "hooks.py"), ("__init__.py",), ()


@pytest.mark.parametrize(
    ("value", "installed", "told"),
    [
        ("1", WHOLE, True), ("false", WHOLE, True), ("0", WHOLE, False), ("", WHOLE, False), ("1", PLACEHOLDER, False),
        ("1", MISSING, False),
    ],
)  # fmt: skip
def test_torchcomms_of_the_kernel_is_told_where_torch_uses_it(
    value: str, installed: tuple[str, ...], told: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch ignores the variable where it cannot import torchcomms, as PyPI's placeholder."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_USE_TORCHCOMMS", value)
    (tmp_path / "torchcomms").mkdir()
    for name in installed:
        (tmp_path / "torchcomms" / name).write_text("raise ImportError\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = [line for line in WorkerPool().shortcomings() if "TORCHCOMMS" in line]
    assert [line.partition(",")[0] for line in said] == [
        "TORCH_DISTRIBUTED_USE_TORCHCOMMS replaces torch's process groups"
    ] * told
