"""Requests to Slurm and its answers: command lines and text, no processes.

The formats are those of salloc(1), srun(1), squeue(1) and scontrol(1).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from nbddp.errors import BadInput
from nbddp.launch.units import lasts

LONG_BEFORE = 300.0  # seconds before a job's end at which that is reported
SHARED = ("SLURM_CONF", "SLURM_CLUSTERS")  # variables that say where Slurm is; all others say in which job this is
OPTIONS = {  # field → salloc's option
    "nodes": "--nodes", "partition": "--partition", "time": "--time", "gpus_per_node": "--gpus-per-node",
    "account": "--account", "qos": "--qos", "constraint": "--constraint",
}  # fmt: skip
REASONS = {  # of a job that waits → what that means
    "Resources": "nodes are not free yet",
    "Priority": "other jobs come first",
    "ReqNodeNotAvail": "the nodes that it needs are down, drained or reserved",
    "BeginTime": "its start time has not come",
    "Dependency": "it waits for another job",
    "None": "Slurm has not considered it yet",
}
NEVER = {  # the same, of one that starts only if somebody changes the job or the limit
    "PartitionNodeLimit": "the partition does not have, or does not allow, that many nodes",
    "PartitionTimeLimit": "the partition does not allow such a long time",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "BadConstraints": "no node satisfies --constraint",
    "InvalidAccount": "the account is not valid",
    "InvalidQOS": "the QOS is not valid",
    "JobHeldUser": "it is held",
    "JobHeldAdmin": "an administrator is holding it",
}
STATES = {  # of a job that has ended → what became of it
    "CANCELLED": "was cancelled",
    "TIMEOUT": "has reached its time limit",
    "PREEMPTED": "was preempted",
    "NODE_FAIL": "has lost a node",
    "COMPLETED": "has completed",
    "COMPLETING": "is ending",
    "FAILED": "has failed",
    "OUT_OF_MEMORY": "was stopped because it used more memory than it was allowed",
    "DEADLINE": "has reached its deadline",
    "REQUEUED": "was requeued",
    "SUSPENDED": "is suspended",
}
DUE_TO = re.compile(r"CANCELLED AT \S+ DUE TO ([A-Z ]+?)\s*\*\*\*")
TOLD = {"TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED", "NODE FAILURE": "NODE_FAIL", "JOB REQUEUE": "REQUEUED"}


@dataclass(frozen=True)
class Slurm:
    """A Slurm allocation for `nbddp.Pool(slurm=…)`: an existing job, or a new one to request.

    - job (int): the number of an existing job. Default: this process's own job, if it runs in one and no other argument
      is given; else a new job.
    - nodes (int or str): number of nodes; `2-4` takes as many as are free. Default: 1.
    - time (str): limit of the job, as `hours:minutes:seconds`. Default: the partition's.
    - gpus_per_node (str): number and type of GPUs, such as `4` or `a100:4`. Default: none.
    - partition, account, qos, constraint (str): passed to salloc. Default: Slurm's own choice.
    - cpus_per_node (int): cores for all workers of a node. Default: one per worker, if no GPUs are requested.
    - more (str): other options for salloc, such as `--exclusive --mem=0`. Default: none.

    The job is requested when the pool starts. Then Slurm's refusal raises SlurmRefused, and a missing salloc BadInput.

    Example:

        job = nbddp.Slurm(nodes=2, time="1:00:00")
    """

    job: int | None = None
    nodes: int | str | None = None
    partition: str = ""
    time: str = ""
    gpus_per_node: str = ""
    cpus_per_node: int | None = None
    account: str = ""
    qos: str = ""
    constraint: str = ""
    more: str = ""


def asks(job: Slurm) -> bool:
    """Whether a new allocation is described."""
    return any(getattr(job, name) for name in (*OPTIONS, "cpus_per_node", "more"))


def arguments(job: Slurm, nproc: int | None) -> list[str]:
    """salloc's options for `nproc` workers on each node; None: not known yet. Raises BadInput."""
    given = [f"{option}={getattr(job, name)}" for name, option in OPTIONS.items() if getattr(job, name)]
    cpus = job.cpus_per_node or (None if job.gpus_per_node else nproc)
    try:
        more = shlex.split(job.more)
    except ValueError as e:
        raise BadInput(f"--slurm-options {job.more}: {e}; close the quote") from None
    return ["--ntasks-per-node=1", *([f"--cpus-per-task={cpus}"] if cpus else []), *given, *more]


def line_of(job: Slurm) -> str:
    """The options as they are typed."""
    fields = {**OPTIONS, "cpus_per_node": "--cpus-per-node", "more": "--slurm-options"}
    typed = [f"{option} {shlex.quote(str(getattr(job, f)))}" for f, option in fields.items() if getattr(job, f)]
    return " ".join([f"--slurm {job.job}" if job.job else "--slurm", *typed])


def outside(env: Mapping[str, str]) -> dict[str, str]:
    """An environment for Slurm's commands in which no job is said, nor how this process was reached."""
    told = ("SLURM_", "SLURMD_", "SRUN_", "PMI", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")
    return {name: value for name, value in env.items() if name in SHARED or not name.startswith(told)}


def job_of(env: Mapping[str, str]) -> int | None:
    """The job in which a process with this environment runs; None if in none."""
    number = env.get("SLURM_JOB_ID", "")
    return int(number) if number.isascii() and number.isdigit() else None


def pending_job(said: str) -> int | None:
    """The number of the job that salloc says it waits for; None before it has said it."""
    found = re.search(r"(?:Pending|Granted) job allocation (\d+)", said)
    return int(found[1]) if found else None


def waiting_words(job: int, row: str) -> str:
    """The sentence about a job that waits. row: squeue's `%T|%r|%S`."""
    state, reason, start = ([part.strip() for part in row.split("|")] + ["", "", ""])[:3]
    if state == "CONFIGURING":
        return f"Slurm job {job}: its nodes are starting"
    if reason in NEVER:
        return f"Slurm job {job} cannot start as requested: {NEVER[reason]} ({reason})"
    means = REASONS.get(reason, "")
    why = f"{means} ({reason})" if means else reason or state.lower() or "Slurm has not reported on it yet"
    return f"Slurm job {job} is waiting: {why}{_expected(start)}"


def _expected(start: str) -> str:
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d):\d\d", start)
    return f"; expected to start {found[1]} {found[2]}" if found else ""


def refusal(said: str, command: str = "salloc") -> str:
    """Why a command failed, in its own words."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [re.sub(rf"^{command}: (?:error: |fatal: )?", "", line) for line in lines]
    return told[-1] if told else f"{command} printed nothing"


def fields(record: str) -> dict[str, str]:
    """One record of `scontrol show --oneliner`: its `Name=value` pairs."""
    return {name: value for name, _, value in (word.partition("=") for word in record.split()) if value}


def seconds_left(text: str) -> float | None:
    """squeue's `%L`, such as `1-02:03:04`, `59:30` or `0:07`; None where there is no limit, or it is not said."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def left_words(job: int, nodes: str, left: float | None) -> str:
    """The line of `status` about an allocation."""
    return f"Slurm job {job} on {nodes}" + (f", {lasts(left)} left" if left is not None else "")


def ended_words(job: int, said: str, state: str) -> str:
    """What became of a job. said: what srun has written; state: the job's, empty if Slurm does not tell."""
    told = DUE_TO.search(said)
    due = TOLD.get(told[1].strip(), "") if told else ""
    if told and not due:
        return f"Slurm job {job} was stopped because of {told[1].strip().lower()}"
    found = due or ("CANCELLED" if " CANCELLED AT " in said and state == "COMPLETING" else state)
    if found in STATES:
        return f"Slurm job {job} {STATES[found]}"
    if " CANCELLED AT " in said:
        return f"Slurm has stopped a step of job {job}{', which keeps running' if state else ''}"
    return ""
