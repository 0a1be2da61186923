"""Lesson 04: the ring on symbols against closed forms, and the checks of its two exercises on real ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbddp.capabilities.forecast.cost import Link
from nbddp.lessons.l04_collectives.exercise import CASES, judge_schedule
from nbddp.lessons.l04_collectives.simulation import (
    ADDING,
    LETTERS,
    OWN,
    RING,
    SHORT,
    Schedule,
    complete,
    faults,
    follow,
    letters,
    schedule,
    simulate,
    simulate_ring,
)
from tests.ring import simulate as timed

sizes = st.integers(2, 8)


# -- the explorer ----------------------------------------------------------------------------


@given(n=sizes)
def test_the_ring_is_complete_after_twice_n_minus_one_steps_and_not_before(n: int) -> None:
    steps = simulate(n, schedule(RING, n))
    assert len(steps) == 2 * (n - 1)
    ready = [sum(complete(p) for row in s.after for p in row) for s in steps]
    assert ready == [0] * (n - 2) + [n * k for k in range(1, n + 1)]
    assert list(faults(steps[-1].after)) == []


@given(n=sizes)
def test_after_the_first_half_each_rank_has_one_complete_chunk(n: int) -> None:
    half = simulate(n, schedule(RING, n))[n - 2].after
    assert [[c for c in range(n) if complete(row[c])] for row in half] == [[(r + 1) % n] for r in range(n)]


@given(n=sizes)
def test_one_step_less_leaves_one_part_out_of_every_chunk_on_all_ranks_alike(n: int) -> None:
    last = simulate(n, schedule(SHORT, n))[-1].after
    assert len(set(last)) == 1
    assert [sorted(parts) for parts in last[0]] == [[0] + [1] * (n - 1)] * n


@given(n=sizes, program=st.sampled_from([SHORT, OWN, ADDING]))
def test_every_broken_program_is_found_wrong(n: int, program: str) -> None:
    assert simulate_ring(n, 99, program).verdict().startswith("wrong: ")
    assert simulate_ring(n, 99).verdict() == f"right: every rank has every chunk complete, {LETTERS[:n]}"


@given(n=st.integers(2, 6))
def test_the_messages_are_those_of_the_timed_simulation(n: int) -> None:
    """The forecast's ring, which knows times, sends the same chunks with the same parts in them."""
    theirs = {(m.step, m.rank): (m.chunk, frozenset(m.parts)) for m in timed(1e6, [Link(1e-5, 1e9)] * n).messages}
    ours = {
        (i, m.sender): (m.chunk, frozenset(r for r, k in enumerate(m.parts) if k))
        for i, s in enumerate(simulate(n, schedule(RING, n))) for m in s.messages
    }  # fmt: skip
    assert ours == theirs


def test_words_of_a_step() -> None:
    assert simulate_ring(3, 1).describe().splitlines() == [
        "ring all-reduce, after step 1 of 4: the received chunk was added to the local one",
        "sent: chunk 0 from rank 0 to 1, chunk 1 from rank 1 to 2, chunk 2 from rank 2 to 0",
        "        chunk 0  chunk 1  chunk 2",
        "rank 0  A        A        AC",
        "rank 1  AB       B        B",
        "rank 2  C        BC       C",
        "complete so far: 0 of 9",
    ]
    assert simulate_ring(4, 0).heading() == "before the first of 6 steps"
    assert (
        simulate_ring(4, 5, SHORT).verdict()
        == "wrong: 16 of 16 chunks are incomplete, such as chunk 0 on ranks 0–3 (it lacks D)"
    )
    assert letters((2, 1, 0, 3)) == "2A B 3D"
    assert letters((0, 0)) == "nothing"


@given(shift=st.integers(0, 3))
def test_a_schedule_may_begin_with_any_chunk(shift: int) -> None:
    assert judge_schedule([("value", follow(r + shift, s, n)) for r, s, n in CASES]) == "ok"


def test_an_unusual_schedule_that_ends_right_is_right() -> None:
    """What is judged is how it ends, on symbols, and not whether it is the one of the book."""
    backwards = Schedule(lambda r, s, n: (r - s + 2) % n, 3, 6)
    assert list(faults(simulate(4, backwards)[-1].after)) == []
