"""Lesson 15: the memory of ZeRO against closed forms, FSDP's schedule, and its exercises' checks on real ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.lessons.l15_sharding.schedule import COMPUTE, FREE, GATHER, KEEP, SCATTER, schedule_gathers
from nbddp.lessons.l15_sharding.simulation import stages


def test_the_papers_own_numbers() -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 ranks."""
    per_rank = [of.total / 1e9 for of in stages(7.5, 64).shares]
    assert per_rank == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_the_verdict_says_from_which_stage_on_it_fits() -> None:
    assert "fits in 80 GB from stage 1 on" in stages(7.5, 64).describe()
    assert "fits in 80 GB from stage 3 on" in stages(175, 1024).describe()
    assert "all stages fit in 80 GB" in stages(1, 8).describe()
    assert "no stage fits in 80 GB" in stages(175, 8).describe()
    assert "one rank has nothing to shard" in stages(1, 1).describe()


# -- the schedule ----------------------------------------------------------------------------

steps = {
    "layers": st.integers(2, 6), "ahead": st.integers(0, 2), "link": st.sampled_from((0.25, 0.5, 1.0, 2.0)),
    "after": st.sampled_from((FREE, KEEP)), "slow": st.booleans(),
}  # fmt: skip


@given(**steps)
def test_a_layer_is_there_in_full_when_it_is_computed_and_nothing_overlaps_itself(**chosen: object) -> None:
    made = schedule_gathers(**chosen)  # type: ignore[arg-type]
    for spans, held in zip(made.spans, made.held, strict=True):
        computed = [s for s in spans if s.kind == COMPUTE]
        assert [s.layer for s in computed] == [*range(made.layers), *reversed(range(made.layers))]
        for lane in (computed, [s for s in spans if s.kind != COMPUTE]):
            assert all(a.end <= b.start + 1e-9 for a, b in pairwise(lane))
        for s in computed:
            assert any(h.layer == s.layer and h.start <= s.start and s.end <= h.end for h in held)
        for s in spans:
            if s.kind == GATHER:
                first = min(c.start for c in computed if c.layer == s.layer and c.start >= s.start)
                assert s.end <= first + 1e-9, "gathered before it is computed"
            if s.kind == SCATTER:
                assert s.start >= max(c.end for c in computed if c.layer == s.layer) - 1e-9
    assert made.gathers == (made.layers if made.after == KEEP else 2 * made.layers - 1)


@given(**steps)
def test_prefetching_never_costs_time_and_holds_as_many_layers_more(**chosen: object) -> None:
    late, ahead = (schedule_gathers(**{**chosen, "ahead": n}) for n in (0, 1))  # type: ignore[arg-type]
    assert ahead.total <= late.total + 1e-9
    if chosen["after"] == FREE:
        assert (late.peak(0), ahead.peak(0)) == (1, 2)


def test_one_layer_ahead_hides_all_but_the_first_gather_and_the_last_reduce_scatter() -> None:
    for link in (0.25, 0.5, 1.0):
        assert schedule_gathers(link=link, ahead=1).exposed(0) == 2 * link
    assert schedule_gathers(link=2.0, ahead=1).exposed(0) > 4
    assert schedule_gathers(ahead=0).exposed(0) == 11, "eleven collectives of 1, none hidden"
    assert schedule_gathers(ahead=2).total == schedule_gathers(ahead=1).total


def test_a_slow_rank_holds_up_all_others() -> None:
    made = schedule_gathers(ahead=1, link=0.5, slow=True)
    assert made.computes(1) == 1.5 * made.computes(0)
    assert made.exposed(0) > made.exposed(1) == 1.0
    assert "rank 1 (1.5 × slower): computes 18, exposed 1" in made.describe()
