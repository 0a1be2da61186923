"""`nbddp.Pool.collectives`: the cost of a program's collectives, as a figure, text and data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp.capabilities.collectives import command
from nbddp.capabilities.collectives.breakdown import Split
from nbddp.capabilities.collectives.instances import Kind
from nbddp.capabilities.collectives.program import Breakdown
from nbddp.figures.result import Result, Row

if TYPE_CHECKING:
    from nbddp.figures.figure import DescribedFigure
    from nbddp.pool.pool import WorkerPool


@dataclass(frozen=True, eq=False, repr=False)
class CollectivesResult(Result[Breakdown]):
    """How each rank spent a run, and which rank arrived last at its collectives.

    The fields of `to_dict()`:

    - `gpus` (bool): whether the times are those of GPUs.
    - `late_rank`: the rank that the others wait for, as a dict. Its keys are `rank`, `wait_s` (mean of the other
      ranks), `last`, `of` and `cause` (None if not known). The rank was the last at `last` of `of` collectives.
      None if no rank is known to be late.
    - `collectives`: a list of dicts of `collective`, `ranks`, `calls`, `last`, `longest_wait_s` and `transfer_s`
      (medians), and `lines`. `last` is a list of dicts of `rank` and `calls`. `lines` is one of `cell` and `line`:
      the lines that made the calls, as far as they were noted.
    - `ranks`: a list of rows, which `to_frame()` has too.

    The fields of a row:

    - `rank`; `program_s`: the time from the first activity on any rank to the last.
    - `compute_s`, `exposed_s`, `copies_s`, `idle_s`: its parts. `waiting_s`: of the exposed communication, until the
      last rank arrived.
    - `communication_s` and `hidden_share` (0 to 1): all communication, and the share behind compute; None if only the
      exposed part is known.
    """

    def _draw(self) -> DescribedFigure:
        return self._found.draw()

    def _captions(self) -> Sequence[str]:
        return [note for note in self.notes if note not in self._found.notes]

    def _data(self) -> Row:
        return data_of(self._found)

    def _rows(self) -> Sequence[Row]:
        return rows_of(self._found)


def data_of(found: Breakdown) -> Row:
    """The fields of a breakdown, as plain data."""
    late, why = found.late, found.why
    return {
        "gpus": found.gpus,
        "late_rank": late and {
            "rank": late.rank, "wait_s": late.cost / 1e9, "last": late.last, "of": late.of,
            "cause": why.describe() if why is not None else None,
        },
        "collectives": [_kind_row(kind) for kind in found.kinds],
        "ranks": rows_of(found),
    }  # fmt: skip


def rows_of(found: Breakdown) -> list[Row]:
    """A row for each rank."""
    return [_rank_row(rank, found.ranks[rank]) for rank in sorted(found.ranks)]


def _rank_row(rank: int, s: Split) -> Row:
    return {
        "rank": rank, "program_s": s.whole / 1e9, "compute_s": s.compute / 1e9, "exposed_s": s.exposed / 1e9,
        "waiting_s": s.waiting / 1e9, "copies_s": s.copies / 1e9, "idle_s": s.idle / 1e9,
        "communication_s": None if s.communication is None else s.communication / 1e9, "hidden_share": s.overlap,
    }  # fmt: skip


def _kind_row(kind: Kind) -> Row:
    return {
        "collective": kind.op, "ranks": list(kind.ranks), "calls": kind.count,
        "last": [{"rank": rank, "calls": calls} for rank, calls in sorted(kind.last.items())],
        "longest_wait_s": kind.late / 1e9, "transfer_s": kind.moving / 1e9,
        "lines": [{"cell": cell, "line": line} for cell, line in kind.places],
    }  # fmt: skip


def collectives(pool: WorkerPool) -> CollectivesResult:
    """Which rank arrived last at the collectives of the last run that called some, and how each rank spent that run.

    It works for any program, without a trace. Raises PoolNotRunning, or BadInput if no run has called a collective.

    Example:

        pool.run(train)
        print(pool.collectives())
        waited = [row["waiting_s"] for row in pool.collectives().to_dict()["ranks"]]
    """
    found = command.collectives(pool)
    simulated, notes = pool.marks("collectives")
    return CollectivesResult(found, simulated, (*found.notes, *notes))
