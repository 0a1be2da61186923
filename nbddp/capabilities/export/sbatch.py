"""A launch and a request to Slurm → the text of a batch script for sbatch.

Two shells read it. The batch script's own, on the first node, expands `$MASTER_ADDR`: the same on every node. What
differs from node to node (`$SLURM_NODEID`, `$SLURM_PROCID`) is in single quotes there and expanded by a shell that srun
starts on the node; the batch script itself has SLURM_NODEID 0 and would give that to all. Pure: only text.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from nbddp.capabilities.export.torchrun_line import (
    SRUN,
    STATIC,
    Launch,
    UnquotedWord,
    c10d_words,
    env_words,
    shell_line,
    static_words,
    torchrun_words,
)
from nbddp.errors import BadInput

READ_BY_SBATCH = "'\"\\#"  # what sbatch itself would take out of a value, beside blanks
ADDR, PORT, NODE = UnquotedWord('"$MASTER_ADDR"'), UnquotedWord('"$MASTER_PORT"'), UnquotedWord('"$SLURM_NODEID"')
MEET = """\
# The ranks meet on the job's first node, at a port that follows from the job: two jobs on a node get two.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT"""
RANKS = (
    'export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" GROUP_RANK="$SLURM_NODEID" '
    'WORLD_SIZE="$SLURM_NTASKS" LOCAL_WORLD_SIZE={}; exec '
)


@dataclass(frozen=True)
class Job:
    """The request of a Slurm job, besides nodes and GPUs. An empty string omits the option.

    - name (str): the job's (default `ddp`). partition (str): Slurm's (default: empty).
    - cpus_per_proc (int): cores for each process of the program, for data loading too (default 4).
    - memory_per_cpu (str): such as `2G` (default: empty). time (str): `hours:minutes:seconds` (default `01:00:00`).
    - output (str): the log's path; Slurm replaces %x by the job's name and %j by its number (default `%x-%j.out`).
    - setup (tuple of str): shell lines that run first, such as `source env/bin/activate` (default: none).
    - packages (tuple of str): installed with pip first (default: none).
    - gpu (str): type of the GPUs (default: empty). image (str): the container's (default: empty); only some targets of
      `%ddp export` have one.

    Raises BadInput if `cpus_per_proc` is below 1.

    Example:

        from nbddp.export import Job
        job = Job(name="mnist", time="02:00:00", setup=("source env/bin/activate",))
    """

    name: str = "ddp"
    partition: str = ""
    cpus_per_proc: int = 4
    memory_per_cpu: str = ""
    time: str = "01:00:00"
    output: str = "%x-%j.out"
    setup: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    image: str = ""
    gpu: str = ""

    def cores(self, launch: Launch) -> int:
        """Cores of a node."""
        return self.cpus_per_proc * launch.nproc

    def __post_init__(self) -> None:
        if self.cpus_per_proc < 1:
            raise BadInput(f"cpus_per_proc={self.cpus_per_proc} is not possible; use 1 or more")


def sbatch_script(launch: Launch, job: Job | None = None) -> str:
    """Return the text of a batch script, to submit with sbatch.

    - launch (Launch): what is started. job (Job): what is requested (default: `Job()`).

    Raises BadInput for a value that no #SBATCH line can hold, and for `min_nodes`: Slurm ends a job that loses a node.

    Example:

        from nbddp.export import Launch, sbatch_script
        assert "#SBATCH --nodes=2" in sbatch_script(Launch("train.py", nnodes=2))
    """
    job = job or Job()
    if launch.min_nodes is not None:
        raise BadInput(f"Slurm stops a job that loses a node; remove min_nodes={launch.min_nodes}")
    directives = "\n".join(f"#SBATCH --{name}={_directive(name, value)}" for name, value in _asked(launch, job))
    alone = launch.nnodes == 1 and launch.rendezvous != SRUN  # torchrun --standalone finds a port itself
    meet = [] if alone else [MEET, ""]
    parts = ["#!/bin/bash", directives, "", "set -e", *_first(launch, job), *meet, _srun(launch, job)]
    return "\n".join(parts) + "\n"


def _first(launch: Launch, job: Job) -> list[str]:
    """Lines before all else."""
    install = [shell_line(["pip", "install", *job.packages])] if job.packages else []
    return [*(f"export {word}" for word in env_words(launch)), *job.setup, *install]


def _asked(launch: Launch, job: Job) -> list[tuple[str, str]]:
    """The options of #SBATCH lines. One task is one torchrun, or one rank where no torchrun runs."""
    gpus = f"gpu:{job.gpu}{':' * bool(job.gpu)}{launch.nproc * launch.gpus_per_proc}"
    wanted = [
        ("job-name", job.name),
        ("partition", job.partition),
        ("nodes", str(launch.nnodes)),
        ("ntasks-per-node", str(_tasks(launch))),
        ("gres", gpus if launch.gpus_per_proc else ""),
        ("cpus-per-task", str(_cpus(launch, job))),
        ("mem-per-cpu", job.memory_per_cpu),
        ("time", job.time),
        ("output", job.output),
    ]
    return [(name, value) for name, value in wanted if value]


def _tasks(launch: Launch) -> int:
    return launch.nproc if launch.rendezvous == SRUN else 1


def _cpus(launch: Launch, job: Job) -> int:
    return job.cpus_per_proc * launch.nproc // _tasks(launch)


def _directive(name: str, value: str) -> str:
    """A value on an #SBATCH line: no shell reads it, but sbatch takes quotes as a shell does."""
    if "\n" in value or "\0" in value:
        raise BadInput(
            f"an #SBATCH line ends at a line break, but {name} is {value!r}; use a value without line breaks"
        )
    return shlex.quote(value) if any(c.isspace() or c in READ_BY_SBATCH for c in value) else value


def _srun(launch: Launch, job: Job) -> str:
    """The last line. srun gets the cores again: since Slurm 22.05 it does not take them from sbatch's lines."""
    start = ["srun", "--kill-on-bad-exit=1", f"--cpus-per-task={_cpus(launch, job)}"]
    if launch.rendezvous == SRUN:
        return shell_line([*start, "bash", "-c", RANKS.format(launch.nproc) + shell_line(["python", *launch.program])])
    if launch.nnodes == 1:
        return shell_line([*start, *torchrun_words(launch, ["--standalone"])])
    if launch.rendezvous == STATIC:
        inner = shell_line(["exec", *torchrun_words(launch, static_words(launch, NODE, ADDR, PORT))])
        return shell_line([*start, "bash", "-c", inner])
    meet = c10d_words(launch, UnquotedWord('"$MASTER_ADDR:$MASTER_PORT"'), UnquotedWord('"$SLURM_JOB_ID"'))
    return shell_line([*start, *torchrun_words(launch, meet)])
