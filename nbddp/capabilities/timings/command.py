"""`%ddp timings` and `Pool.timings`: the DDP steps that the ranks have recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbddp.analysis.answers import IdleRanks, aligned, clocks, unpacked
from nbddp.analysis.steps import RankRecording, Recording, fitted, origin
from nbddp.analysis.wait_time import typical
from nbddp.errors import BadInput
from nbddp.launch.options import Parser, one_rank
from nbddp.notebook.commands import Asked, CommandLine
from nbddp.protocol.run_spec import Question

if TYPE_CHECKING:
    from nbddp.pool.pool import WorkerPool

RECORDED_BY = {"DDP's reducer", "end of backward"}  # private APIs without which nothing is recorded


def timings(ranks: IdleRanks) -> Recording:
    """DDP steps of the last run that recorded any; `origin` and `missing` say whether that is the last cell, and
    whether all ranks recorded it. Raises BadInput if no run has recorded a step."""
    found: dict[int, RankRecording] = unpacked(ranks.answers("timings", meets=False))
    if not any(f.steps for f in found.values()):
        missing = ranks.ask(0, Question.of("seams")) or []
        if not RECORDED_BY.isdisjoint(missing):
            raise BadInput("steps cannot be recorded with this torch; %ddp doctor shows what is missing")
        raise BadInput("no DDP step has been recorded; train a DistributedDataParallel model in a %%ddp cell first")
    newest = max(found.values(), key=lambda f: f.run)
    of_it = {r: f for r, f in found.items() if f.steps and f.run == newest.run}
    recording = Recording(
        {r: [*map(fitted, f.steps)] for r, f in of_it.items()},
        model=newest.model,
        missing=sorted(set(found) - set(of_it)),
        origin=origin(newest.run, newest.cell, ranks.newest()),
    )
    return aligned(recording, clocks(ranks))


def arguments(parser: Parser) -> None:
    parser.add_argument("--step", type=one_rank, metavar="K", help="show step K instead of the median step")
    parser.add_argument("--collectives", action="store_true", help="show the collectives of the last cell that called "
        "some, instead of DDP's steps (default where no step of DDP is recorded)")  # fmt: skip


def show(asked: Asked, line: CommandLine) -> Any:
    if line.args["collectives"] and line.args["step"] is not None:
        raise BadInput("--step selects a DDP step, but --collectives shows no steps; remove one of the two")
    if line.args["collectives"]:
        return _figure_of_collectives(asked.pool)
    return figure_of_timings(asked.pool, line.args["step"])


def show_recorded(asked: Asked, said: bool) -> list[Any]:
    """`%%ddp --timings`."""
    return [figure_of_timings(asked.pool)]


def figure_of_timings(pool: WorkerPool, asked: int | None = None) -> Any:
    """Step `asked` of the last run that trained, or the median one; the last collectives where none trained."""
    from nbddp.capabilities.timings.figure import draw_timings

    try:
        recording = timings(pool)
    except BadInput as no_step:
        try:
            if asked is None and pool.running:
                return _figure_of_collectives(pool)
        except BadInput:
            pass  # neither is there: DDP is what most will have wanted
        raise no_step from None
    return draw_timings(recording, chosen(recording, asked))


def chosen(recording: Recording, asked: int | None) -> int:
    """The step that was asked for, or the median one. Raises BadInput if not every rank has it."""
    number = typical(recording) if asked is None else asked
    have = recording.numbers()
    if number is None or not have:
        raise BadInput("no step was recorded on every rank; train on all ranks in one cell")
    if number not in have:
        raise BadInput(f"there is no step {number}; steps {have[0]} to {have[-1]} are recorded on every rank")
    return number


def _figure_of_collectives(pool: WorkerPool) -> Any:
    if not hasattr(pool, "collectives"):
        raise BadInput("collectives are not recorded here; remove --collectives")
    return pool.collectives().draw()
