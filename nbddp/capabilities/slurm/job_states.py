"""A batch job from sbatch to its end: what Slurm's commands say of it → states and sentences. Pure.

The formats are those of sbatch(1) and scontrol(1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nbddp.capabilities.slurm import commands

WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
RUNS = ("RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "SIGNALING", "RESIZING", "STOPPED")
DONE = "COMPLETED"
ENDS = {  # of a batch job
    DONE: "completed",
    "BOOT_FAIL": "could not start: its nodes did not boot",
}


@dataclass(frozen=True)
class JobStatus:
    """What is known of a job at one moment. code: Slurm's `ExitCode`, as `exit code:signal`. log, errors: files of
    its two streams; errors is empty if both go to one."""

    job: int
    state: str
    reason: str = ""
    start: str = ""
    nodes: str = ""
    code: str = ""
    log: str = ""
    errors: str = ""

    @property
    def over(self) -> bool:
        return self.state not in (*WAITS, *RUNS)

    @property
    def waits(self) -> bool:
        return self.state in WAITS

    def words(self) -> str:
        """As it is shown while it is followed."""
        if self.waits:
            return commands.waiting_words(self.job, f"{self.state}|{self.reason}|{self.start}")
        return f"Slurm job {self.job} is {self.state.lower()} on {self.nodes}"

    def logs(self) -> str:
        """Where its output is."""
        errors = f", and its stderr is in {self.errors}" if self.errors else ""
        return f"its log is {self.log or 'not known'}{errors}"

    def ending(self) -> str:
        """How it has ended."""
        what = ENDS.get(self.state) or commands.STATES.get(self.state) or f"ended as {self.state.lower()}"
        status, _, signal = self.code.partition(":")
        how = f" by signal {signal}" if signal.strip("0") else f" with exit code {status}" if status.strip("0") else ""
        return f"Slurm job {self.job} {what}{how * (self.state == 'FAILED')}"


def number_of(said: str) -> int | None:
    """The job's number, from `sbatch --parsable`: `12`, or `12;cluster`."""
    found = re.match(r"(\d+)(;|\s|$)", said)
    return int(found[1]) if found else None


def look(job: int, record: str) -> JobStatus:
    """record: what `scontrol show job N` prints; values with blanks are on lines of their own."""
    found = _fields(record)
    out, errors = found.get("StdOut", ""), found.get("StdErr", "")
    return JobStatus(
        job, found.get("JobState", ""), found.get("Reason", ""), found.get("StartTime", ""),
        found.get("NodeList", ""), found.get("ExitCode", ""), out, "" if errors == out else errors,
    )  # fmt: skip


def _fields(record: str) -> Mapping[str, str]:
    found = commands.fields(record)
    whole = dict(re.findall(r"^\s*(StdOut|StdErr)=(.+)$", record, re.MULTILINE))
    return {**found, **{name: path.strip() for name, path in whole.items()}}
