"""Lesson 08: the packer against DDP itself, its timeline against closed forms, and the checks of its two exercises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.analysis.steps import Bucket, Recording, Step
from nbddp.analysis.steps import exposed as exposed_of_step
from nbddp.capabilities.forecast.cost import Link, seconds
from nbddp.errors import BadInput
from nbddp.lessons.l08_buckets_and_overlap.exercise import EXPOSED_CASES, exposed_time
from nbddp.lessons.l08_buckets_and_overlap.simulation import (
    DEFAULT,
    LINKS,
    MIB,
    beside,
    exchange,
    linear_layers,
    pack,
    packed,
    timeline,
)

sizes = st.lists(st.integers(1, 60), min_size=1, max_size=20)
limit = st.integers(1, 80)


# -- the packer ------------------------------------------------------------------------------


@given(sizes=sizes, first=limit, cap=limit)
def test_every_gradient_is_in_one_bucket_and_only_the_last_may_stay_below_its_limit(
    sizes: list[int], first: int, cap: int
) -> None:
    made = pack(sizes, first, cap)
    assert [i for some in made for i in some] == list(range(len(sizes)))
    for k, some in enumerate(made):
        own = first if k == 0 else cap
        held = sum(sizes[i] for i in some)
        assert held - sizes[some[-1]] < own, "it was open until its last gradient came"
        assert held >= own or k == len(made) - 1


@given(layers=st.integers(1, 12), backward=st.integers(1, 100), ranks=st.integers(2, 64), cap=st.integers(1, 40))
def test_on_paper_the_link_carries_one_bucket_at_a_time(layers: int, backward: int, ranks: int, cap: int) -> None:
    some = packed(linear_layers(layers, 512), cap)
    link = LINKS["10 Gb/s Ethernet"]
    step = timeline(some, backward / 1e3, ranks, link)
    for one, other in zip(step.buckets, step.buckets[1:], strict=False):
        assert one.done <= other.sent
    for b in step.buckets:
        assert b.ready <= b.sent
        assert b.done - b.sent == pytest.approx(1e9 * seconds("ring", "all_reduce", ranks, b.bytes, link), abs=1)
    assert step.buckets[-1].ready == step.backward[1] == backward * 1_000_000, "the last gradient ends backward"
    made = exchange(layers, 512, cap, backward, ranks, "10 Gb/s Ethernet")
    assert exposed_of_step(step) == step.backward[2] - step.backward[1] >= made.last - 1


def test_one_bucket_hides_nothing_and_a_free_link_exposes_nothing() -> None:
    whole = timeline(packed(linear_layers(4, 512), 100), 0.02, 2, Link(0.0, 1e9))
    assert exposed_of_step(whole) == pytest.approx(1e9 * 4 * (MIB + 2048) / 1e9, abs=1)
    free = timeline(packed(linear_layers(4, 512), 1), 0.02, 2, Link(0.0, float("inf")))
    assert exposed_of_step(free) == 0


def test_without_a_recorded_exchange_it_says_what_to_do() -> None:
    empty = Recording({0: [], 1: []})
    with pytest.raises(BadInput, match="run a cell that trains a DDP model first"):
        beside(empty, linear_layers(1, 2), DEFAULT)


@pytest.mark.parametrize(("end", "spans"), EXPOSED_CASES)
def test_exposed_is_what_timings_call_so(end: int, spans: list[tuple[int, int]]) -> None:
    buckets = tuple(Bucket(i, 1, sent, sent, done) for i, (sent, done) in enumerate(spans))
    last = max([end, *(done for _, done in spans)])
    assert exposed_of_step(Step(0, (0, 0), (0, end, last), None, buckets)) == exposed_time(end, spans)
    assert all(sent <= end for sent, _ in spans), "no bucket is sent after backward"
