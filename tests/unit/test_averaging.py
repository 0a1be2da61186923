"""Lesson 05: the fitted line against closed forms, and the checks of its two exercises on real ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.lessons.l05_averaging_gradients.simulation import (
    MEAN,
    NOTHING,
    OWN,
    RATE,
    SAME,
    SUM,
    gradient,
    loss,
    shards,
    simulate_averaging,
)

ranks = st.integers(2, 4)
steps = st.integers(1, 20)


# -- the explorer ----------------------------------------------------------------------------


@given(n=ranks, w=st.floats(-3, 3), b=st.floats(-3, 3))
def test_gradients_are_those_of_the_loss(n: int, w: float, b: float) -> None:
    points, h = shards(n)[0], 1e-5
    by_w = (loss((w + h, b), points) - loss((w - h, b), points)) / (2 * h)
    by_b = (loss((w, b + h), points) - loss((w, b - h), points)) / (2 * h)
    assert gradient((w, b), points) == pytest.approx((by_w, by_b), abs=1e-6)


@given(n=ranks, count=steps)
def test_averaged_from_one_start_is_one_process(n: int, count: int) -> None:
    fit = simulate_averaging(n, count, SAME, MEAN)
    for line in fit.lines:
        assert [v for at in line for v in at] == pytest.approx([v for at in fit.alone for v in at], abs=1e-9)
    assert fit.groups() == [tuple(range(n))]


@given(n=ranks, count=steps)
def test_averaging_does_not_bring_ranks_together(n: int, count: int) -> None:
    for exchange in (MEAN, SUM):
        apart = simulate_averaging(n, count, OWN, exchange).distances()
        assert apart == pytest.approx([apart[0]] * (count + 1), abs=1e-9)
        assert apart[0] > 1


@pytest.mark.parametrize("n", [2, 4])
def test_without_exchange_each_rank_fits_its_own_shard(n: int) -> None:
    fit = simulate_averaging(n, 4000, SAME, NOTHING)
    for rank, shard in enumerate(shards(n)):
        mean_x, mean_y = (sum(v) / len(shard) for v in zip(*shard, strict=True))
        w = sum((x - mean_x) * (y - mean_y) for x, y in shard) / sum((x - mean_x) ** 2 for x, _ in shard)
        assert fit.lines[rank][-1] == pytest.approx((w, mean_y - w * mean_x), abs=1e-3), "least squares"
    assert fit.distances()[0] == 0
    assert min(fit.losses([line[-1] for line in fit.lines])) > 2 * fit.losses(fit.alone)[-1]


@given(n=ranks)
def test_a_sum_is_a_mean_with_n_times_the_learning_rate(n: int) -> None:
    fit = simulate_averaging(n, 1, SAME, SUM)
    moved = [[b - a for a, b in zip(*line, strict=True)] for line in (fit.lines[0], fit.alone)]
    assert moved[0] == pytest.approx([n * v for v in moved[1]])
    assert "n times".replace("n", str(n)) in fit.verdict()
    assert RATE > 0
