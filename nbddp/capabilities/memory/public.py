"""`nbddp.Pool.memory`, `sizes` and `allocations`: the contents of each rank's memory, as figures, text and data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp.capabilities.memory import command
from nbddp.capabilities.memory.command import Sizes
from nbddp.capabilities.memory.history import RankAllocations
from nbddp.capabilities.memory.parts import NameSize, RankMemory
from nbddp.capabilities.memory.timeline import Allocations, lines
from nbddp.figures.result import Result, Row

if TYPE_CHECKING:
    from nbddp.figures.figure import DescribedFigure
    from nbddp.pool.pool import WorkerPool


@dataclass(frozen=True, eq=False, repr=False)
class MemoryResult(Result[list[RankMemory]]):
    """The contents of each rank's memory during training, in bytes.

    `to_dict()` has `ranks`, a list of rows, and `to_frame()` has the same rows. The fields of a row:

    - `rank`; `kind`: `cpu` or `cuda`.
    - `parameters_bytes`, `module_buffers_bytes`, `gradients_bytes`, `optimizer_bytes`, `ddp_buckets_bytes`: held
      between steps.
    - `peak_bytes`: the most since the last cell began. `rest_bytes`: the part of the peak that is none of these.
    - `total_bytes`: the bar of the figure, all parts and the rest.
    - `start_bytes`: memory of the process before any cell; 0 on a GPU.
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
    """The contents of each rank's memory: parameters, gradients, optimizer state, DDP's buckets, the rest of the peak.

    Raises PoolNotRunning, or BadInput if no rank has a model.

    Example:

        pool.run_cell("import torch; model = torch.nn.Linear(4, 2)")
        assert pool.memory().to_dict()["ranks"][0]["parameters_bytes"] == (4 * 2 + 2) * 4
    """
    return MemoryResult(command.memory(pool), *pool.marks("memory"))


# -- named objects ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class SizesResult(Result[Sizes]):
    """The bytes of named objects on each rank.

    `to_dict()` has `sizes`, a list of rows, and `to_frame()` has the same rows. The fields of a row:

    - `name`, `rank`, `type`. `total_bytes`: held on this rank; `unsharded_bytes`: of all shards together.
    - `parameters_bytes`, `module_buffers_bytes`, `gradients_bytes`, `optimizer_bytes`, `tensors_bytes`: its parts.
    - `sharded`: a list of str, how its tensors are sharded. `shared`: other names → bytes in common, as a dict.
    """

    def _draw(self) -> Sizes:
        return self._found

    def _data(self) -> Row:
        return {"sizes": self._rows()}

    def _rows(self) -> Sequence[Row]:
        return [_size_row(name, rank, one) for name, of in self._found.held.items() for rank, one in sorted(of.items())]


def _size_row(name: str, rank: int, one: NameSize) -> Row:
    return {
        "name": name, "rank": rank, "type": one.type, "total_bytes": one.total, "unsharded_bytes": one.whole,
        "parameters_bytes": one.parts.get("parameters", 0), "module_buffers_bytes": one.parts.get("module buffers", 0),
        "gradients_bytes": one.parts.get("gradients", 0), "optimizer_bytes": one.parts.get("optimizer state", 0),
        "tensors_bytes": one.parts.get("tensors", 0), "sharded": list(one.sharded), "shared": dict(one.shared),
    }  # fmt: skip


def sizes(pool: WorkerPool, *names: str, ranks: Sequence[int] | None = None) -> SizesResult:
    """The bytes that named objects hold on each rank: what is shared, and what is sharded.

    - names (str): names on the ranks. ranks (several int): which ranks (default: all).

    Raises PoolNotRunning, or BadInput for a name that no rank has or that holds no tensor.

    Example:

        pool.run_cell("import torch; weights = torch.zeros(10)")
        assert pool.sizes("weights").to_dict()["sizes"][0]["total_bytes"] == 40
    """
    return SizesResult(command.sizes(pool, *names, ranks=ranks), *pool.marks("memory"))


# -- over a step ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class AllocationsResult(Result[Allocations]):
    """The allocations of each rank over a step, or over a whole cell.

    The fields of `to_dict()`:

    - `step` (int; None: the whole cell), `steps` (list of int): those that can be shown; `model` (str).
    - `lines`: a list of rows, which `to_frame()` has too.
    - `ranks`: a list of dicts. `kind` is `cuda`, or `heap` or `resident`, which are sampled on the CPU. The other
      keys are `rank`, `before_bytes`, `peak_bytes`, `peak_at_s` (after the start), `phase` of the peak (or empty) and
      `length_s`. Then come `samples` (0: every allocation is known), `complete` (bool) and `curve` (pairs of seconds
      and bytes).
    - `missing`: a list of dicts of `rank` and `why`: ranks without a recording.

    A row has `rank`, `line` (such as `In[3] line 4`), `code`, and `held_bytes`: at the peak; of a sampled rank, the
    change until the peak.
    """

    _columns = ("rank", "line", "code", "held_bytes")

    def _draw(self) -> DescribedFigure:
        from nbddp.capabilities.memory.figure_timeline import draw_allocations

        return draw_allocations(self._found)

    def _data(self) -> Row:
        found = self._found
        return {
            "step": found.step, "steps": list(found.steps), "model": found.model, "lines": self._rows(),
            "ranks": [_rank_window(one) for one in found.ranks],
            "missing": [{"rank": rank, "why": why} for rank, why in sorted((found.missing or {}).items())],
        }  # fmt: skip

    def _rows(self) -> Sequence[Row]:
        return [
            {"rank": rank, "line": line.name, "code": line.code, "held_bytes": held}
            for line in lines(self._found)
            for rank, held in sorted(line.held.items())
        ]


def _rank_window(one: RankAllocations) -> Row:
    seen = one.window
    return {
        "rank": one.rank, "kind": one.kind, "before_bytes": seen.before, "peak_bytes": seen.peak,
        "peak_at_s": seen.at / 1e9, "phase": one.phase(), "length_s": one.length / 1e9, "samples": seen.samples,
        "complete": not one.lost, "curve": [[at / 1e9, held] for at, held in seen.points],
    }  # fmt: skip


def allocations(pool: WorkerPool, step: int | None = None, whole: bool = False) -> AllocationsResult:
    """The allocations of each rank over a step of the last cell that ran with `memory=True`.

    - step (int): its number (default: the step with the highest peak). whole (bool): the whole cell (default False).

    Raises PoolNotRunning, or BadInput if nothing was recorded, or not this step.

    Example:

        pool.run_cell("import torch; kept = torch.zeros(1000)", memory=True)
        peaks = [row["peak_bytes"] for row in pool.allocations(whole=True).to_dict()["ranks"]]
    """
    return AllocationsResult(command.allocations(pool, step, whole), *pool.marks("memory"))
