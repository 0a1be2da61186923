"""`nbddp.Pool.timings`: the recorded DDP steps as a figure, text and data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp.analysis.steps import Recording, Step, split
from nbddp.capabilities.timings import command
from nbddp.capabilities.timings.analysis import analysed
from nbddp.figures.result import Result, Row

if TYPE_CHECKING:
    from nbddp.figures.figure import DescribedFigure
    from nbddp.pool.pool import WorkerPool


@dataclass(frozen=True, eq=False, repr=False)
class TimingsResult(Result[Recording]):
    """DDP steps that the ranks recorded. The figure shows step number `step`.

    The fields of `to_dict()`:

    - `model` (str); `step` (int); `steps` (list of int): those that every rank recorded.
    - `hidden_share` (float, 0 to 1): of communication behind backward; None without communication.
    - `slow_rank`: a dict of `rank`, `extra_s` (per step) and `cause`; None if no rank is known to be slow.
    - `ranks`: the rows of step `step`. `to_frame()` has the rows of all steps.

    The fields of a row:

    - `step`, `rank`, `step_s`, `forward_s`; `backward_s`: the computation of gradients.
    - `hidden_s`, `exposed_s`: communication during that, and after it. `optimizer_s`: None without an optimizer.
    - `buckets`: how many gradient buckets; `bucket_bytes`: of all together.
    """

    step: int = 0

    def _draw(self) -> DescribedFigure:
        from nbddp.capabilities.timings.figure import draw_timings

        return draw_timings(self._found, self.step)

    def _data(self) -> Row:
        view = analysed(self._found, self.step)
        slow = view.slow
        return {
            "model": view.model, "step": self.step, "steps": self._found.numbers(), "hidden_share": view.hidden_share,
            "slow_rank": slow and {"rank": slow.rank, "extra_s": slow.extra / 1e9, "cause": slow.cause.describe()},
            "ranks": [row(rank, step) for rank, step in self._found.step(self.step).items()],
        }  # fmt: skip

    def _rows(self) -> Sequence[Row]:
        return [row(r, step) for number in self._found.numbers() for r, step in self._found.step(number).items()]


def row(rank: int, step: Step) -> Row:
    """One rank's step; times in seconds."""
    hidden, exposed = split(step)
    begin, end, _ = step.backward
    return {
        "step": step.number, "rank": rank, "step_s": step.duration / 1e9,
        "forward_s": (step.forward[1] - step.forward[0]) / 1e9, "backward_s": (end - begin) / 1e9,
        "hidden_s": hidden / 1e9, "exposed_s": exposed / 1e9,
        "optimizer_s": step.optimizer and (step.optimizer[1] - step.optimizer[0]) / 1e9,
        "buckets": len(step.buckets), "bucket_bytes": sum(b.bytes for b in step.buckets),
    }  # fmt: skip


def timings(pool: WorkerPool, step: int | None = None) -> TimingsResult:
    """The DDP steps of the last run that recorded any: who computes, who waits for whom, and how long.

    step (int): the step that is shown; default: the median one. Raises PoolNotRunning, or BadInput if no step was
    recorded, or not this one.

    Example:

        pool.run(train)
        print(pool.timings())
        slowest = max(pool.timings().to_dict()["ranks"], key=lambda row: row["backward_s"])
    """
    recording = command.timings(pool)
    return TimingsResult(recording, *pool.marks("timings"), step=command.chosen(recording, step))
