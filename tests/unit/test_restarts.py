"""Lesson 10: attempts on paper against closed forms, and checkpoints judged by what a resumed training does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.errors import BadInput
from nbddp.lessons.l10_restarts.exercise import LAST_SAVE, judged
from nbddp.lessons.l10_restarts.simulation import FAILED, KEPT, LOST, STEPS, simulate_restarts, training

few = st.integers(1, 12)


# -- the explorer ----------------------------------------------------------------------------


@given(steps=few, every=few, lives=st.lists(st.integers(0, 12), min_size=1, max_size=6))
def test_every_kept_step_is_done_once_and_every_repeated_one_was_lost(steps: int, every: int, lives: list[int]) -> None:
    made = training(steps, every, lives)
    kept = [s for a in made.attempts for s in range(steps) if a.kind(s) == KEPT]
    assert kept == list(range(len(kept))), "in order, each once"
    assert made.finished == (kept == list(range(steps)))
    lost = sum(a.kind(s) == LOST for a in made.attempts for s in range(steps))
    assert made.done == len(kept) + lost
    reached = max(a.stop for a in made.attempts)
    assert made.repeated == made.done - reached
    for a in made.attempts:
        assert a.start % every == 0
        assert a.lost < every or not a.fails
        assert sum(a.kind(s) == FAILED for s in range(steps)) == a.fails


@given(steps=few, every=few, life=few)
def test_attempts_follow_the_closed_form(steps: int, every: int, life: int) -> None:
    """Every failing attempt advances by the whole intervals that fit into its life."""
    advance = life // every * every
    made = training(steps, every, [life] * 30)
    if advance == 0 and life < steps:
        assert not made.finished
        assert "more restarts do not help" in made.verdict()
    else:
        failing = max(0, -(-(steps - life) // advance)) if advance else 0
        assert len(made.attempts) == failing + 1
        assert made.repeated == failing * (life - advance)
        assert made.finished


def test_words_of_the_two_settings() -> None:
    assert simulate_restarts(4, 7, 4).verdict() == "finished in 5 attempts: 32 steps done, 12 of them repeated"
    assert simulate_restarts(4, 7, 4).describe().splitlines()[0] == (
        "attempt 0: starts at step 0, runs steps 0–6, fails in step 7; steps 4–6 are lost"
    )
    assert (
        simulate_restarts(8, 7, 4)
        .verdict()
        .startswith("not finished: the restarts are used up, and 0 steps of 20 are ")
    )
    assert simulate_restarts(4, 7, 1).verdict() == "not finished: the restarts are used up, and 8 steps of 20 are safe"
    assert simulate_restarts(3, STEPS, 0).verdict() == "finished in 1 attempt: 20 steps done, none repeated"
    with pytest.raises(BadInput, match="and one attempt"):
        training(3, 1, [])


def test_the_judge_without_a_pool() -> None:
    """A difference that only shows later is told with its step."""
    state = {"model": {"w": "a"}, "optimizer": "b", "lr": "0.1", "sampler": "c", "rng": "d"}
    ends = {**state, "model": {"w": "z"}}
    touched: dict[str, Any] = {"wrote": [], "read": [], "moved": [], "gap": []}
    good = {"began": LAST_SAVE, "states": {LAST_SAVE: state, LAST_SAVE + 1: state}, "final": state, **touched}
    later = {**good, "states": {LAST_SAVE: state, LAST_SAVE + 1: ends}}
    assert judged({0: good}, {0: good}) == "ok"
    assert f"from step {LAST_SAVE + 1} on" in judged({0: good}, {0: later})
    assert judged({0: good}, {0: {**good, "final": ends}}) == "rank 0 ends in another state than the undisturbed run"
