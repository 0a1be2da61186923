"""`%ddp submit`: a batch script goes to Slurm, and its state and its log are followed until it ends.

Runs sbatch, scontrol and scancel, and reads the log where Slurm says that it is. What their answers mean is
`capabilities.slurm.job_states`'s.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nbddp.agent import stop
from nbddp.capabilities.slurm import allocation, job_states
from nbddp.capabilities.slurm.job_states import JobStatus
from nbddp.errors import AgentFailed, BadInput, CommandStopped, PoolError, SlurmRefused

LOOK_EVERY = 1.0  # seconds between questions to Slurm, which answers for a whole site
READ_EVERY = 0.2
LAST_WORDS = 1.0  # seconds that a log on a shared disk may come later than the job's end

Say = Callable[[str], None]


def submit(script: str, words: Sequence[str]) -> int:
    """Hand a batch script to Slurm; the job's number. Raises BadInput if it cannot be, with sbatch's own words."""
    if not Path(script).is_file():
        near = sorted(p.name for pattern in ("*.sbatch", "*.sh", "*.slurm") for p in Path().glob(pattern))[:6]
        advice = f"there is {', '.join(near)}" if near else "%ddp export train.py --to slurm -o job.sbatch writes one"
        raise BadInput(f"there is no file {script}; {advice}")
    _needs_slurm()
    try:
        said = allocation.ask("sbatch", "--parsable", script, *words)
    except AgentFailed as e:
        reason = e.said if isinstance(e, SlurmRefused) else str(e)
        raise BadInput(f"sbatch refused {script}: {reason}") from None
    number = job_states.number_of(said)
    if number is None:
        raise PoolError(f"sbatch answered {said.strip()!r}, which has no job's number; squeue --me lists your jobs")
    return number


def _needs_slurm() -> None:
    try:
        allocation.needs("sbatch")
    except BadInput:
        raise BadInput(
            "sbatch is not on PATH, so this is not a Slurm login node; run %ddp submit there, or copy the script to it"
        ) from None


def follow(job: int, show: Say, progress: Say, cancels: bool) -> str:
    """Show what a job writes until it ends; how it did. show: text of its log; progress: its state, in one line.
    cancels: whether Stop cancels the job.

    Raises PoolError for one that did not complete, CommandStopped after Stop, which says what became of the job.
    """
    logs = JobLogs()
    try:
        found = _until_over(job, logs, show, progress)
    except KeyboardInterrupt:
        raise CommandStopped(_stopped(job, cancels)) from None
    until = time.monotonic() + LAST_WORDS
    while time.monotonic() < until:
        show(logs.read())
        time.sleep(READ_EVERY)
    show(logs.read(final=True))
    if found.state != job_states.DONE:
        raise PoolError(f"{found.ending()}; {found.logs()}")
    return f"{found.ending()}; {found.logs()}"


def _until_over(job: int, logs: JobLogs, show: Say, progress: Say) -> JobStatus:
    looked, found = 0.0, JobStatus(job, "PENDING")
    while True:
        stop.check()
        if time.monotonic() - looked > LOOK_EVERY:
            found, looked = _look(job), time.monotonic()
            logs.name(found)
            progress(found.words() if not found.over else "")
        if not found.waits:
            show(logs.read())
        if found.over:
            return found
        time.sleep(READ_EVERY)


def _look(job: int) -> JobStatus:
    try:
        return job_states.look(job, allocation.ask("scontrol", "show", "job", str(job)))
    except AgentFailed as e:
        raise PoolError(f"{e}; sacct -j {job} shows what became of a job that Slurm has forgotten") from None


def _stopped(job: int, cancels: bool) -> str:
    """Stop was pressed: what was done about the job."""
    if not cancels:
        again = f"%ddp submit --follow {job} follows it, !scancel {job} cancels it"
        return f"%ddp submit was stopped by the user; Slurm job {job} goes on; {again}"
    try:
        allocation.ask("scancel", str(job))
    except AgentFailed as e:
        return f"%ddp submit was stopped by the user, but Slurm job {job} was not cancelled: {e}"
    return f"%ddp submit was stopped by the user; Slurm job {job} was cancelled (scancel {job})"


class JobLog:
    """The file that a job writes to, read piece by piece; empty until it is there."""

    def __init__(self) -> None:
        self.path = ""
        self._read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, final: bool = False) -> str:
        """What is new. A character that is half written comes with its other half."""
        data = b""
        if self.path and Path(self.path).is_file():
            with open(self.path, "rb") as file:
                file.seek(self._read)
                data = file.read()
        self._read += len(data)
        return self._decoder.decode(data, final)


class JobLogs:
    """The files of a job's two streams, or of one if both go there."""

    def __init__(self) -> None:
        self._out, self._errors = JobLog(), JobLog()

    def name(self, found: JobStatus) -> None:
        self._out.path = found.log or self._out.path
        self._errors.path = found.errors or self._errors.path

    def read(self, final: bool = False) -> str:
        return self._out.read(final) + self._errors.read(final)
