"""Lesson 14: loss scales against GradScaler itself, what torch does with DTensors, and the checks on real ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbddp.lessons.l14_precision.norms import NORM, NORMS, MeshRank
from nbddp.lessons.l14_precision.plan import layouts
from nbddp.lessons.l14_precision.simulation import AGREED, ALONE, AVERAGED, RANKS, scaled

# -- loss scales -----------------------------------------------------------------------------


@given(first=st.integers(10, 20), interval=st.integers(2, 8))
def test_ranks_that_ask_each_other_stay_together_and_others_do_not(first: int, interval: int) -> None:
    together, asked, alone = (scaled(where, first, interval) for where in (AVERAGED, AGREED, ALONE))
    assert together.steps == asked.steps, "an inf that is averaged is seen by all, one that is told of too"
    assert together.apart is None
    assert len(set(together.scales)) == 1
    own = [alone.skips(r) for r in range(RANKS)]
    assert (alone.apart is None) == (not any(own))


def test_the_words_say_who_skipped_and_what_it_costs() -> None:
    words = scaled(ALONE, 18).describe()
    assert "rank 2: scale 2^14; overflow in 6, 13, 14, 17, 20, 23; skipped 6, 13, 14, 17, 20, 23" in words
    assert "since step 6 the ranks have not taken the same steps: 23, 19, 18, 23 on ranks 0–3" in words
    assert "rank 2 unscales its gradients to 129.2 × their true size" in words
    assert "all ranks skipped the same 3 of 24 steps, and have one scale" in scaled(AGREED, 16).describe()
    assert scaled(step=0).describe().endswith("no step yet")


def test_known_wrong_norms_are_wrong_and_told_apart_on_the_first_mesh() -> None:
    assert layouts(4) == [(2, 2), (1, 4), (4, 1)]
    place = MeshRank(0, 4, 2)
    found = [would(place) for _, would in NORMS]
    assert all(abs(norm - NORM) > 0.01 for norm in found)
    by_words = {
        words: {round(f, 6) for (w, _), f in zip(NORMS, found, strict=True) if w == words} for words, _ in NORMS
    }
    everything = [norm for norms in by_words.values() for norm in norms]
    assert len(set(everything)) == len(everything)
