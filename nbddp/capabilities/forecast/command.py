"""`%ddp forecast` and `Pool.forecast`: from the steps that a pool has recorded and the collectives it has measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nbddp.analysis.steps import Recording
from nbddp.analysis.wait_time import typical
from nbddp.capabilities.bench.result import Measured
from nbddp.capabilities.forecast import scale
from nbddp.capabilities.forecast.cost import ALGORITHMS
from nbddp.capabilities.forecast.scale import MOST_NODES, Forecast
from nbddp.errors import BadInput
from nbddp.launch.options import Parser, positive, quantity
from nbddp.launch.topology import Topology
from nbddp.launch.units import delay, speed
from nbddp.notebook.commands import Asked, CommandLine

LEAST = 20  # all-reduces are measured up to 2**20 bytes at least
Quantity = float | str | None  # bytes per second or seconds as a number, or as typed: 25GB/s, 10us


class Source(Protocol):
    """Where recordings and measurements come from; `measured` are those that there are."""

    measured: list[Measured]

    def timings(self) -> Recording: ...
    def placed(self) -> Topology: ...
    def bench(self, collective: str, sizes: Sequence[int], *, progress: Callable[[str], None]) -> list[Measured]: ...


def forecast(
    pool: Source,
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
    """Predict the last recorded step on more nodes, by the α–β model of `nbddp.capabilities.forecast.cost`.

    - inter_node, intra_node: bandwidth, as `25GB/s` or bytes per second; intra_node defaults to the measured one.
    - latency: between nodes, as `10us` or seconds.
    - ranks_per_node, nodes (default 1024), strong (default False), algorithm (`ring`, `tree` or `binomial`),
      progress.

    Links that are not given are taken as measured; all-reduces are measured now if there are no measurements on
    this number of ranks. Raises BadInput if no step has been recorded, or for impossible arguments.
    """
    asked = [_number(v, speed) for v in (inter_node, intra_node)]
    wait = _number(latency, delay)
    _refuse(pool.placed(), algorithm, nodes, ranks_per_node)
    recording = pool.timings()
    number = typical(recording)
    if number is None:
        raise BadInput(
            "no step was recorded on every rank, so there is nothing to forecast from; train on all ranks in one cell"
        )
    largest = max((b.bytes for s in recording.step(number).values() for b in s.buckets), default=0)
    return scale.forecast(
        recording, _measured(pool, largest, progress), inter_node=asked[0], intra_node=asked[1], latency=wait,
        ranks_per_node=ranks_per_node or len(pool.placed().on_node(0)), nodes=nodes, strong=strong, algorithm=algorithm,
        world_size=pool.placed().world_size,
    )  # fmt: skip


def _refuse(placed: Topology, algorithm: str | None, nodes: int, ranks_per_node: int | None) -> None:
    """Raises BadInput for arguments that are impossible, and where the times are not the devices'."""
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise BadInput(f"there is no algorithm {algorithm!r}; use {', '.join(ALGORITHMS)}")
    if nodes < 1 or (ranks_per_node is not None and ranks_per_node < 1):
        raise BadInput("a forecast needs at least one node and one rank on it; use --nodes 1 and --ranks-per-node 1")
    if placed.simulates_gpus:
        raise BadInput(
            "the steps were timed on simulated GPUs, for which the CPU computes, so they say nothing of a GPU's; train "
            "on GPUs, or without --simulate-gpus for a forecast of CPUs"
        )


def _measured(source: Source, largest: int, progress: Callable[[str], None]) -> list[Measured]:
    """All-reduces that were measured on this pool. They are measured now if fewer than two sizes were on this number of
    ranks, or none at least half the `largest` bucket. A bandwidth found on small messages says nothing of large ones.

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


def arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--inter-node", type=quantity(speed), metavar="SPEED", help="bandwidth between nodes, such as 25GB/s")
    add("--intra-node", type=quantity(speed), metavar="SPEED", help="bandwidth within a node "
        "(default: measured)")  # fmt: skip
    add("--latency", type=quantity(delay), metavar="TIME", help="latency between nodes, such as 10us")
    add("--ranks-per-node", type=positive, metavar="N", help="default: as in the pool")
    add("--nodes", type=positive, default=MOST_NODES, metavar="N", help="largest number of nodes (default 1024)")
    add("--strong", action="store_true", help="strong scaling: the global batch stays the same")
    add("--algorithm", choices=ALGORITHMS, help="all-reduce algorithm (default: the one with the better fit)")


def show(asked: Asked, line: CommandLine) -> Any:
    from nbddp.capabilities.forecast.figure import draw_forecast

    with asked.progress() as progress:
        found = forecast(asked.pool, **line.args, progress=progress)
    return draw_forecast(found)
