"""Lesson 09: programs played against the judgement of real deadlocks, and the checks of its two exercises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.lessons.l09_hangs.exercise import (
    START,
    layout_words,
    layouts,
    near,
    outcomes,
    rows,
    run,
    shards,
    stepped,
    verdict,
    without_file,
)
from nbddp.lessons.l09_hangs.simulation import ALONE, CROSSED, PROGRAMS, log
from nbddp.teach import predict

MANY = 30  # moves, more than any program has


# -- the explorer ----------------------------------------------------------------------------

HANGS = {
    "one batch fewer on the last rank": "ranks 0–2 wait in backward, all_reduce #3 (line 2); rank 3 has finished",
    "rank 0 alone makes a call": "rank 0 waits in broadcast #3 (line 4); ranks 1–3 have finished",
    "rank 1 makes two calls in the other order": "collective #2 differs between ranks",
    "rank 1 has another shape": "float[4] on ranks 0, 2–3 (line 3), float[8] on rank 1 (line 3)",
    "a ring, all receive first": "rank 3 waits in recv from rank 2 (line 2)",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_which_programs_hang(program: str) -> None:
    found = log(program, 4, MANY)
    if program in HANGS:
        assert HANGS[program] in found.verdict()
        assert found.waits
    else:
        assert found.verdict() == "every rank reaches its end"
        assert found.ended == [0, 1, 2, 3]
    assert bool(found.silent()) == (program == "the last rank uses MAX instead of SUM")


@given(program=st.sampled_from(list(PROGRAMS)), ranks=st.integers(2, 6), moves=st.integers(0, 20))
def test_a_deadlock_stays_and_nothing_else_stands_still(program: str, ranks: int, moves: int) -> None:
    now, later = log(program, ranks, moves), log(program, ranks, moves + 3)  # so long does a slow rank compute
    if now.deadlock:
        assert later.deadlock
        assert set(now.deadlock.ranks) <= set(later.deadlock.ranks)
    elif len(now.ended) < ranks:
        assert later.entries != now.entries, "somebody moves"
    if moves == 20:
        assert now.deadlock or len(now.ended) == ranks


def test_a_slow_rank_is_waited_for_and_is_no_deadlock() -> None:
    found = log("the last rank is slow", 4, 2)
    assert found.waits == {0: (3,), 1: (3,), 2: (3,)}
    assert found.verdict() == "ranks 0–2 wait, but rank 3 is on its way: no deadlock"
    assert [log("the last rank is slow", 4, n).entries[3][0].state for n in range(4)] == [
        "ahead",
        "runs",
        "runs",
        "done",
    ]
    assert log("the last rank is slow", 4, 0).verdict() == "no rank has started"


def test_the_silent_mistake_is_told_with_its_ranks() -> None:
    words = log("the last rank uses MAX instead of SUM", 3, MANY).describe()
    assert "all_reduce #2 used SUM on ranks 0–1, MAX on rank 2: no rank waits, and the numbers are wrong" in words


def test_what_came_in_the_explorer_is_what_the_programs_do() -> None:
    def waiting(program: str) -> list[int]:
        found = log(program, 4, MANY)
        return sorted(found.waits) if found.deadlock else []

    assert waiting(ALONE) == [0]
    assert predict.waits_when_rank_0_is_alone.question.came == "rank 0"
    assert waiting(CROSSED) == [0, 1, 2, 3]
    assert predict.waits_in_the_ring.question.came == "all ranks"
    asked = predict.wrong_but_finishes.question
    assert [p for p in asked.options if not waiting(p)] == [asked.came]


def test_the_kernels_name_for_a_cells_file_is_left_out() -> None:
    said = "rank 0 waits in backward, all_reduce #9 (cell line 9, in train_uneven); rank 1 has finished"
    assert (
        without_file(said) == "rank 0 waits in backward, all_reduce #9 (line 9, in train_uneven); rank 1 has finished"
    )
    assert without_file("(trainer.py line 3, in fit)") == "(trainer.py line 3, in fit)"


def test_a_mean_of_gradients_is_the_gradient_of_all_samples() -> None:
    """The reference against one batch that has all samples: what DDP promises for batches of equal size."""
    held = shards([2, 2, 2])
    for batches in rows(held, 2):
        whole = ([x for xs, _ in batches for x in xs], [y for _, ys in batches for y in ys])
        assert near(stepped(START, batches, 3), stepped(START, [whole], 1))
    assert not near(run(rows(held, 1)), run(rows(held, 2)))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_right_and_wrong_parameters_are_apart(ranks: int) -> None:
    for counts in layouts(ranks):
        held = shards(counts)
        found = outcomes(held)
        right, wrong = [o for o in found if not o.words], [o for o in found if o.words]
        assert len(right) == 5
        for bad in wrong:
            assert not any(near(bad.parameters, good.parameters) for good in right), bad.words
            assert verdict(dict.fromkeys(range(ranks), bad.parameters), held) == bad.words
        for good in right:
            assert verdict(dict.fromkeys(range(ranks), good.parameters), held) == "ok"
    assert layout_words(layouts(4)[0]) == "with 3 batches on rank 0, 2 on ranks 1–3"
