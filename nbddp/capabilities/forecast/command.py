"""A forecast from what a pool has: the steps it recorded and the collectives it measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from nbddp.analysis.steps import Recording
from nbddp.analysis.wait_time import typical
from nbddp.capabilities.bench.result import Measured
from nbddp.capabilities.forecast.cost import ALGORITHMS
from nbddp.capabilities.forecast.scale import MOST_NODES, Forecast, forecast
from nbddp.errors import BadInput
from nbddp.launch.topology import Topology
from nbddp.launch.units import delay, speed

LEAST = 20  # all-reduces are measured up to 2**20 bytes at least
Quantity = float | str | None  # bytes per second or seconds as a number, or as typed: 25GB/s, 10us


class Source(Protocol):
    """Where recordings and measurements come from; `measured` are those that there are."""

    measured: list[Measured]

    def timings(self) -> Recording: ...
    def placed(self) -> Topology: ...
    def bench(self, collective: str, sizes: Sequence[int], *, progress: Callable[[str], None]) -> list[Measured]: ...


def foresee(
    source: Source,
    *,
    inter_node: Quantity = None,
    intra_node: Quantity = None,
    latency: Quantity = None,
    ranks_per_node: int | None = None,
    nodes: int = MOST_NODES,
    strong: bool = False,
    algorithm: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Forecast:
    """What `Pool.forecast` does."""
    asked = [_number(v, speed) for v in (inter_node, intra_node)]
    wait = _number(latency, delay)
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise BadInput(f"there is no algorithm {algorithm}; use {', '.join(ALGORITHMS)}")
    if nodes < 1 or (ranks_per_node is not None and ranks_per_node < 1):
        raise BadInput("a forecast needs at least one node and one rank on it; use --nodes 1 and --ranks-per-node 1")
    recording = source.timings()
    number = typical(recording)
    if number is None:
        raise BadInput(
            "no step was recorded on every rank, so there is nothing to forecast from; train on all ranks in one cell"
        )
    largest = max((b.bytes for s in recording.step(number).values() for b in s.buckets), default=0)
    per_node = ranks_per_node or len(source.placed().on_node(0))
    return forecast(
        recording, _measured(source, largest, progress), inter_node=asked[0], intra_node=asked[1], latency=wait,
        ranks_per_node=per_node, nodes=nodes, strong=strong, algorithm=algorithm, world_size=source.placed().world_size,
    )  # fmt: skip


def _measured(source: Source, largest: int, progress: Callable[[str], None]) -> list[Measured]:
    """All-reduces that were measured on this pool; measured now if none on its present number of ranks were, or none as
    large as the `largest` bucket: a bandwidth found on small messages says nothing of large ones.

    Those on other numbers of ranks count too: they tell the algorithms apart.
    """
    size = source.placed().world_size
    if size < 2:
        raise BadInput("collectives cannot be measured on one rank; %ddp start --nproc 2, train there, then forecast")
    sizes = {m.bytes for m in source.measured if (m.collective, m.ranks) == ("all_reduce", size)}
    if len(sizes) < 2 or max(sizes) < largest / 2:
        progress(f"measuring all-reduces on {size} ranks, once")
        top = max(LEAST, (max(largest, 1) - 1).bit_length())
        source.bench("all_reduce", [1 << k for k in range(10, top + 1)], progress=progress)
    return [m for m in source.measured if m.collective == "all_reduce"]


def _number(value: Quantity, parse: Callable[[str], float]) -> float | None:
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ValueError as e:
        raise BadInput(str(e)) from None
