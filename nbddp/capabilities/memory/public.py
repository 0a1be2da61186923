"""`nbddp.Pool.memory`: what each rank's memory holds, as a figure, text and data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp.capabilities.memory import command
from nbddp.capabilities.memory.parts import RankMemory
from nbddp.output.result import Result, Row

if TYPE_CHECKING:
    from nbddp.figures.figure import DescribedFigure
    from nbddp.pool.pool import WorkerPool


@dataclass(frozen=True, eq=False, repr=False)
class MemoryResult(Result[list[RankMemory]]):
    """What training holds in each rank's memory, in bytes.

    `to_dict()` has `ranks`, a list of rows, and `to_frame()` has the same rows. The fields of a row:

    - `rank`; `kind`: `cpu` or `cuda`.
    - `parameters_bytes`, `module_buffers_bytes`, `gradients_bytes`, `optimizer_bytes`, `ddp_buckets_bytes`: held
      between steps.
    - `peak_bytes`: the most since the last cell began. `rest_bytes`: what else the peak had.
    - `total_bytes`: what the bar of the figure shows, all parts and the rest.
    - `start_bytes`: what the process held before any cell; 0 on a GPU.
    """

    def _draw(self) -> DescribedFigure:
        from nbddp.capabilities.memory.figure import draw_memory

        return draw_memory(self._found)

    def _data(self) -> Row:
        return {"ranks": self._rows()}

    def _rows(self) -> Sequence[Row]:
        return [
            {
                "rank": r.rank, "kind": r.kind, "parameters_bytes": r.parameters, "module_buffers_bytes": r.buffers,
                "gradients_bytes": r.gradients, "optimizer_bytes": r.optimizer, "ddp_buckets_bytes": r.buckets,
                "rest_bytes": r.rest, "total_bytes": r.total, "peak_bytes": r.peak, "start_bytes": r.start,
            }
            for r in self._found
        ]  # fmt: skip


def memory(pool: WorkerPool) -> MemoryResult:
    """What each rank's memory holds: parameters, gradients, optimizer state, DDP's buckets and the rest of the peak.

    Raises PoolNotRunning, or BadInput if no rank has a model.

    Example:

        pool.run_cell("import torch; model = torch.nn.Linear(4, 2)")
        assert pool.memory().to_dict()["ranks"][0]["parameters_bytes"] == (4 * 2 + 2) * 4
    """
    return MemoryResult(command.memory(pool), *pool.marks("memory"))
