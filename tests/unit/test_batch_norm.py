"""Lesson 07: merged moments and the listed ways to normalise against closed forms and PyTorch, and the checks of its
two exercises on real ranks with unequal shards."""

from __future__ import annotations

import statistics as std
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.lessons.l07_batch_norm import norms
from nbddp.lessons.l07_batch_norm.exercise import judge_norm, judge_statistics
from nbddp.lessons.l07_batch_norm.simulation import EQUAL, UNEQUAL, Moments, merge, merged, moments, sharded

numbers = st.lists(st.floats(-100, 100), min_size=1, max_size=9)


# -- the explorer ----------------------------------------------------------------------------


@given(shards=st.lists(numbers, min_size=1, max_size=5))
def test_merged_moments_are_those_of_the_whole(shards: list[list[float]]) -> None:
    whole = [v for shard in shards for v in shard]
    found = merge([moments(s) for s in shards])
    assert found.n == len(whole)
    assert found.mean == pytest.approx(std.fmean(whole), abs=1e-9)
    assert found.variance == pytest.approx(std.pvariance(whole), rel=1e-9, abs=1e-9)


def test_merging_adds_how_far_the_means_lie_apart() -> None:
    assert merged(Moments(2, 0.0, 1.0), Moments(2, 4.0, 1.0)) == Moments(4, 2.0, 5.0)
    assert merged(Moments(3, 1.0, 2.0), Moments(1, 1.0, 2.0)) == Moments(4, 1.0, 2.0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("per_rank", [2, 3, 32])
@pytest.mark.parametrize("shift", [0, 15, 40])
@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL])
def test_every_setting_has_shards_whose_whole_is_right(ranks: int, per_rank: int, shift: int, sizes: str) -> None:
    made = sharded(per_rank, ranks, shift, sizes)
    values = [v for shard in made.shards for v in shard]
    assert made.whole.variance == pytest.approx(std.pvariance(values))
    assert made.own[0].n == per_rank or ranks == 1
    assert "-0.00" not in made.describe()
    if ranks > 1 and shift == 40 and sizes == EQUAL:
        assert made.averaged < made.whole.variance


@pytest.mark.parametrize("ranks", range(2, 9))
def test_no_listed_mistake_passes_for_right_or_for_another(ranks: int) -> None:
    shards, weights = norms.shards_for(ranks), norms.shards_for(ranks, seed=1)
    for ways in (norms.MEANS, norms.VARIANCES):
        made = [
            (w.words, [w.of(k) for f in range(norms.FEATURES) for k in norms.known(norms.feature(shards, f))])
            for w in ways
        ]
        assert_apart(made)
    made = [
        (way[0], [
            v for f in range(norms.FEATURES)
            for rank in norms.gradients(norms.feature(shards, f), norms.feature(weights, f), way) for v in rank
        ])
        for way in norms.GRADIENTS
    ]  # fmt: skip
    assert_apart(made)


def assert_apart(made: list[tuple[str, list[float]]]) -> None:
    for (one, a), (other, b) in combinations(made, 2):
        assert one == other or not norms.near(a, b), (one, other)


@pytest.mark.parametrize("ranks", range(2, 9))
def test_right_numbers_are_ok_on_any_number_of_ranks(ranks: int) -> None:
    shards, weights = norms.shards_for(ranks), norms.shards_for(ranks, seed=1)
    w = [merge([moments(c) for c in norms.feature(shards, f)]) for f in range(norms.FEATURES)]
    pair = [[m.mean for m in w], [m.variance for m in w]]
    assert judge_statistics(shards, dict.fromkeys(range(ranks), pair)) == "ok"

    def rows(columns: list[list[list[float]]], rank: int) -> list[list[float]]:
        return [list(row) for row in zip(*(c[rank] for c in columns), strict=True)]

    features = range(norms.FEATURES)
    right = (norms.MEANS[0], norms.VARIANCES[0], norms.SCALES[0][1])
    y = [norms.forward(norms.feature(shards, f), *right) for f in features]
    g = [norms.gradients(norms.feature(shards, f), norms.feature(weights, f), norms.GRADIENTS[0]) for f in features]
    assert judge_norm(shards, weights, {r: (rows(y, r), rows(g, r)) for r in range(ranks)}) == "ok"
