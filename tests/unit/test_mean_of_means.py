"""Lesson 13: what tokens count against DDP itself, and the checks of its exercises on real ranks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.lessons.l13_mean_of_means.gradients import combination, common_multiple
from nbddp.lessons.l13_mean_of_means.simulation import ALL, weighed


def test_the_words_say_who_counts_too_much_and_what_it_costs() -> None:
    words = weighed(12, 4, 2, 6).describe()
    assert "rank 1, micro-batch 1: 2 tokens, each counts 3.00 × 1/24, together 25%" in words
    assert "a token of rank 1, micro-batch 1 counts 6 times as much as one of rank 0, micro-batch 1" in words
    assert "25% of the weight is on the wrong tokens, and 24 tokens reduce noise as 16.0 equal ones would" in words
    assert weighed(12, 4, 2, 6, ALL).describe().endswith("every token counts the same")


def test_the_effective_number_is_that_of_the_variance() -> None:
    """24 tokens under the mean of means average noise out as 16 equal ones do."""
    made, dice = weighed(12, 4, 2, 6), random.Random(7)
    weights = [b.weight for b in made.blocks for _ in range(b.tokens)]
    means = [sum(w * dice.gauss(0, 1) for w in weights) for _ in range(20000)]
    assert sum(m * m for m in means) / len(means) == pytest.approx(1 / made.effective, rel=0.05)


# -- gradients -------------------------------------------------------------------------------

numbers = st.lists(st.floats(-10, 10), min_size=6, max_size=6)


@given(first=numbers, second=numbers, a=st.floats(-100, 100), b=st.floats(-100, 100))
def test_a_weighted_sum_is_found_and_nothing_else(first: list[float], second: list[float], a: float, b: float) -> None:
    first, second = [1.0, 0.0, *first], [0.0, 1.0, *second]  # independent
    whole = [a * x + b * y for x, y in zip(first, second, strict=True)]
    found = combination([{"p": first}, {"p": second}], {"p": whole})
    assert found == pytest.approx([a, b], rel=1e-5, abs=1e-4)
    whole[2] += 100 + max(map(abs, whole))
    if (first[2], second[2]) == (0, 0) or len({*map(abs, first[3:]), *map(abs, second[3:])}) > 3:
        assert combination([{"p": first}, {"p": second}], {"p": whole}) is None


def test_multiples_are_found_with_one_factor_for_all() -> None:
    of = {"w": [1.0, -2.0], "b": [0.5]}
    assert common_multiple({"w": [3.0, -6.0], "b": [1.5]}, of) == pytest.approx(3)
    assert common_multiple({"w": [3.0, -6.0], "b": [1.0]}, of) is None
    assert common_multiple({"w": [0.0, 0.0], "b": [0.0]}, of) == pytest.approx(0)
    assert common_multiple({"w": [float("nan"), 0.0], "b": [0.0]}, of) is None
    assert combination([of, of], of) is None, "parts that cannot be told apart"
