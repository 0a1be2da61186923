"""Lesson 07's explorer: the statistics of shards against those of the whole batch, and how these follow from those.

Variances here divide by the number of samples, as batch norm's do. Pure: imports only the standard library,
`nbddp.launch.machine` and this room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import sqrt
from statistics import NormalDist

from nbddp.errors import counted
from nbddp.lessons.l06_samples.simulation import randperm

EQUAL, UNEQUAL = "equal", "the last one smaller"


@dataclass(frozen=True)
class Moments:
    """`n` samples, their mean and their variance (divided by n)."""

    n: int
    mean: float
    variance: float


def two(value: float, sign: str = "") -> str:
    """Two decimals, without the minus sign of a zero; sign: `+` to have a plus sign too."""
    return f"{round(value, 2) + 0.0:{sign}.2f}"


def moments(values: Sequence[float]) -> Moments:
    """Of at least one value, in two passes."""
    mean = sum(values) / len(values)
    return Moments(len(values), mean, sum((v - mean) ** 2 for v in values) / len(values))


def merged(a: Moments, b: Moments) -> Moments:
    """The moments of two sets of samples together, for variances that divide by n. (Chan, Golub and LeVeque, "Updating
    formulae and a pairwise algorithm for computing sample variances", Stanford report STAN-CS-79-773, 1979.)

    Besides the two variances there is a part for how far apart the means lie.
    """
    n, apart = a.n + b.n, b.mean - a.mean
    within = (a.n * a.variance + b.n * b.variance) / n
    return Moments(n, a.mean + apart * b.n / n, within + apart**2 * a.n * b.n / n**2)


def merge(parts: Sequence[Moments]) -> Moments:
    """The moments of all parts together."""
    return reduce(merged, parts)


@dataclass(frozen=True)
class Sharded:
    """A batch of one feature, a shard per rank. `own[rank]` are a shard's moments, `whole` those of the batch."""

    shards: tuple[tuple[float, ...], ...]
    own: tuple[Moments, ...]
    whole: Moments

    @property
    def averaged(self) -> float:
        """The plain mean of the ranks' variances, which is not the variance of the whole."""
        return sum(m.variance for m in self.own) / len(self.own)

    def becomes(self, rank: int) -> float:
        """What a rank makes of the value at the whole batch's mean, normalised by its own statistics."""
        m = self.own[rank]
        return (self.whole.mean - m.mean) / sqrt(m.variance)

    def head(self) -> str:
        """`4 ranks with 4 samples each`."""
        sizes = [m.n for m in self.own]
        ranks = counted(len(sizes), "rank")
        if len(set(sizes)) == 1:
            return f"{ranks} with {sizes[0]} samples{' each' * (len(sizes) > 1)}"
        return f"{ranks} with {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} samples"

    def verdict(self) -> str:
        """What the mean of the variances lacks, and what ranks make of one and the same value."""
        if len(self.own) == 1:
            return "one rank has the whole batch: nothing to merge"
        off = 100 * (self.averaged / self.whole.variance - 1)
        much = f"{abs(off):.0f} % {'less' if off < 0 else 'more'} than" if abs(off) >= 0.5 else "about"
        made = ", ".join(two(self.becomes(r), "+") for r in range(len(self.own)))
        return (
            f"mean of the variances: {two(self.averaged)}, {much} the variance of the whole\n"
            f"{two(self.whole.mean)} is normalized to 0 with the whole batch's statistics; with the ranks' own: {made}"
        )

    def describe(self) -> str:
        lines = [self.head()]
        lines += [f"rank {r}: mean {two(m.mean)}, variance {two(m.variance)}" for r, m in enumerate(self.own)]
        w = self.whole
        lines.append(f"merged: {w.n} samples, mean {two(w.mean)}, variance {two(w.variance)}")
        return "\n".join([*lines, self.verdict()])


def sharded(per_rank: int = 4, ranks: int = 4, shift: int = 0, sizes: str = EQUAL) -> Sharded:
    """A batch whose values are normal (quantiles in a fixed random order) with standard deviation 1.

    per_rank: samples of a rank, at least 2; with UNEQUAL sizes the last has half of that. shift: tenths by which each
    rank's values lie higher than those of the rank before, as when the ranks read different kinds of data.
    """
    counts = [per_rank] * ranks
    if sizes == UNEQUAL:
        counts[-1] = max(2, per_rank // 2)
    total = sum(counts)
    normal = [NormalDist().inv_cdf((i + 0.5) / total) for i in randperm(total, 0)]
    shards, first = [], 0
    for rank, n in enumerate(counts):
        shards.append(tuple(v + rank * shift / 10 for v in normal[first : first + n]))
        first += n
    own = tuple(moments(s) for s in shards)
    return Sharded(tuple(shards), own, merge(own))
