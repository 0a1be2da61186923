"""`nbddp.Pool.bench`: measured collectives as a figure, text and data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp.capabilities.bench import command
from nbddp.capabilities.bench.command import REPEAT, WARMUP
from nbddp.capabilities.bench.result import Measured
from nbddp.figures.result import Result, Row

if TYPE_CHECKING:
    from nbddp.figures.figure import DescribedFigure
    from nbddp.pool.pool import WorkerPool


@dataclass(frozen=True, eq=False, repr=False)
class BenchResult(Result[list[Measured]]):
    """Times and bandwidths of collectives.

    `to_dict()` has `measured`, a list of rows. There each has `times_s` besides: one float per repetition. `to_frame()`
    has the rows. The fields of a row:

    - `collective` (str), `size_bytes` (as nccl-tests counts it), `ranks`.
    - `median_s`, `first_quartile_s`, `third_quartile_s`: of one call.
    - `algorithm_bytes_per_s`, `bus_bytes_per_s`: as nccl-tests has them.
    - `wrong`: the number of wrong elements in results.
    """

    def _draw(self) -> DescribedFigure:
        from nbddp.capabilities.bench.figure import draw_bench

        return draw_bench(self._found)

    def _data(self) -> Row:
        rows = zip(self._rows(), self._found, strict=True)
        return {"measured": [{**row, "times_s": list(m.seconds)} for row, m in rows]}

    def _rows(self) -> Sequence[Row]:
        return [
            {
                "collective": m.collective, "size_bytes": m.bytes, "ranks": m.ranks, "median_s": m.median,
                "first_quartile_s": m.spread[0], "third_quartile_s": m.spread[1],
                "algorithm_bytes_per_s": m.algorithm_bandwidth, "bus_bytes_per_s": m.bus_bandwidth, "wrong": m.wrong,
            }
            for m in self._found
        ]  # fmt: skip


def bench(
    pool: WorkerPool,
    collective: str | Sequence[str] = "all_reduce",
    sizes: Sequence[int] | None = None,
    *,
    repeat: int = REPEAT,
    warmup: int = WARMUP,
    progress: Callable[[str], None] | None = None,
) -> BenchResult:
    """Measure collectives on this pool's ranks, as nccl-tests does.

    - collective (str or several): `all_reduce` (default), `all_gather`, `reduce_scatter`, `broadcast`, `all_to_all`,
      …; another name raises an error that lists them.
    - sizes (several int): bytes. Default: 1 KiB to 64 MiB, each 4 times the one before.
    - repeat, warmup (int): measurements of each size (default 12), and calls before them (default 3).
    - progress (function of str): called with a line before each size. Default: none.

    The ranks meet in a process group of their own, and the program's groups count none of it. Raises PoolNotRunning, or
    BadInput for one rank, or sizes and counts that are impossible.

    Example:

        found = pool.bench("all_reduce", [1024, 65536], repeat=2)
        assert [row["size_bytes"] for row in found.to_dict()["measured"]] == [1024, 65536]
    """
    found = command.bench(
        pool, collective, sizes, repeat=repeat, warmup=warmup, progress=progress or (lambda text: None)
    )
    return BenchResult(found, *pool.marks("bench"))
