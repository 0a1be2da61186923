"""Ways to normalise a batch that lies in shards on ranks, right and wrong, in plain numbers.

A check explains a wrong answer by the wrong way that gives exactly its numbers on every rank. This module lists ways to
get a mean, a variance, a scale and a gradient, the right one first, and combines them. Pure: imports only the standard
library and this room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import sqrt
from statistics import NormalDist
from typing import Any

from nbddp.lessons.framework.closeness import is_near
from nbddp.lessons.l06_samples.simulation import randperm
from nbddp.lessons.l07_batch_norm.simulation import Moments, merge, moments

NEAR = 1e-3  # float32, values of size 1
EPS = 0.1  # large, so that it shows where it is added
FEATURES = 2
Rows = Sequence[Sequence[float]]  # samples × features
Columns = Sequence[Sequence[float]]  # by rank, its samples of one feature


def near(some: Sequence[float], others: Sequence[float]) -> bool:
    return all(is_near(a, b, NEAR) for a, b in zip(some, others, strict=False))


# -- data ------------------------------------------------------------------------------------


def shards_for(world_size: int, seed: int = 0) -> list[list[list[float]]]:
    """A shard for each rank, of 3, 5, 4, 3, ... samples with FEATURES features; means and variances differ."""
    sizes = [3 + (2 * r) % 3 for r in range(world_size)]
    total = sum(sizes) * FEATURES
    normal = iter([NormalDist().inv_cdf((i + 0.5) / total) for i in randperm(total, seed)])
    return [
        [[0.5 + r + (1 + 0.5 * (r % 3)) * next(normal) for _ in range(FEATURES)] for _ in range(n)]
        for r, n in enumerate(sizes)
    ]


def feature(shards: Sequence[Rows], k: int) -> Columns:
    """One feature of all samples, by rank."""
    return [[row[k] for row in shard] for shard in shards]


# -- ways to get a mean and a variance ---------------------------------------------------------


@dataclass(frozen=True)
class KnownMoments:
    """What a rank could know of a feature: its own moments, those of each rank, and those of the whole."""

    rank: int
    ranks: Sequence[Moments]
    whole: Moments

    @property
    def own(self) -> Moments:
        return self.ranks[self.rank]

    @property
    def total(self) -> float:
        """The sum of all samples."""
        return self.whole.n * self.whole.mean

    @property
    def squares(self) -> float:
        """The sum of the squares of all samples."""
        return self.whole.n * (self.whole.variance + self.whole.mean**2)

    def plain(self, what: Callable[[Moments], float]) -> float:
        """The mean over ranks, each rank with the same weight."""
        return sum(what(m) for m in self.ranks) / len(self.ranks)

    def weighted(self, what: Callable[[Moments], float]) -> float:
        """The mean over ranks, each weighted by its number of samples."""
        return sum(m.n * what(m) for m in self.ranks) / self.whole.n


@dataclass(frozen=True)
class StatisticRule:
    """A way to get a number, right if it has no words: `of(known)`."""

    words: str
    of: Callable[[KnownMoments], float]


def known(columns: Columns) -> list[KnownMoments]:
    """By rank, for one feature."""
    ranks = [moments(c) for c in columns]
    return [KnownMoments(r, ranks, merge(ranks)) for r in range(len(ranks))]


UNLIKE = "ranks have different numbers of samples, so it is not the mean of the ranks' means; divide sums by counts"
MEAN_SQUARES = (
    "the ranks' mean squares are averaged, but ranks have different numbers of samples; divide sums by counts"
)
SPREAD = "the variances are averaged: that omits the distance between the ranks' means; merge them, or add up squares"
MEANS = (
    StatisticRule("", lambda k: k.whole.mean),
    StatisticRule("it is of the rank's own samples; add up sums and counts over all ranks", lambda k: k.own.mean),
    StatisticRule(UNLIKE, lambda k: k.plain(lambda m: m.mean)),
    StatisticRule(
        "the sum over all ranks is divided by the rank's own count; add up the counts too", lambda k: k.total / k.own.n
    ),
    StatisticRule(
        "the sum over all ranks is divided by world size × the rank's own count; add up the counts too",
        lambda k: k.total / k.own.n / len(k.ranks),
    ),
    StatisticRule("the sum over all ranks is not divided by the number of samples", lambda k: k.total),
    StatisticRule("the ranks' means are added up, not averaged", lambda k: sum(m.mean for m in k.ranks)),
    StatisticRule("it is taken as 0", lambda k: 0.0),
    StatisticRule("that is the variance; return the mean first", lambda k: k.whole.variance),
    StatisticRule(
        "the count is the number of values (samples × features); count samples, len(x)",
        lambda k: k.whole.mean / FEATURES,
    ),
    StatisticRule(
        "the count is the number of features; x.shape[0] is the number of samples",
        lambda k: k.total / len(k.ranks) / FEATURES,
    ),
    StatisticRule("the sum is divided by the number of ranks, not of samples", lambda k: k.total / len(k.ranks)),
)


def why_moment(ways: Sequence[StatisticRule], shards: Sequence[Rows], given: Rows) -> str:
    """The way that gives these means or variances, of shape (features, ranks); empty if it is right or not known."""
    for way in ways:
        made = ([way.of(k) for k in known(feature(shards, f))] for f in range(FEATURES))
        if all(map(near, given, made)):
            return way.words
    return ""


def why_divisor(shards: Sequence[Rows], given: Rows) -> str:
    """The same whole number that all sums were divided by to give these means, of shape (features, ranks)."""
    n = sum(map(len, shards))
    divisors = {
        round(k.total / mean, 2) if mean else 0.0
        for f in range(FEATURES)
        for k, mean in zip(known(feature(shards, f)), given[f], strict=True)
    }
    number = divisors.pop()
    return f"the sum of all samples is divided by {number:.0f}, and there are {n}" * (
        not divisors and number > 0 and number == round(number)
    )


def unbiased(m: Moments) -> float:
    """The variance divided by n − 1, as an estimate has it; of one sample 0."""
    return m.variance * m.n / max(m.n - 1, 1)


VARIANCES = (
    StatisticRule("", lambda k: k.whole.variance),
    StatisticRule("it is of the rank's own samples", lambda k: k.own.variance),
    StatisticRule("it divides by n − 1, but batch norm divides by n: unbiased=False", lambda k: unbiased(k.whole)),
    StatisticRule(SPREAD, lambda k: k.plain(lambda m: m.variance)),
    StatisticRule(SPREAD, lambda k: k.weighted(lambda m: m.variance)),
    StatisticRule(SPREAD + "; and n − 1 is for estimates", lambda k: k.plain(unbiased)),
    StatisticRule(SPREAD + "; and n − 1 is for estimates", lambda k: k.weighted(unbiased)),
    StatisticRule("it is of the rank's own samples, and divides by n − 1", lambda k: unbiased(k.own)),
    StatisticRule("subtract the square of the mean from the mean of the squares", lambda k: k.squares / k.whole.n),
    StatisticRule(
        "the sum of squares over all ranks is divided by the rank's own count; add up the counts too",
        lambda k: k.squares / k.own.n - k.whole.mean**2,
    ),
    StatisticRule(
        "the sum of squares over all ranks is divided by the rank's own count; add up the counts too",
        lambda k: k.whole.n * k.whole.variance / k.own.n,
    ),
    StatisticRule(
        "sums over all ranks are divided by the rank's own count; add up the counts too",
        lambda k: k.squares / k.own.n - (k.total / k.own.n) ** 2,
    ),
    StatisticRule(
        "sums over all ranks are divided by world size × the rank's own count; add up the counts too",
        lambda k: k.squares / k.own.n / len(k.ranks) - (k.total / k.own.n / len(k.ranks)) ** 2,
    ),
    StatisticRule(
        MEAN_SQUARES,
        lambda k: k.plain(lambda m: m.variance + m.mean**2) - k.plain(lambda m: m.mean) ** 2,
    ),
    StatisticRule("the ranks' variances are added up", lambda k: sum(m.variance for m in k.ranks)),
    StatisticRule("that is the standard deviation; return its square", lambda k: sqrt(k.whole.variance)),
    StatisticRule(
        "each rank's sum is squared instead of its samples: (x * x).sum(0), not x.sum(0) ** 2",
        lambda k: sum((m.n * m.mean) ** 2 for m in k.ranks) / k.whole.n - k.whole.mean**2,
    ),
    StatisticRule(
        "the square of the mean is (sum / n) ** 2, not sum / n ** 2",
        lambda k: k.squares / k.whole.n - k.total / k.whole.n**2,
    ),
    StatisticRule(
        "the sign is reversed: it is the mean of the squares minus the square of the mean",
        lambda k: -k.whole.variance,
    ),
    StatisticRule(
        "the sum of squared distances is not divided by the number of samples", lambda k: k.whole.n * k.whole.variance
    ),
    StatisticRule(
        "it is of the rank's own samples, though around the mean of all; add up over all ranks",
        lambda k: k.own.variance + (k.own.mean - k.whole.mean) ** 2,
    ),
    StatisticRule(
        MEAN_SQUARES,
        lambda k: k.plain(lambda m: m.variance + (m.mean - k.whole.mean) ** 2),
    ),
)
SCALES: tuple[tuple[str, Callable[[float, float], float]], ...] = (
    ("", lambda v, eps: sqrt(v + eps)),
    ("eps belongs under the root: sqrt(variance + eps)", lambda v, eps: sqrt(v) + eps),
    ("eps is missing or is not the argument: sqrt(variance + eps)", lambda v, eps: sqrt(v)),
    ("it is divided by the variance; divide by its square root", lambda v, eps: v + eps),
    ("divide by sqrt(variance + eps)", lambda v, eps: 1.0),
)


# -- forward ---------------------------------------------------------------------------------


def forward(
    columns: Columns, mean: StatisticRule, variance: StatisticRule, scale: Callable[[float, float], float]
) -> list[list[float]]:
    """The output of a feature by rank; nan where a variance came out negative."""
    found = []
    for column, k in zip(columns, known(columns), strict=True):
        m, v = mean.of(k), variance.of(k)
        found.append([(x - m) / scale(v, EPS) if v > 0 else float("nan") for x in column])
    return found


def why_output(shards: Sequence[Rows], given: Sequence[Rows]) -> str:
    """The mistakes that give these outputs, the fewest first; or nothing."""
    ways = sorted(product(MEANS, VARIANCES, SCALES), key=lambda w: sum(map(bool, (w[0].words, w[1].words, w[2][0]))))
    for mean, variance, (scaled, scale) in ways:
        if all(_same(forward(feature(shards, f), mean, variance, scale), feature(given, f)) for f in range(FEATURES)):
            said = [("the mean: ", mean.words), ("the variance: ", variance.words), ("the scale: ", scaled)]
            return "; ".join(head + words for head, words in said if words)
    return ""


def _same(some: Columns, others: Columns) -> bool:
    return all(map(near, some, others))


# -- backward --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slope:
    """What a rank could know of a feature's gradient. Let g be the gradient of the outputs and y the outputs
    themselves, by rank. The gradient of the inputs is `(g − Σg / n − y Σgy / n) / s`, where the sums and n are over all
    samples."""

    rank: int
    g: Columns
    y: Columns
    s: float

    def gradient(self, by_mean: float, by_variance: float, sums: Callable[[Slope, Columns], float]) -> list[float]:
        """With these weights on the two parts that come through mean and variance, and this way to add up."""
        gy = [[a * b for a, b in zip(ga, ya, strict=True)] for ga, ya in zip(self.g, self.y, strict=True)]
        a, b = by_mean * sums(self, self.g), by_variance * sums(self, gy)
        return [(g - a - y * b) / self.s for g, y in zip(self.g[self.rank], self.y[self.rank], strict=True)]

    @property
    def n(self) -> int:
        return sum(map(len, self.g))


def over_all(slope: Slope, terms: Columns) -> float:
    """Σ over all ranks / n over all ranks: the right way."""
    return sum(map(sum, terms)) / slope.n


def over_own(slope: Slope, terms: Columns) -> float:
    return sum(terms[slope.rank]) / slope.n


def over_own_by_own(slope: Slope, terms: Columns) -> float:
    return sum(terms[slope.rank]) / len(terms[slope.rank])


def over_all_by_own(slope: Slope, terms: Columns) -> float:
    return sum(map(sum, terms)) / len(terms[slope.rank])


THROUGH = "the gradient must go through the statistics too: "
GRADIENTS: tuple[tuple[str, float, float, Callable[[Slope, Columns], float]], ...] = (
    ("", 1, 1, over_all),
    (THROUGH + "here mean and variance are constants, as when backward returns nothing", 0, 0, over_all),
    (THROUGH + "the contribution through the variance is missing", 1, 0, over_all),
    (THROUGH + "the contribution through the mean is missing", 0, 1, over_all),
    (
        THROUGH + "it contains only this rank's outputs, not the other ranks'; autograd does not see dist.all_reduce, "
        "whose backward is an all_reduce of the gradients", 1, 1, over_own,
    ),
    (
        THROUGH + "the contribution through the variance is missing, and so are the other ranks' contributions through "
        "the mean", 1, 0, over_own,
    ),
    (
        THROUGH + "the contribution through the mean is missing, and so are the other ranks' contributions through the "
        "variance", 0, 1, over_own,
    ),
    ("it treats the rank's own samples as the whole batch: add up over all ranks", 1, 1, over_own_by_own),
    ("the sums over all ranks are divided by the rank's own count, not by the whole batch's", 1, 1, over_all_by_own),
    (
        "the contribution through the statistics is divided by the world size: in backward the gradients of all ranks "
        "are added up, not averaged", 1, 1, lambda slope, terms: over_all(slope, terms) / len(terms),
    ),
    (
        "the contribution through the statistics is the rank's own, over the world size",
        1, 1, lambda slope, terms: over_own(slope, terms) / len(terms),
    ),
    (
        "the contribution through the statistics is world size × too large: it is summed twice",
        1, 1, lambda slope, terms: over_all(slope, terms) * len(terms),
    ),
    (
        "the contribution through the statistics is the rank's own times the world size: add up all ranks' instead",
        1, 1, lambda slope, terms: over_own(slope, terms) * len(terms),
    ),
)  # fmt: skip


def slopes(columns: Columns, weights: Columns) -> list[Slope]:
    """By rank, for one feature and a loss that is the sum of weights × outputs over all ranks."""
    y = forward(columns, MEANS[0], VARIANCES[0], SCALES[0][1])
    s = sqrt(merge([moments(c) for c in columns]).variance + EPS)
    return [Slope(r, weights, y, s) for r in range(len(columns))]


def gradients(columns: Columns, weights: Columns, way: tuple[str, float, float, Any]) -> list[list[float]]:
    """The gradient of a feature's inputs by rank, got in this way."""
    return [slope.gradient(*way[1:]) for slope in slopes(columns, weights)]


def why_gradient(shards: Sequence[Rows], weights: Sequence[Rows], given: Sequence[Rows]) -> str:
    """The mistake that gives these gradients, or nothing."""
    features = range(FEATURES)
    made = [[gradients(feature(shards, f), feature(weights, f), way) for f in features] for way in GRADIENTS]
    for way, columns in zip(GRADIENTS, made, strict=True):
        if all(_same(columns[f], feature(given, f)) for f in features):
            return way[0]
    pairs = [
        (a, b) for f in features for mine, wanted in zip(feature(given, f), made[0][f], strict=True)
        for a, b in zip(mine, wanted, strict=True)
    ]  # fmt: skip
    a, b = max(pairs, key=lambda pair: abs(pair[1]))
    if near([a / b * wanted for _, wanted in pairs], [mine for mine, _ in pairs]):
        return f"all gradients are {a / b:.2f} × the right ones"
    return ""
