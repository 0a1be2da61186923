"""`%ddp submit`: tables of Slurm's answers; on a real Slurm a job is followed to its end, its failure and its Stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbddp.agent import allocation
from nbddp.base import stop
from nbddp.errors import BadInput, CommandStopped, PoolError
from nbddp.export import Job, Launch, sbatch_script
from nbddp.front import submitting
from nbddp.front.commands import complete_command, parse_command
from nbddp.front.submitting import Log
from nbddp.plan.submitted import Look, look, number_of
from tests import slurm_hosts
from tests.kernels import Kernel

# -- tables ------------------------------------------------------------------------------------------

RECORD = """JobId=12 JobName=it's a job
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState=FAILED Reason=NonZeroExitCode Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=3:0
   StartTime=2026-01-02T03:04:05 EndTime=Unknown
   NodeList=n[1-2]
   StdErr=/home/me/my log 12.out
   StdIn=/dev/null
   StdOut=/home/me/my log 12.out
"""


def test_a_record_of_slurms_is_read_with_blanks_in_the_logs_path() -> None:
    found = look(12, RECORD)
    assert found == Look(
        12, "FAILED", "NonZeroExitCode", "2026-01-02T03:04:05", "n[1-2]", "3:0", "/home/me/my log 12.out"
    )
    assert found.over
    assert found.ending() == "Slurm job 12 has failed with exit code 3"
    assert found.logs() == "its log is /home/me/my log 12.out"
    apart = look(12, RECORD.replace("StdErr=/home/me/my log", "StdErr=/home/me/my errors"))
    assert apart.errors == "/home/me/my errors 12.out"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Look(7, "PENDING", "Resources"), "Slurm job 7 is waiting: nodes are not free yet (Resources)"),
        (Look(7, "RUNNING", nodes="n1"), "Slurm job 7 is running on n1"),
    ],
)
def test_the_state_is_worded(found: Look, words: str) -> None:
    assert (found.words(), found.over) == (words, False)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Look(7, "COMPLETED", code="0:0"), "Slurm job 7 completed"),
        (Look(7, "FAILED", code="0:9"), "Slurm job 7 has failed by signal 9"),
        (Look(7, "TIMEOUT", code="0:15"), "Slurm job 7 has reached its time limit"),
        (Look(7, "CANCELLED", code="0:15"), "Slurm job 7 was cancelled"),
        (Look(7, "OUT_OF_MEMORY"), "Slurm job 7 was ended because it used more memory than it was allowed"),
        (Look(7, "NEW_STATE"), "Slurm job 7 ended as new_state"),
    ],
)
def test_every_end_is_worded(found: Look, words: str) -> None:
    assert found.over
    assert found.ending() == words


@pytest.mark.parametrize(("said", "number"), [("12\n", 12), ("12;cluster\n", 12), ("Submitted", None), ("", None)])
def test_sbatchs_number_is_read(said: str, number: int | None) -> None:
    assert number_of(said) == number


def test_a_log_is_read_piece_by_piece(tmp_path: Path) -> None:
    log = Log()
    assert log.read() == ""
    log.path = str(tmp_path / "a log")
    assert log.read() == ""
    with open(log.path, "wb", buffering=0) as file:
        file.write("ü".encode()[:1])
        assert log.read() == ""
        file.write("ü".encode()[1:] + b"\n")
        assert log.read() == "ü\n"
    assert log.read(final=True) == ""


def test_what_cannot_be_submitted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"^there is no file a.sbatch; %ddp export train.py --to slurm -o job.sbatch"):
        submitting.submit("a.sbatch", [])
    (tmp_path / "job.sbatch").write_text("#!/bin/sh\n")
    with pytest.raises(BadInput, match=r"^there is no file a.sbatch; there is job.sbatch"):
        submitting.submit("a.sbatch", [])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match=r"^sbatch is not on PATH, so this is not a Slurm login node"):
        submitting.submit("job.sbatch", [])
    assert complete_command("submit j") == ["job.sbatch"]
    command = parse_command("submit --on-stop leave job.sbatch --lr 0.1")
    assert command.args == {"script": "job.sbatch", "words": ["--lr", "0.1"], "follow": None, "detach": False,
                            "on_stop": "leave"}  # fmt: skip


# -- a real Slurm --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if not slurm_hosts.HERE:
        pytest.skip(slurm_hosts.MISSING)
    with slurm_hosts.slurm(tmp_path_factory.mktemp("slurm")) as conf, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(conf))
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{slurm_hosts.PATH}")
        yield conf
        subprocess.run(["scancel", "--user", "root"], check=False)


@pytest.fixture
def here(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "it's here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


class Shown:
    def __init__(self, on_text: Callable[[str], None] = lambda text: None):
        self.text, self.states = "", list[str]()
        self._on_text = on_text

    def show(self, text: str) -> None:
        self.text += text
        self._on_text(self.text)

    def progress(self, text: str) -> None:
        self.states.append(text)


def follow(job: int, shown: Shown, cancels: bool = True) -> str:
    with stop.heard_at_checks():
        return submitting.follow(job, shown.show, shown.progress, cancels)


def test_a_script_that_was_exported_is_followed_to_its_end(here: Path) -> None:
    (here / "train.py").write_text(
        "import os, sys\nimport torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "if dist.get_rank() == 0: print('ranks', dist.get_world_size(), sys.argv[1:], flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    text = sbatch_script(
        Launch("train.py", ("a b",), nproc=2, gpus_per_proc=0), Job(cpus_per_proc=1, output="my %j.out")
    )
    (here / "job.sbatch").write_text(text)
    job, shown = submitting.submit("job.sbatch", []), Shown()
    assert follow(job, shown) == f"Slurm job {job} completed; its log is {here}/my {job}.out"
    assert "ranks 2 ['a b']\n" in shown.text
    assert shown.text == (here / f"my {job}.out").read_text()
    assert any(f"Slurm job {job} is running on n" in state for state in shown.states)


def test_a_job_that_fails_is_an_error_with_its_log(here: Path) -> None:
    (here / "bad.sh").write_text('#!/bin/bash\n#SBATCH --output=bad.out\necho "got $1"; exit 3\n')
    job, shown = submitting.submit("bad.sh", ["x y"]), Shown()
    with pytest.raises(PoolError) as e:
        follow(job, shown)
    assert str(e.value) == f"Slurm job {job} has failed with exit code 3; its log is {here}/bad.out"
    assert shown.text == "got x y\n"


def test_a_file_of_its_own_for_stderr_is_followed_and_named(here: Path) -> None:
    (here / "bad.sh").write_text(
        "#!/bin/bash\n#SBATCH --output=bad.out\n#SBATCH --error='bad x.err'\necho begun\n"
        "python -c 'raise ValueError(\"broken\")'\n"
    )
    job, shown = submitting.submit("bad.sh", []), Shown()
    with pytest.raises(PoolError) as e:
        follow(job, shown)
    assert str(e.value) == (
        f"Slurm job {job} has failed with exit code 1; its log is {here}/bad.out, and its stderr is in {here}/bad x.err"
    )
    assert "begun\n" in shown.text
    assert "ValueError: broken\n" in shown.text


def test_sbatchs_refusal_is_told_in_its_own_words(here: Path) -> None:
    (here / "no.sh").write_text("#!/bin/bash\n#SBATCH --partition=nowhere\n")
    with pytest.raises(BadInput, match=r"^sbatch refused no.sh: Batch job submission failed: Invalid partition name"):
        submitting.submit("no.sh", [])


@pytest.mark.parametrize("cancels", [True, False])
def test_stop_says_what_it_did_to_the_job(here: Path, cancels: bool) -> None:
    (here / "long.sh").write_text("#!/bin/bash\n#SBATCH --output=long.out\necho begun; sleep 600\n")
    job = submitting.submit("long.sh", [])
    pressed = threading.Event()

    def press(text: str) -> None:
        if "begun" in text and not pressed.is_set():
            pressed.set()
            os.kill(os.getpid(), signal.SIGINT)

    shown = Shown(press)
    with pytest.raises(CommandStopped) as e:
        follow(job, shown, cancels)
    assert "stopped by the user" in str(e.value)

    def state() -> str:
        return look(job, allocation.ask("scontrol", "show", "job", str(job))).state

    if cancels:
        assert f"Slurm job {job} was cancelled (scancel {job})" in str(e.value)
        until = time.monotonic() + 30
        while state() not in ("CANCELLED", "COMPLETING") and time.monotonic() < until:
            time.sleep(0.1)
        assert state() in ("CANCELLED", "COMPLETING")
    else:
        assert f"Slurm job {job} goes on; %ddp submit --follow {job} follows it" in str(e.value)
        assert state() == "RUNNING"
        subprocess.run(["scancel", str(job)], check=True)


def test_the_magic_shows_the_log_and_the_end(here: Path, new_kernel: Kernel) -> None:
    (here / "job.sh").write_text("#!/bin/bash\n#SBATCH --output=job.out\necho from the job\nexit $1\n")
    shown = new_kernel.run(f"import os; os.chdir({str(here)!r})\n%ddp submit job.sh 0")
    assert shown.ok, shown.error
    said = shown.text()
    assert re.search(r"^Slurm job \d+ submitted$", said, re.MULTILINE)
    assert said.endswith(
        f"from the job\n{re.findall('Slurm job [0-9]+', said)[0]} completed; its log is {here}/job.out\n"
    )
    failed = new_kernel.run("%ddp submit job.sh 4")
    assert not failed.ok
    assert "has failed with exit code 4" in failed.error
    left = new_kernel.run("%ddp submit --detach job.sh 0").text()
    number = re.findall("Slurm job ([0-9]+) submitted", left)[0]
    assert f"%ddp submit --follow {number} follows it; !scancel {number} cancels it" in left
    assert "completed" in new_kernel.run(f"%ddp submit --follow {number}").text()
