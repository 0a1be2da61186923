"""Lesson 01: the orders in which lines may appear are counted right, and shares of work are judged rightly."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nbddp
from nbddp.errors import BadInput
from nbddp.lessons.l01_one_program.exercise import unfair
from nbddp.lessons.l01_one_program.figure import prints
from nbddp.lessons.l01_one_program.simulation import AFTER, BEFORE, NOBODY, printing
from nbddp.teach import check, predict
from tests.lessons.answers import Mutant, defined, exercise, solution

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
    assert made.words() == (
        "one of 2 520 orders that a terminal may show: before (0), before (1), before (2), before (3), after (0), "
        "after (2), after (3), after (1)\ncertain: each rank's before comes before its own after, nothing else"
    )
    shown = prints(printing(4, 1, True))
    texts = [t.get_text() for axes in shown.figure.axes for t in axes.texts]
    assert {f"rank {r}: {text}" for r in range(4) for text in (BEFORE, AFTER)} <= set(texts)
    assert printing(4, barrier=True).heading().startswith(f"one of {predict.orders.question.came} orders")
    assert "barrier" in texts
    assert all(t.get_fontsize() >= 6.5 for axes in shown.figure.axes for t in axes.texts)


# -- share_of --------------------------------------------------------------------------------

SHARE = "def share_of(items, rank, size):\n    "
WRONG = [
    Mutant("everything", SHARE + "return items", "every rank takes all of them, so the work is done 4 times"),
    Mutant("remainder lost", SHARE + "n = len(items) // size; return items[rank * n : rank * n + n]",
           "7 items on 3 ranks: no rank takes 'g'; 7 is not a multiple of 3"),
    Mutant("rest to the last", SHARE + "n = len(items) // size\n"
           "    return items[rank * n :] if rank == size - 1 else items[rank * n : rank * n + n]",
           "11 items on 4 ranks: rank 3 takes 5 and rank 0 2"),
    Mutant("rounded up", SHARE + "n = -(-len(items) // size); return items[rank * n : rank * n + n]",
           "may differ by at most one item"),
    Mutant("from one", SHARE + "return items[rank + 1 :: size]", "no rank takes 'a'; ranks are counted from 0"),
    Mutant("overlapping", SHARE + "n = len(items) // size; return items[rank * n : rank * n + n + 1]",
           "'c' is taken by ranks 0–1; each item belongs to one rank"),
    Mutant("twice", SHARE + "return items[rank::size] * 2", "'a' is taken by rank 0 twice"),
    Mutant("places", SHARE + "return list(range(rank, len(items), size))", "return the items, not their positions"),
    Mutant("first ranks only", SHARE + "return items if rank == 0 else []", "rank 0 takes 8 and rank 1 none"),
    Mutant("one each", SHARE + "return items[rank : rank + 1]", "no rank takes 'e', 'f', 'g', 'h'"),
    Mutant("a number", SHARE + "return len(items) // size", "is 2; return a list of items"),
    Mutant("unwritten", SHARE + "...", "still to be written"),
    Mutant("two each", SHARE + "return [items[rank], items[rank + size]]", "no rank takes 'g'"),
    Mutant("raises", SHARE + "return [items[rank + size * k] for k in range(3)]", "raised IndexError: list index out"),
    Mutant("environment", SHARE + "import os; return items[int(os.environ['RANK']) :: size]", "not on the rank"),
    Mutant("four ranks always", SHARE + "return items[rank::4]", "right for 4 ranks only; use world_size"),
    Mutant("the lesson's two", SHARE + "return items[2 * rank : 2 * rank + 2]",
           "two items per rank; the number follows"),
    Mutant("as long as the world", SHARE + "return items[rank * size : (rank + 1) * size]", "has about len(items)"),
    Mutant("one colon", SHARE + "return items[rank:size]", "items[a::step], with two colons, is every step-th"),
    Mutant("all shares", SHARE + "return [items[r::size] for r in range(size)]",
           "the share of this one rank, not a list"),
    Mutant("some ranks", SHARE + "if rank < 2: return items[rank::size]",
           "share_of(['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'], 2, 4) is None; here the function ends without a value"),
    Mutant("a float", SHARE + "n = len(items) / size; return items[rank * n : rank * n + n]",
           "; / gives a float, // a whole"),
    Mutant("asks", SHARE + "return items[int(input()) :: size]",
           "EOF when reading a line (line 2, in share_of); a rank has no keyboard"),
    Mutant("a collective", SHARE + "import torch.distributed as dist; dist.barrier()", "no communication is needed"),
    Mutant("an argument less", "def share_of(items, rank): return items[rank::4]",
           "; keep the arguments as the lesson has"),
    Mutant("prints", SHARE + "print(items[rank::size])", "its return statement is missing"),
    Mutant("a generator", SHARE + "yield from items[rank::size]", "is <generator object share_of>; return a list"),
    Mutant("by chance", SHARE + "import random; return random.sample(items, 2)", "or on random numbers"),
    Mutant("shuffled by NumPy", SHARE + "import numpy; numpy.random.shuffle(items); return items[rank::size]",
           "or on random numbers"),
]  # fmt: skip
RIGHT = [
    SHARE + "return [item for i, item in enumerate(items) if i % size == rank]",
    SHARE + "n, rest = divmod(len(items), size)\n    start = rank * n + min(rank, rest)\n"
    "    return items[start : start + n + (rank < rest)]",
    SHARE + "return items[len(items) * rank // size : len(items) * (rank + 1) // size]",
]


@pytest.mark.parametrize("mutant", WRONG, ids=str)
def test_wrong_shares_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.share_of)


def test_right_shares_pass(pool: nbddp.Pool) -> None:
    assert check.share_of(solution("01", "share_of"))
    for source in RIGHT:
        assert check.share_of(defined(source, "share_of")), source
    assert "still to be written" in check.share_of(exercise("01", "share_of")).line


@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_exactly_the_fair_shares_pass(items: int, size: int, data: st.DataObject) -> None:
    every = [chr(97 + i) for i in range(items)]
    owner = data.draw(st.lists(st.integers(0, size - 1), min_size=items, max_size=items))
    shares = [[item for item, o in zip(every, owner, strict=True) if o == r] for r in range(size)]
    sizes = [len(s) for s in shares]
    assert (unfair(every, shares) == "") == (max(sizes) - min(sizes) <= 1)
