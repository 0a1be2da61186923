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

from nbddp.agent import stop
from nbddp.capabilities.slurm import allocation, command
from nbddp.capabilities.slurm.command import look
from nbddp.errors import BadInput, CommandStopped, PoolError
from nbddp.export import Job, Launch, sbatch_script
from tests.hosts import slurm_hosts
from tests.kernels import Kernel

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
        return command.follow(job, shown.show, shown.progress, cancels)


@pytest.mark.more
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
    job, shown = command.submit("job.sbatch", []), Shown()
    assert follow(job, shown) == f"Slurm job {job} completed; its log is {here}/my {job}.out"
    assert "ranks 2 ['a b']\n" in shown.text
    assert shown.text == (here / f"my {job}.out").read_text()
    assert any(f"Slurm job {job} is running on n" in state for state in shown.states)


def test_a_job_that_fails_is_an_error_with_its_log(here: Path) -> None:
    (here / "bad.sh").write_text('#!/bin/bash\n#SBATCH --output=bad.out\necho "got $1"; exit 3\n')
    job, shown = command.submit("bad.sh", ["x y"]), Shown()
    with pytest.raises(PoolError) as e:
        follow(job, shown)
    assert str(e.value) == f"Slurm job {job} has failed with exit code 3; its log is {here}/bad.out"
    assert shown.text == "got x y\n"


def test_a_file_of_its_own_for_stderr_is_followed_and_named(here: Path) -> None:
    (here / "bad.sh").write_text(
        "#!/bin/bash\n#SBATCH --output=bad.out\n#SBATCH --error='bad x.err'\necho begun\n"
        "python -c 'raise ValueError(\"broken\")'\n"
    )
    job, shown = command.submit("bad.sh", []), Shown()
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
        command.submit("no.sh", [])


@pytest.mark.parametrize("cancels", [True, False])
def test_stop_says_what_it_did_to_the_job(here: Path, cancels: bool) -> None:
    (here / "long.sh").write_text("#!/bin/bash\n#SBATCH --output=long.out\necho begun; sleep 600\n")
    job = command.submit("long.sh", [])
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
        assert f"Slurm job {job} keeps running; %ddp submit --follow {job} follows it" in str(e.value)
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
