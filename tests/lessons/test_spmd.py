"""Lesson 01: the orders in which lines may appear are counted right, and shares of work are judged rightly."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.errors import BadInput
from nbddp.lessons.l01_one_program.exercise import unfair
from nbddp.lessons.l01_one_program.figure import prints
from nbddp.lessons.l01_one_program.simulation import AFTER, BEFORE, NOBODY, printing
from nbddp.teach import predict

# -- the explorer ----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("barrier", [False, True])
def test_orders_are_those_that_one_can_write_down(ranks: int, barrier: bool) -> None:
    lines = [(r, text) for r in range(ranks) for text in (BEFORE, AFTER)]

    def possible(order: tuple[tuple[int, str], ...]) -> bool:
        place = {line: i for i, line in enumerate(order)}
        if barrier:
            return max(place[r, BEFORE] for r in range(ranks)) < min(place[r, AFTER] for r in range(ranks))
        return all(place[r, BEFORE] < place[r, AFTER] for r in range(ranks))

    assert printing(ranks, barrier=barrier).orders() == sum(map(possible, itertools.permutations(lines)))


@given(ranks=st.integers(2, 4), slow=st.integers(NOBODY, 3), barrier=st.booleans())
def test_the_order_shown_is_a_possible_one(ranks: int, slow: int, barrier: bool) -> None:
    if slow >= ranks:
        with pytest.raises(BadInput, match=f"there is no rank {slow} among {ranks}"):
            printing(ranks, slow, barrier)
        return
    made = printing(ranks, slow, barrier)
    texts = [line.text for line in made.lines]
    assert all([line.text for line in made.of(r)] == [BEFORE, AFTER] for r in range(ranks))
    if barrier:
        assert texts == [BEFORE] * ranks + [AFTER] * ranks
        assert all(line.at > max(made.worked) for line in made.lines if line.text == AFTER)
    elif slow != NOBODY:
        assert made.lines[-1].rank == slow


def test_words_and_figure_hold_all_lines() -> None:
    made = printing(4, 1)
    assert made.describe() == (
        "one of 2 520 orders that a terminal may show: before (0), before (1), before (2), before (3), after (0), "
        "after (2), after (3), after (1)\ncertain: each rank's before comes before its own after, nothing else"
    )
    shown = prints(printing(4, 1, True))
    texts = [t.get_text() for axes in shown.figure.axes for t in axes.texts]
    assert {f"rank {r}: {text}" for r in range(4) for text in (BEFORE, AFTER)} <= set(texts)
    assert printing(4, barrier=True).heading().startswith(f"one of {predict.orders.question.came} orders")
    assert "barrier" in texts


@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_exactly_the_fair_shares_pass(items: int, size: int, data: st.DataObject) -> None:
    every = [chr(97 + i) for i in range(items)]
    owner = data.draw(st.lists(st.integers(0, size - 1), min_size=items, max_size=items))
    shares = [[item for item, o in zip(every, owner, strict=True) if o == r] for r in range(size)]
    sizes = [len(s) for s in shares]
    assert (unfair(every, shares) == "") == (max(sizes) - min(sizes) <= 1)
