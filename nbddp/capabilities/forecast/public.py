"""`nbddp.Pool.forecast`: the duration of a step on more nodes, as a figure, text and data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp.capabilities.forecast import command
from nbddp.capabilities.forecast.scale import MOST_NODES, Forecast, Predicted
from nbddp.figures.result import Result, Row

if TYPE_CHECKING:
    from nbddp.figures.figure import DescribedFigure
    from nbddp.pool.pool import WorkerPool


@dataclass(frozen=True, eq=False, repr=False)
class ForecastResult(Result[Forecast]):
    """A recorded step on more nodes, as a model of communication predicts it.

    The fields of `to_dict()`:

    - `model` (str), `step` (int), `recorded_s`, `recorded_ranks`; `ranks_per_node`.
    - `algorithm` (str) of all-reduce; `latency_s`, `bandwidth_bytes_per_s`: of links between nodes (None: too
      high to be seen).
    - `measured_up_to_ranks`: what lies beyond is extrapolated. `assumed`: a list of str.
    - `predicted`: a list of rows, which `to_frame()` has too.

    A row has `scaling` (`weak` or `strong`), `nodes`, `ranks`, `step_s`, `compute_s`, `communication_s`, `exposed_s`,
    `efficiency` (0 to 1) and `extrapolated` (bool).
    """

    def _draw(self) -> DescribedFigure:
        from nbddp.capabilities.forecast.figure import draw_forecast

        return draw_forecast(self._found)

    def _data(self) -> Row:
        some = self._found
        bandwidth = some.inter.bandwidth
        return {
            "model": some.model, "step": some.number, "recorded_s": some.profile.measured,
            "recorded_ranks": some.profile.ranks, "algorithm": some.algorithm, "latency_s": some.inter.latency,
            "bandwidth_bytes_per_s": bandwidth if math.isfinite(bandwidth) else None,
            "ranks_per_node": some.ranks_per_node,
            "measured_up_to_ranks": some.extrapolated_from, "assumed": list(some.assumed), "predicted": self._rows(),
        }  # fmt: skip

    def _rows(self) -> Sequence[Row]:
        some = self._found
        return [
            _row(scaling, one, some.extrapolated_from)
            for scaling, of in (("weak", some.weak), ("strong", some.strong))
            for one in of
        ]


def _row(scaling: str, one: Predicted, known: int) -> Row:
    return {
        "scaling": scaling, "nodes": one.nodes, "ranks": one.ranks, "step_s": one.step, "compute_s": one.compute,
        "communication_s": one.communication, "exposed_s": one.exposed, "efficiency": one.efficiency,
        "extrapolated": one.ranks > known,
    }  # fmt: skip


def forecast(
    pool: WorkerPool,
    *,
    inter_node: float | str | None = None,
    intra_node: float | str | None = None,
    latency: float | str | None = None,
    ranks_per_node: int | None = None,
    nodes: int = MOST_NODES,
    strong: bool = False,
    algorithm: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> ForecastResult:
    """Predict the last recorded step on more nodes, by latency and bandwidth of the links.

    - inter_node, intra_node (float in bytes per second, or str such as `25GB/s`): bandwidth between nodes and within
      one. Default: as measured here.
    - latency (float in seconds, or str such as `10us`): of a message between nodes. Default: as measured here.
    - ranks_per_node (int): default: as in this pool. nodes (int): the largest number of nodes (default 1024).
    - strong (bool): the batch of all ranks together stays as it is, not each rank's (default False).
    - algorithm (str): of all-reduce: `ring`, `tree` or `binomial`. Default: the one that fits the measurements better.
    - progress (function of str): called with a line before each measurement. Default: none.

    All-reduces are measured now if `bench` has not measured any on this number of ranks. Raises PoolNotRunning, or
    BadInput if no step was recorded, on one rank, on simulated GPUs, and for arguments that are impossible.

    Example:

        pool.run(train)
        rows = pool.forecast(inter_node="25GB/s", nodes=4).to_dict()["predicted"]
        assert {row["scaling"] for row in rows} == {"weak", "strong"}
    """
    found = command.forecast(
        pool, inter_node=inter_node, intra_node=intra_node, latency=latency, ranks_per_node=ranks_per_node,
        nodes=nodes, strong=strong, algorithm=algorithm, progress=progress or (lambda text: None),
    )  # fmt: skip
    return ForecastResult(found, *pool.marks("forecast"))
