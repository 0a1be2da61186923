"""Spans, overlap, waiting and bandwidth: arithmetic on plain data, against hand-made traces and brute force."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.analysis.answers import ClockOffset, Ping, aligned, allowed, clock
from nbddp.analysis.steps import (
    Bucket,
    Recording,
    Span,
    Step,
    common,
    communication,
    exposed,
    fitted,
    hidden,
    hidden_share,
    lanes,
    length,
    union,
)
from nbddp.analysis.wait_time import bus_factor, curves, spread, straggler, transfers, typical
from nbddp.capabilities.timings import command
from nbddp.capabilities.trace import command as trace_command
from nbddp.errors import BadInput
from nbddp.protocol import pickling
from nbddp.protocol.codec import from_json

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


def points(spans: list[Span]) -> set[int]:
    """The unit steps that spans cover, counted one by one."""
    return {t for start, end in spans for t in range(start, end)}


@given(SPANS)
def test_union_covers_the_same_time_without_overlap(spans: list[Span]) -> None:
    found = union(spans)
    assert points(found) == points(spans)
    assert length(spans) == len(points(spans))
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))


@given(SPANS, SPANS)
def test_common_time_is_what_both_cover(one: list[Span], other: list[Span]) -> None:
    assert points(common(one, other)) == points(one) & points(other)


@given(SPANS)
def test_lanes_hold_no_two_spans_at_once_and_are_as_few_as_can_be(spans: list[Span]) -> None:
    real = [s for s in spans if s[1] > s[0]]
    chosen = lanes(real)
    for lane in set(chosen):
        within = [s for s, k in zip(real, chosen, strict=True) if k == lane]
        assert sum(e - s for s, e in within) == length(within)
    deepest = max((sum(s <= t < e for s, e in real) for t in points(real)), default=0)
    assert len(set(chosen)) == deepest


def step(number: int = 0, at: int = 0, buckets: tuple[Bucket, ...] = (), **more: object) -> Step:
    """Forward 0–10, gradients 10–30, all done 40, optimizer 40–50, shifted by `at`."""
    made = Step(number, (0, 10), (10, 30, 40), (40, 50), buckets, **more)  # type: ignore[arg-type]
    return made.shifted(at)


def bucket(index: int, sent: int, done: int, ready: int | None = None) -> Bucket:
    return Bucket(index, 100, sent if ready is None else ready, sent, done, (f"p{index}",))


@pytest.mark.parametrize(
    ("buckets", "hid", "out", "share"),
    [
        ((bucket(0, 15, 25),), 10, 0, 1.0),
        ((bucket(0, 25, 35),), 5, 5, 0.5),
        ((bucket(0, 15, 25), bucket(1, 20, 40)), 15, 10, 0.6),
        ((bucket(0, 30, 40),), 0, 10, 0.0),
        ((bucket(0, 20, 20),), 0, 0, None),
        ((), 0, 0, None),
    ],
)
def test_hidden_and_exposed_communication(buckets: tuple[Bucket, ...], hid: int, out: int, share: float | None) -> None:
    made = step(buckets=buckets)
    assert (hidden(made), exposed(made), hidden_share(made)) == (hid, out, share)


@given(SPANS)
def test_hidden_and_exposed_make_up_all_communication(spans: list[Span]) -> None:
    made = step(buckets=tuple(bucket(i, s, e) for i, (s, e) in enumerate(spans)))
    assert hidden(made) + exposed(made) == length(communication(made))
    assert hidden(made) == length(common(communication(made), [(10, 30)]))


def test_waiting_and_moving_are_told_apart() -> None:
    ranks = {
        0: step(buckets=(bucket(0, 12, 36), bucket(1, 20, 44))),
        1: step(buckets=(bucket(0, 30, 38), bucket(1, 34, 40))),
    }
    first, second = transfers(ranks)
    assert (first.index, first.start, first.slowest, dict(first.wait), first.moving) == (0, 30, 1, {0: 18, 1: 0}, 8)
    assert (second.start, dict(second.wait), second.moving) == (34, {0: 14, 1: 0}, 10)
    assert first.algorithm_bandwidth() == pytest.approx(100 / 8e-9)
    assert first.bus_bandwidth(4) == pytest.approx(100 / 8e-9 * 1.5)
    found = straggler([first, second])
    assert found is not None
    assert (found.rank, found.late, found.last, found.of) == (1, 16, 2, 2)


def test_buckets_that_a_rank_lacks_are_left_out_and_one_rank_has_no_straggler() -> None:
    ranks = {0: step(buckets=(bucket(0, 12, 20), bucket(1, 20, 30))), 1: step(buckets=(bucket(1, 22, 31),))}
    assert [t.index for t in transfers(ranks)] == [1]
    assert straggler(transfers({0: ranks[0]})) is None
    assert transfers({}) == []


def test_clock_skew_that_was_aligned_changes_nothing() -> None:
    there = {0: step(buckets=(bucket(0, 12, 36),)), 1: step(buckets=(bucket(0, 30, 38),))}
    skewed = {0: there[0], 1: there[1].shifted(1000)}
    aligned = {0: skewed[0], 1: skewed[1].shifted(-1000)}
    assert transfers(aligned) == transfers(there)
    assert spread(skewed) == 1000


@given(
    st.integers(-(10**12), 10**12),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 1000), st.integers(0, 1000)), min_size=1),
)
def test_offset_from_round_trips_is_never_further_off_than_it_says(
    ahead: int, rounds: list[tuple[int, int, int]]
) -> None:
    """The other clock is `ahead`; a question and its answer take any time on their ways."""
    pings = [Ping(at, at + there + ahead, at + there + back) for at, there, back in rounds]
    found = clock(pings)
    assert abs(found.offset + ahead) <= found.residual
    assert found.residual <= (min(there + back for _, there, back in rounds) + 1) // 2


def test_alignment_takes_the_measured_offset_and_tells_its_error() -> None:
    there = {0: [step(buckets=(bucket(0, 12, 36),))], 1: [step(buckets=(bucket(0, 30, 38),))]}
    skewed = Recording({0: there[0], 1: [there[1][0].shifted(1000)]})
    found = aligned(skewed, {0: ClockOffset(), 1: ClockOffset(-1002, 3)})
    assert found.steps[1] == [there[1][0].shifted(-2)]
    assert found.residual == 3
    assert aligned(skewed, {}) is skewed


def test_clock_that_has_drifted_is_moved_to_where_no_result_comes_before_it_was_sent() -> None:
    there = {0: [step(buckets=(bucket(0, 12, 36),))], 1: [step(buckets=(bucket(0, 30, 38),))]}
    assert allowed(there[0], there[1]) == (12 - 38, 36 - 30)
    drifted = Recording({0: there[0], 1: [there[1][0].shifted(-500)]})
    found = aligned(drifted, {0: ClockOffset(), 1: ClockOffset(0, 3)})
    assert found.steps[1] == [there[1][0].shifted(12 - 38)]
    assert found.residual == 3 + (500 - 26)
    assert allowed(there[0], [step(buckets=())]) is None
    assert aligned(Recording({}), {0: ClockOffset()}) == Recording({})


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [("all_reduce", 2, 1.0), ("all_reduce", 8, 1.75), ("all_gather", 4, 0.75), ("broadcast", 4, 1.0)],
)
def test_bus_bandwidth_follows_nccl_tests(collective: str, ranks: int, factor: float) -> None:
    assert bus_factor(collective, ranks) == factor


def test_typical_step_is_the_median_of_ordinary_ones() -> None:
    def lasting(number: int, extra: int, **more: object) -> Step:
        return Step(number, (0, 10), (10, 30, 40 + extra), (40 + extra, 50 + extra), **more)  # type: ignore[arg-type]

    usual = [lasting(2, 5), lasting(3, 0), lasting(4, 70)]
    some = [lasting(0, 900, rebuilt=True), lasting(1, 4, rebuilds=True), *usual, lasting(5, 1, synced=False)]
    recording = Recording({0: some, 1: some[:5]})
    assert recording.numbers() == [0, 1, 2, 3, 4]
    assert typical(recording) == 2
    assert typical(Recording({0: some[:1]})) == 0, "the first alone is better than none"
    assert typical(Recording({})) is None
    assert [c.number for c in curves(recording)] == [0, 1, 2, 3, 4]
    assert curves(recording)[0].duration == 950
    with pytest.raises(KeyError):
        recording.step(5)


@pytest.mark.parametrize("asked", [None, 1])
def test_where_no_step_is_on_every_rank_the_error_says_that_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, asked: int | None
) -> None:
    monkeypatch.setattr(command, "timings", lambda pool: Recording({0: [step(0)], 1: [step(1)]}))
    pool: Any = None
    with pytest.raises(BadInput, match=r"^no step was recorded on every rank; train on all ranks in one cell$"):
        command.figure_of_timings(pool, asked)


def test_plain_data_become_steps() -> None:
    data = {
        "number": 3, "forward": [0, 1], "backward": [1, 2, 3], "optimizer": None,
        "synced": True, "rebuilt": False, "rebuilds": False,
        "buckets": [{"index": 0, "bytes": 8, "ready": 1, "sent": 2, "done": 3, "names": ["w"]}],
    }  # fmt: skip
    made = fitted(from_json(Step, data))
    assert (made.end, made.buckets[0].names, made.optimizer) == (3, ("w",), None)


TIMES = st.integers(1, 1000)


@st.composite
def recordings(draw: st.DrawFn) -> dict[str, Any]:
    """What a worker may send of a step on a CPU: what its main thread notes is in the order of the program, a bucket
    is sent within backward; when the note of its end was taken, or whether at all, is anything after that."""
    a, b, c, d, e, f, g = sorted(draw(st.lists(TIMES, min_size=7, max_size=7)))
    sent = draw(st.lists(st.integers(c, e), max_size=6))
    return {
        "number": 0, "forward": [a, b], "backward": [c, d, e], "optimizer": draw(st.sampled_from([None, [f, g]])),
        "synced": True, "rebuilt": False, "rebuilds": False,
        "buckets": [
            {"index": i, "bytes": 8, "ready": draw(st.integers(c, at)), "sent": at, "names": [],
             "done": draw(st.just(0) | st.integers(at, 2000))}
            for i, at in enumerate(sent)
        ],
    }  # fmt: skip


@given(recordings())
def test_nothing_drawn_contradicts_the_order_of_events(data: dict[str, Any]) -> None:
    made = fitted(from_json(Step, data))
    assert_in_order(made)
    assert exposed(made) <= made.backward[2] - made.backward[1]
    assert hidden(made) + exposed(made) == length(communication(made))
    for given_, found in zip(data["buckets"], made.buckets, strict=True):
        assert found.done == given_["done"] or not 0 < given_["done"] <= made.backward[2], "what fits is kept"


def assert_in_order(made: Step) -> None:
    """forward ≤ backward ≤ optimizer, and each bucket ready ≤ sent ≤ done within backward."""
    order = [*made.forward, *made.backward, *(made.optimizer or ())]
    assert order == sorted(order)
    for b in made.buckets:
        within = [made.backward[0], b.ready, b.sent, b.done, made.backward[2]]
        assert within == sorted(within)


def test_a_bucket_that_a_gpu_noted_late_is_within_backward() -> None:
    bucket = {"index": 0, "bytes": 8, "ready": 4, "sent": 4, "done": 9, "queued": True, "names": []}
    data = {"number": 0, "forward": [0, 1], "backward": [1, 2, 3], "optimizer": None, "synced": True, "rebuilt": False,
            "rebuilds": False, "buckets": [bucket]}  # fmt: skip
    assert fitted(from_json(Step, data)).buckets[0] == Bucket(0, 8, 3, 3, 3, (), True)


def test_what_a_stream_queues_begins_when_it_is_through_with_what_was_before() -> None:
    """NCCL's stream: the second bucket is sent at once, and waits for the first, which is not moving."""

    def step(rank: int, queued: bool) -> Step:
        buckets = (Bucket(0, 100, 10, 10 + rank, 50, queued=queued), Bucket(1, 100, 12, 12, 80, queued=queued))
        return Step(0, (0, 5), (6, 60, 80), None, buckets)

    for queued, starts, moving in ((True, [11, 50], [39, 30]), (False, [11, 12], [39, 68])):
        found = transfers({r: step(r, queued) for r in range(2)})
        assert ([t.start for t in found], [t.moving for t in found]) == (starts, moving)
        assert [t.wait for t in found] == [{0: 1, 1: 0}, {0: 0, 1: 0}]


def test_a_trace_that_could_not_travel_says_why() -> None:
    unsent = pickling.pack_answer(threading.Lock())
    with pytest.raises(BadInput, match=r"^no rank has a trace; rank 0: TypeError: cannot pickle"):
        trace_command.trace(Untraced({0: [unsent]}))  # type: ignore[arg-type]


class Untraced:
    """A pool whose ranks answer so."""

    def __init__(self, answers: dict[int, list[bytes]]):
        self.workers, self._answers = answers, answers

    def answers(self, op: str, *, meets: bool) -> dict[int, list[bytes]]:
        return self._answers

    def placed(self) -> Untraced:
        return self
