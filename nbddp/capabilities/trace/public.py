"""`nbddp.Pool.trace`: the merged profile of all ranks, as a file for Perfetto, a figure, text and data."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nbddp.capabilities.collectives.program import Breakdown, Longest, program
from nbddp.capabilities.collectives.public import data_of, rows_of
from nbddp.capabilities.trace import command
from nbddp.capabilities.trace.merge import Merged
from nbddp.capabilities.trace.written import written
from nbddp.figures.result import Result, Row
from nbddp.launch.topology import rank_words

if TYPE_CHECKING:
    from nbddp.figures.figure import DescribedFigure
    from nbddp.pool.pool import WorkerPool


@dataclass(frozen=True, eq=False, repr=False)
class TraceResult(Result[Merged]):
    """The profile of a run, merged from all ranks. `write()` writes the file that Perfetto opens.

    The figure, and `gpus`, `late_rank`, `collectives` and `ranks` of `to_dict()`, are those of `Pool.collectives`.
    `to_frame()` has the rows of `ranks`, and these fields of a row: `rank`, `program_s`, `compute_s`, `exposed_s`,
    `waiting_s`, `copies_s`, `idle_s`, `communication_s`, `hidden_share`. The other fields of `to_dict()`:

    - `calls`: the kernels and calls that took longest, as a list of dicts. Their keys are `name`, `kind`
      (`compute`, `communication` or `copy`), `calls`, `total_s` (on all ranks), `longest_s`, and `rank` with the most.
    - `spans`, `joined` (int): spans in the trace, and collectives that are joined across ranks.
    - `missing`: a list of dicts of `rank` and `why`: ranks without a trace.
    - `clock_error_s`: how far the ranks' clocks may be apart.
    - `events`: the trace itself, in the Trace Event Format.
    """

    @functools.cached_property
    def _breakdown(self) -> Breakdown:
        return program(self._found.data["traceEvents"])

    def _draw(self) -> DescribedFigure:
        return self._breakdown.draw()

    def _data(self) -> Row:
        merged = self._found
        return {
            **data_of(self._breakdown), "calls": [_call_row(call) for call in self._breakdown.calls],
            "spans": merged.spans, "joined": merged.joined, "clock_error_s": merged.residual / 1e9,
            "missing": [{"rank": rank, "why": merged.why.get(rank, "")} for rank in merged.missing],
            "events": merged.data["traceEvents"],
        }  # fmt: skip

    def _rows(self) -> Sequence[Row]:
        return rows_of(self._breakdown)

    def write(self, path: str) -> None:
        """Write the trace for Perfetto (https://ui.perfetto.dev), as JSON. path (str): a name with `.gz` packs it.

        Raises OSError if the file cannot be written.

        Example:

            pool.run_cell("import torch; torch.ones(3).sum()", trace=True)
            pool.trace().write("trace.json.gz")
        """
        written(self._found, Path(path))


def _call_row(call: Longest) -> Row:
    return {
        "name": call.name, "kind": call.kind, "calls": call.count, "total_s": call.total / 1e9,
        "longest_s": call.longest / 1e9, "rank": call.rank,
    }  # fmt: skip


def trace(pool: WorkerPool) -> TraceResult:
    """The merged profile of the last run with `trace=True`. It can be written to a file for Perfetto.

    Raises PoolNotRunning, or BadInput if there is none.

    Example:

        pool.run_cell("import torch; torch.ones(3).sum()", trace=True)
        pool.trace().write("trace.json.gz")
    """
    merged = command.trace(pool)
    simulated, notes = pool.marks("trace")
    lost = [f"no trace from {rank_words(merged.missing)}"] if merged.missing else []
    why = [f"rank {rank}: {reason}" for rank, reason in sorted(merged.why.items())]
    return TraceResult(merged, simulated, (*lost, *why, *notes))
