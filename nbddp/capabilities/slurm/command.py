"""`%ddp attach` and `Pool.attach`: nodes that an earlier kernel kept. `%ddp submit`: a batch script."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from nbddp.capabilities.slurm import held_jobs
from nbddp.errors import BadInput
from nbddp.launch.options import Parser, positive
from nbddp.notebook.commands import Asked, CommandLine
from nbddp.output.screens import for_shell

if TYPE_CHECKING:
    from nbddp.pool.pool import WorkerPool


import codecs
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbddp.agent import stop
from nbddp.capabilities.slurm import allocation, commands
from nbddp.errors import AgentFailed, CommandStopped, PoolError, SlurmRefused

LOOK_EVERY = 1.0  # seconds between questions to Slurm, which answers for a whole site
READ_EVERY = 0.2
LAST_WORDS = 1.0  # seconds that a log on a shared disk may come later than the job's end
Say = Callable[[str], None]
WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
RUNS = ("RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "SIGNALING", "RESIZING", "STOPPED")
DONE = "COMPLETED"
ENDS = {  # of a batch job
    DONE: "completed",
    "BOOT_FAIL": "could not start: its nodes did not boot",
}


def attach(pool: WorkerPool, job: int | None = None, progress: Callable[[str], None] | None = None) -> list[str]:
    """Start workers on the Slurm nodes that an earlier process kept (`keep_alive`).

    - job (int): the number of the job. Default: the only one that is kept.
    - progress (function of str): called with a line on each step (default: none).

    Returns sentences that describe the changes. Raises BadInput if no job is kept, or if this pool is running.

    Example:

        pool = nbddp.Pool()
        pool.attach()
    """
    if pool.running:
        where = pool.group.source.on(pool.spec)
        raise BadInput(f"this pool runs {where}; %ddp stop ends it, then %ddp attach uses the job")
    kept = held_jobs.to_attach(job)
    spec = held_jobs.restored(kept)
    pool.parts.of("slurm").hold(kept.take())
    return pool.ensure(spec, progress or (lambda text: None))


def attach_arguments(parser: Parser) -> None:
    parser.add_argument("job", nargs="?", type=positive, metavar="JOB", help="needed only if several jobs are kept")


def attach_in_notebook(asked: Asked, line: CommandLine) -> None:
    """Of a pool that runs it shows the last run, which a page may have lost sight of."""
    again = asked.pool.parts.reattached
    if asked.pool.running and line.args["job"] is None and asked.pool.last_run is not None and again:
        for show in again:
            show(asked.shell)
        return
    asked.start_workers(lambda progress: attach(asked.pool, line.args["job"], progress))


def submit_arguments(parser: Parser) -> None:
    parser.usage = "%%ddp submit [options] JOB.sbatch [arguments]\n       %%ddp submit --follow JOB"
    parser.offers = {"script": (".sbatch", ".slurm", ".sh")}
    parser.add_argument("script", nargs="?", metavar="JOB.sbatch", help="batch script, as of %%ddp export --to slurm")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="arguments", help="arguments of the batch script")
    parser.add_argument("--follow", type=positive, metavar="JOB", help="follow a job that has been submitted")
    parser.add_argument("--detach", action="store_true", help="submit the job without following it")
    parser.add_argument("--on-stop", choices=("cancel", "leave"), default="cancel", help="action of Stop on the job "
                        "(default: cancel it)")  # fmt: skip


def submit_in_notebook(asked: Asked, line: CommandLine) -> None:
    args = line.args
    if (args["script"] is None) == (args["follow"] is None):
        raise BadInput("%ddp submit needs a batch script, or --follow and a job's number; name one of the two")
    job = args["follow"] or submit(args["script"], args["words"])
    if args["script"] is not None:
        print(f"Slurm job {job} submitted", flush=True)
    if args["detach"]:
        print(f"%ddp submit --follow {job} follows it; !scancel {job} cancels it")
        return
    screen = for_shell(asked.shell)
    try:
        cancels = args["on_stop"] == "cancel"
        print(follow(job, lambda text: print(text, end="", flush=True), screen.progress, cancels))
    finally:
        screen.finish([])


# -- a batch script --------------------------------------------------------------------------------


def submit(script: str, words: Sequence[str]) -> int:
    """Hand a batch script to Slurm; the job's number. Raises BadInput if it cannot be, with sbatch's own words."""
    if not Path(script).is_file():
        near = sorted(p.name for pattern in ("*.sbatch", "*.sh", "*.slurm") for p in Path().glob(pattern))[:6]
        found = f"similar files: {', '.join(near)}"
        advice = found if near else "%ddp export train.py --to slurm -o job.sbatch writes one"
        raise BadInput(f"there is no file {script!r}; {advice}")
    _needs_slurm()
    try:
        said = allocation.ask("sbatch", "--parsable", script, *words)
    except AgentFailed as e:
        reason = e.said if isinstance(e, SlurmRefused) else str(e)
        raise BadInput(f"sbatch refused {script}: {reason}") from None
    number = number_of(said)
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
    if found.state != DONE:
        raise PoolError(f"{found.ending()}; {found.logs()}")
    return f"{found.ending()}; {found.logs()}"


def _until_over(job: int, logs: JobLogs, show: Say, progress: Say) -> JobStatus:
    looked, found = 0.0, JobStatus(job, "PENDING")
    while True:
        stop.check()
        if time.monotonic() - looked > LOOK_EVERY:
            found, looked = _look(job), time.monotonic()
            logs.name(found)
            progress(found.describe() if not found.over else "")
        if not found.waits:
            show(logs.read())
        if found.over:
            return found
        time.sleep(READ_EVERY)


def _look(job: int) -> JobStatus:
    try:
        return look(job, allocation.ask("scontrol", "show", "job", str(job)))
    except AgentFailed as e:
        raise PoolError(f"{e}; sacct -j {job} shows the final state of a job that Slurm no longer lists") from None


def _stopped(job: int, cancels: bool) -> str:
    """Stop was pressed: what was done about the job."""
    if not cancels:
        again = f"%ddp submit --follow {job} follows it, !scancel {job} cancels it"
        return f"%ddp submit was stopped by the user; Slurm job {job} keeps running; {again}"
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


# -- a batch job, as Slurm's commands tell of it ---------------------------------------------------


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

    def describe(self) -> str:
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
