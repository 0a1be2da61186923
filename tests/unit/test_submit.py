"""`%ddp submit`: tables of Slurm's answers; on a real Slurm a job is followed to its end, its failure and its Stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbddp.capabilities.completion.lines import complete_command
from nbddp.capabilities.slurm import command
from nbddp.capabilities.slurm.command import JobLog, JobStatus, look, number_of
from nbddp.errors import BadInput
from nbddp.notebook.commands import parse_command

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
    assert found == JobStatus(
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
        (JobStatus(7, "PENDING", "Resources"), "Slurm job 7 is waiting: nodes are not free yet (Resources)"),
        (JobStatus(7, "RUNNING", nodes="n1"), "Slurm job 7 is running on n1"),
    ],
)
def test_the_state_is_worded(found: JobStatus, words: str) -> None:
    assert (found.describe(), found.over) == (words, False)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (JobStatus(7, "COMPLETED", code="0:0"), "Slurm job 7 completed"),
        (JobStatus(7, "FAILED", code="0:9"), "Slurm job 7 has failed by signal 9"),
        (JobStatus(7, "TIMEOUT", code="0:15"), "Slurm job 7 has reached its time limit"),
        (JobStatus(7, "CANCELLED", code="0:15"), "Slurm job 7 was cancelled"),
        (JobStatus(7, "OUT_OF_MEMORY"), "Slurm job 7 was stopped because it used more memory than it was allowed"),
        (JobStatus(7, "NEW_STATE"), "Slurm job 7 ended as new_state"),
    ],
)
def test_every_end_is_worded(found: JobStatus, words: str) -> None:
    assert found.over
    assert found.ending() == words


@pytest.mark.parametrize(("said", "number"), [("12\n", 12), ("12;cluster\n", 12), ("Submitted", None), ("", None)])
def test_sbatchs_number_is_read(said: str, number: int | None) -> None:
    assert number_of(said) == number


def test_a_log_is_read_piece_by_piece(tmp_path: Path) -> None:
    log = JobLog()
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
    with pytest.raises(BadInput, match=r"^there is no file 'a.sbatch'; %ddp export train.py --to slurm -o job.sbatch"):
        command.submit("a.sbatch", [])
    (tmp_path / "job.sbatch").write_text("#!/bin/sh\n")
    with pytest.raises(BadInput, match=r"^there is no file 'a.sbatch'; similar files: job.sbatch"):
        command.submit("a.sbatch", [])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match=r"^sbatch is not on PATH, so this is not a Slurm login node"):
        command.submit("job.sbatch", [])
    assert complete_command("submit j") == ["job.sbatch"]
    line = parse_command("submit --on-stop leave job.sbatch --lr 0.1")
    assert line.args == {"script": "job.sbatch", "words": ["--lr", "0.1"], "follow": None, "detach": False,
                            "on_stop": "leave"}  # fmt: skip
