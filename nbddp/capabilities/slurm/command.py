"""`%ddp attach` and `Pool.attach`: nodes that an earlier kernel kept. `%ddp submit`: a batch script."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from nbddp.capabilities.slurm import held_jobs, submit
from nbddp.errors import BadInput
from nbddp.launch.options import Parser, at_cursor, complete, positive, waiting_for
from nbddp.launch.path_completion import BATCH, files
from nbddp.notebook.commands import Asked, CommandLine
from nbddp.output.screens import for_shell

if TYPE_CHECKING:
    from nbddp.pool.pool import Pool


def attach(pool: Pool, job: int | None = None, progress: Callable[[str], None] = lambda text: None) -> list[str]:
    """Start workers on the Slurm nodes that an earlier kernel kept (`--keep-alive`). Returns what was done, as
    sentences.

    job: needed if several jobs are kept. Raises BadInput if none is kept, or if this pool is running.
    """
    if pool.running:
        where = pool.group.source.on(pool.spec)
        raise BadInput(f"this pool runs {where}; %ddp stop ends it, then %ddp attach uses the job")
    kept = held_jobs.to_attach(job)
    spec = held_jobs.restored(kept)
    pool.parts.of("slurm").jobs.hold(kept.take())
    return pool.ensure(spec, progress)


def attach_arguments(parser: Parser) -> None:
    parser.add_argument("job", nargs="?", type=positive, metavar="JOB", help="needed only if several jobs are kept")


def attach_in_notebook(asked: Asked, line: CommandLine) -> None:
    asked.start_workers(lambda progress: attach(asked.pool, line.args["job"], progress))


def submit_arguments(parser: Parser) -> None:
    parser.usage = "%%ddp submit [options] JOB.sbatch [arguments]\n       %%ddp submit --follow JOB"
    parser.add_argument("script", nargs="?", metavar="JOB.sbatch", help="batch script, as of %%ddp export --to slurm")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="arguments", help="arguments of the batch script")
    parser.add_argument("--follow", type=positive, metavar="JOB", help="follow a job that was submitted before")
    parser.add_argument("--detach", action="store_true", help="submit the job without following it")
    parser.add_argument("--on-stop", choices=("cancel", "leave"), default="cancel", help="what Stop does to the job "
                        "(default: cancel it)")  # fmt: skip


def complete_submit(parser: Parser, line: str) -> list[str]:
    current, before = at_cursor(line)
    due = before and waiting_for(parser, before[-1])
    scripts = [] if due or current.startswith("-") else files(current, BATCH)
    return [*scripts, *complete(parser, line)]


def submit_in_notebook(asked: Asked, line: CommandLine) -> None:
    args = line.args
    if (args["script"] is None) == (args["follow"] is None):
        raise BadInput("%ddp submit needs a batch script, or --follow and a job's number; name one of the two")
    job = args["follow"] or submit.submit(args["script"], args["words"])
    if args["script"] is not None:
        print(f"Slurm job {job} submitted", flush=True)
    if args["detach"]:
        print(f"%ddp submit --follow {job} follows it; !scancel {job} cancels it")
        return
    screen = for_shell(asked.shell)
    try:
        cancels = args["on_stop"] == "cancel"
        print(submit.follow(job, lambda text: print(text, end="", flush=True), screen.progress, cancels))
    finally:
        screen.finish([])
