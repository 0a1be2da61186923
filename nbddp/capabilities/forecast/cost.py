"""The cost of a collective: the α–β model, and how α and β are found from measured collectives.

A message of m bytes takes α + m/β seconds on a link of latency α and bandwidth β. (Hockney, "The communication
challenge for MPP", Parallel Computing 20, 1994.) Every algorithm here is a number of messages one after another, and a
share of the buffer that each rank moves. So time = messages · α + share · bytes / β. That is linear in α and 1/β, so
that a fit is a linear one.

- ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", J. Parallel Distrib. Comput. 69, 2009;
  broadcast as a scatter and a ring all-gather: Thakur, Rabenseifner and Gropp, "Optimization of collective
  communication operations in MPICH", Int. J. High Perform. Comput. Appl. 19, 2005.
- binomial: the whole buffer up and down a binomial tree; gather and scatter halve it (Thakur et al.).
- tree: two binary trees that each carry half, and in which no rank is inside both. (Sanders, Speck and Träff, "Two-tree
  algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35, 2009.) The time in which the
  pipeline fills is left out, as its bandwidth is that of the ring. All-gather and reduce-scatter by recursive doubling
  and halving (Thakur et al.).

Adding the numbers up costs γ per byte in an all-reduce by ring: (n-1)/n · bytes · γ, beside 2(n-1)/n · bytes / β.
The two are proportional for every n and every size, so all-reduces cannot tell them apart: β has γ in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nbddp.capabilities.bench.result import Measured

ALIKE = 1.25  # fits whose root mean square errors differ by less than this factor are not told apart
SPOILT, NOISE = 2.0, 0.05  # a common fit may be so much worse than that of one world size, or so bad in any case


@dataclass(frozen=True)
class Link:
    """latency: seconds per message; bandwidth: bytes per second, `inf` for a link that costs nothing per byte."""

    latency: float
    bandwidth: float

    def shared(self, among: float) -> Link:
        """The link for one of `among` that use it at once, and all in turn: each message waits for its turn, and
        each byte too."""
        return Link(self.latency * among, self.bandwidth / among)


def _log2(ranks: int) -> int:
    """⌈log2 n⌉."""
    return (ranks - 1).bit_length()


# algorithm → collective → ranks → (messages one after another, share of the buffer)
COSTS: dict[str, dict[str, Callable[[int], tuple[int, float]]]] = {
    "ring": {
        "all_reduce": lambda n: (2 * (n - 1), 2 * (n - 1) / n),
        "all_gather": lambda n: (n - 1, (n - 1) / n),
        "reduce_scatter": lambda n: (n - 1, (n - 1) / n),
        "broadcast": lambda n: (_log2(n) + n - 1, 2 * (n - 1) / n),
    },
    "tree": {
        "all_reduce": lambda n: (2 * _log2(n), 2 * (n - 1) / n),
        "all_gather": lambda n: (_log2(n), (n - 1) / n),
        "reduce_scatter": lambda n: (_log2(n), (n - 1) / n),
        "broadcast": lambda n: (_log2(n), min(1, n - 1)),
    },
    "binomial": {
        "all_reduce": lambda n: (2 * _log2(n), 2 * _log2(n)),
        "all_gather": lambda n: (2 * _log2(n), (n - 1) / n + _log2(n)),
        "reduce_scatter": lambda n: (2 * _log2(n), _log2(n) + (n - 1) / n),
        "broadcast": lambda n: (_log2(n), _log2(n)),
    },
}
ALGORITHMS = tuple(COSTS)


def seconds(algorithm: str, collective: str, ranks: int, count: float, link: Link) -> float:
    """Time of a collective on `count` bytes: of the whole buffer, as nccl-tests counts. 0 on one rank.

    Raises KeyError for an algorithm or a collective that COSTS does not have.
    """
    messages, share = COSTS[algorithm][collective](ranks)
    return messages * link.latency + share * count / link.bandwidth


def hierarchical(
    count: float, nodes: int, ranks_per_node: int, intra: Link, inter: Link, algorithm: str = "ring"
) -> float:
    """Seconds of an all-reduce in three parts: reduce-scatter within each node, all-reduce between nodes, all-gather
    within each node.

    Between nodes each rank of a node exchanges its share with the ranks of the same local rank. All do so at once over
    the node's link: `count` bytes in all cross it, and latencies pass side by side.
    """
    within = sum(seconds(algorithm, c, ranks_per_node, count, intra) for c in ("reduce_scatter", "all_gather"))
    return within + seconds(algorithm, "all_reduce", nodes, count, inter)


@dataclass(frozen=True)
class LinkFit:
    """A link that explains measured collectives by one algorithm.

    error: the median of |predicted / measured - 1|; worst: the largest; rms: the root of their mean square.
    ranks: the world sizes it was fitted on.
    """

    algorithm: str
    link: Link
    error: float
    worst: float
    rms: float
    points: int
    ranks: tuple[int, ...]


def fit(measured: Iterable[Measured]) -> dict[str, LinkFit]:
    """Algorithm → the link that fits best, by least squares of the relative errors. Sizes span decades: a microsecond
    matters as much for the small ones as a millisecond for the large. Neither part is negative.

    Collectives on one rank, without time, or that COSTS does not have are left out.
    Raises ValueError if fewer than two different sizes are left: two unknowns need two.
    """
    known = [m for m in measured if m.ranks > 1 and m.median > 0 and m.collective in COSTS["ring"]]
    if len({m.bytes for m in known}) < 2:
        raise ValueError("a latency and a bandwidth need collectives of at least two sizes")
    return {algorithm: _fit(algorithm, known) for algorithm in ALGORITHMS}


def _fit(algorithm: str, known: Sequence[Measured]) -> LinkFit:
    rows = []
    for m in known:
        messages, share = COSTS[algorithm][m.collective](m.ranks)
        rows.append((messages / m.median, share * m.bytes / m.median))
    latency, inverse = _least_squares(rows)
    errors = [abs(a * latency + b * inverse - 1) for a, b in rows]
    link = Link(latency, 1 / inverse if inverse > 0 else math.inf)
    rms = math.sqrt(statistics.fmean(e * e for e in errors))
    ranks = tuple(sorted({m.ranks for m in known}))
    return LinkFit(algorithm, link, statistics.median(errors), max(errors), rms, len(rows), ranks)


def _least_squares(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """x, y ≥ 0 that make a·x + b·y nearest to 1 over all rows (a, b); of two unknowns at most one is at its bound."""
    scale = max(b for _, b in rows) or 1.0  # bytes per second are many: keep the determinant within reach
    aa = sum(a * a for a, _ in rows)
    ab = sum(a * b / scale for a, b in rows)
    bb = sum((b / scale) ** 2 for _, b in rows)
    a1, b1 = sum(a for a, _ in rows), sum(b / scale for _, b in rows)
    determinant = aa * bb - ab * ab
    x = y = -1.0
    if determinant > 1e-12 * aa * bb:
        x, y = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    if x < 0 or y < 0:
        alone = [(a1 / aa, 0.0), (0.0, b1 / bb)]
        x, y = min(alone, key=lambda p: sum((a * p[0] + b / scale * p[1] - 1) ** 2 for a, b in rows))
    return x, y / scale


def better(fits: Mapping[str, LinkFit]) -> tuple[LinkFit, bool]:
    """The fit of least squares, and whether the data decide it. If not, the first of ALGORITHMS that is as good as any:
    ring. So it is on a single world size, where every algorithm is some latency and some bandwidth."""
    least = min(f.rms for f in fits.values())
    as_good = [f for f in fits.values() if f.rms <= ALIKE * least + 1e-6]
    return as_good[0], len(as_good) == 1


def together(measured: Sequence[Measured], ranks: int) -> list[Measured]:
    """Of the measured collectives those that one link explains: all of them, or those on `ranks` alone where the others
    spoil their fit. They do where ranks share cores by turns.

    Raises ValueError as `fit` does if there are too few on `ranks`.
    """
    here = [m for m in measured if m.ranks == ranks]
    alone, mixed = (min(f.rms for f in fit(some).values()) for some in (here, measured))
    return list(measured) if mixed <= max(SPOILT * alone, NOISE) else here
