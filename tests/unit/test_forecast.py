"""A step on more nodes: closed forms, a simulated ring, fits of what is known, and the way of `%ddp forecast` from
training on real ranks to the figure."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nbddp
from nbddp.analysis.quantities import amount, duration, percent, size
from nbddp.analysis.quantities import speed as worded_speed
from nbddp.analysis.steps import Bucket, Recording, Step
from nbddp.capabilities.bench.result import Measured
from nbddp.capabilities.forecast.cost import ALGORITHMS, COSTS, Link, better, fit, hierarchical, seconds
from nbddp.capabilities.forecast.scale import Forecast, Profile, doublings, forecast, predict
from nbddp.launch.units import delay, speed
from nbddp.notebook.commands import parse_command
from tests.ring import simulate

MS = 1_000_000
SIZES = [1 << k for k in range(10, 27)]
FREE = Link(0.0, math.inf)
LINKS = st.builds(Link, st.floats(0, 1e-2), st.floats(1e6, 1e12))
RANKS = st.integers(1, 24)
COUNTS = st.integers(0, 1 << 28)


# -- closed forms ----------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("collective", COSTS["ring"])
def test_one_rank_needs_no_time_and_more_bytes_or_ranks_never_less(algorithm: str, collective: str) -> None:
    link = Link(1e-5, 1e9)
    assert seconds(algorithm, collective, 1, 1 << 20, link) == 0
    times = [seconds(algorithm, collective, n, 1 << 20, link) for n in range(1, 40)]
    assert times == sorted(times)
    assert seconds(algorithm, collective, 8, 1 << 21, link) > seconds(algorithm, collective, 8, 1 << 20, link)
    assert seconds(algorithm, collective, 8, 1 << 20, FREE) == 0


def test_two_ranks_exchange_half_the_buffer_twice() -> None:
    assert seconds("ring", "all_reduce", 2, 1000, Link(1.0, 100.0)) == pytest.approx(2 * (1 + 500 / 100))
    assert seconds("binomial", "all_reduce", 2, 1000, Link(1.0, 100.0)) == pytest.approx(2 * (1 + 1000 / 100))


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 64, 1000])
def test_latency_and_bandwidth_terms_of_an_all_reduce(ranks: int) -> None:
    latency, steps = Link(1.0, math.inf), math.ceil(math.log2(ranks))
    assert seconds("ring", "all_reduce", ranks, 1 << 20, latency) == 2 * (ranks - 1)
    assert seconds("tree", "all_reduce", ranks, 1 << 20, latency) == 2 * steps
    assert seconds("binomial", "all_reduce", ranks, 1 << 20, latency) == 2 * steps
    bandwidth = Link(0.0, 1.0)
    for algorithm in ("ring", "tree"):
        assert seconds(algorithm, "all_reduce", ranks, 1.0, bandwidth) == pytest.approx(2 * (ranks - 1) / ranks)
    assert seconds("binomial", "all_reduce", ranks, 1.0, bandwidth) == 2 * steps


@given(RANKS, COUNTS, LINKS)
def test_all_reduce_by_ring_is_a_reduce_scatter_and_an_all_gather(ranks: int, count: int, link: Link) -> None:
    parts = [seconds("ring", c, ranks, count, link) for c in ("reduce_scatter", "all_gather")]
    assert seconds("ring", "all_reduce", ranks, count, link) == pytest.approx(sum(parts))


@given(RANKS, RANKS, COUNTS, LINKS, LINKS)
def test_hierarchy_of_one_level_is_the_plain_collective(n: int, m: int, count: int, intra: Link, inter: Link) -> None:
    for algorithm in ("ring", "tree"):
        within = seconds(algorithm, "all_reduce", m, count, intra)
        between = seconds(algorithm, "all_reduce", n, count, inter)
        assert hierarchical(count, 1, m, intra, inter, algorithm) == pytest.approx(within)
        assert hierarchical(count, n, 1, intra, inter, algorithm) == pytest.approx(between)
        assert hierarchical(count, n, m, intra, inter, algorithm) == pytest.approx(within + between)


# -- the simulated ring ----------------------------------------------------------------------


@given(RANKS, COUNTS, LINKS)
def test_simulated_ring_takes_what_the_formula_says(ranks: int, count: int, link: Link) -> None:
    ring = simulate(count, [link] * ranks)
    expected = seconds("ring", "all_reduce", ranks, count, link)
    assert ring.finished == pytest.approx([expected] * ranks)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), COUNTS, LINKS)
def test_ring_ends_one_all_reduce_after_its_last_rank_has_come(starts: list[float], count: int, link: Link) -> None:
    ring = simulate(count, [link] * len(starts), starts)
    after = seconds("ring", "all_reduce", len(starts), count, link)
    assert ring.duration == pytest.approx(max(starts) + after)
    assert all(m.start >= starts[m.rank] for m in ring.messages)


@given(st.lists(LINKS, min_size=2, max_size=10), COUNTS)
def test_ring_of_unequal_links_lies_between_its_fastest_and_its_slowest(links: list[Link], count: int) -> None:
    took = simulate(count, links).duration
    worst = Link(max(x.latency for x in links), min(x.bandwidth for x in links))
    best = Link(min(x.latency for x in links), max(x.bandwidth for x in links))
    low, high = (seconds("ring", "all_reduce", len(links), count, x) for x in (best, worst))
    assert low * (1 - 1e-9) <= took <= high * (1 + 1e-9)


# -- fits ------------------------------------------------------------------------------------


def made(algorithm: str, ranks: int, link: Link, noise: float = 0.0, seed: int = 0) -> list[Measured]:
    """All-reduces as they would be measured, each repetition off by up to `noise`."""
    rng = random.Random(seed)
    return [
        Measured("all_reduce", s, ranks, tuple(
            seconds(algorithm, "all_reduce", ranks, s, link) * (1 + rng.uniform(-noise, noise)) for _ in range(9)
        ))
        for s in SIZES
    ]  # fmt: skip


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("link", [Link(5e-5, 2e9), Link(6e-6, 220e9), Link(1e-3, 1e8)])
def test_fit_finds_the_link_again_through_five_percent_of_noise(algorithm: str, link: Link) -> None:
    some = [m for ranks in (2, 4, 16) for m in made(algorithm, ranks, link, 0.05, ranks)]
    found, decided = better(fit(some))
    assert (found.algorithm, decided) == (algorithm, True)
    assert found.link.latency == pytest.approx(link.latency, rel=0.05)
    assert found.link.bandwidth == pytest.approx(link.bandwidth, rel=0.05)
    assert found.error < 0.03
    assert found.ranks == (2, 4, 16)
    assert found.points == 3 * len(SIZES)


def test_one_world_size_does_not_tell_algorithms_apart() -> None:
    fits = fit(made("tree", 8, Link(2e-5, 1e9), 0.02))
    found, decided = better(fits)
    assert (found.algorithm, decided) == ("ring", False)
    assert len({round(f.error, 9) for f in fits.values()}) == 1


def test_fit_is_exact_without_noise_and_never_negative() -> None:
    exact = fit(made("ring", 4, Link(3e-5, 5e9)))["ring"]
    assert exact.link.latency == pytest.approx(3e-5)
    assert exact.link.bandwidth == pytest.approx(5e9)
    assert exact.worst < 1e-9
    only_bytes = fit([Measured("all_reduce", s, 2, (max(0.0, s / 1e9 - 1e-7),)) for s in SIZES])["ring"]
    assert only_bytes.link.latency == 0
    assert only_bytes.link.bandwidth == pytest.approx(1e9, rel=0.1)
    only_messages = fit([Measured("all_reduce", s, 2, (1e-3 / (1 + s / 1e9),)) for s in SIZES])["ring"]
    assert only_messages.link.bandwidth == math.inf
    assert only_messages.link.latency == pytest.approx(5e-4, rel=0.1)


def test_fit_takes_several_collectives_together_and_leaves_out_what_it_does_not_know() -> None:
    link = Link(4e-5, 3e9)
    some = [
        Measured(c, s, n, (seconds("ring", c, n, s, link),)) for c in COSTS["ring"] for s in SIZES for n in (2, 3, 8)
    ]
    strange = [Measured("all_to_all", 8, 2, (1.0,)), Measured("all_reduce", 8, 1, (1.0,))]
    found, decided = better(fit([*some, *strange, Measured("all_reduce", 64, 2, (0.0,))]))
    assert (found.algorithm, decided, found.points) == ("ring", True, len(some))
    assert found.link.latency == pytest.approx(link.latency)
    with pytest.raises(ValueError, match="at least two sizes"):
        fit(strange)


# -- predictions -----------------------------------------------------------------------------

BUCKETS = st.lists(st.tuples(st.floats(0, 0.05), st.integers(1, 1 << 26)), max_size=6).map(
    lambda b: tuple(sorted(b))
)  # fmt: skip
PROFILES = st.builds(
    Profile, st.floats(1e-4, 0.1), st.just(0.05), st.floats(0, 0.02), BUCKETS, st.integers(1, 16), st.just(0.2)
)


def by(link: Link, ranks: int) -> Any:
    return lambda count: seconds("ring", "all_reduce", ranks, count, link)


@given(PROFILES, RANKS)
def test_without_communication_weak_scaling_is_perfect(what: Profile, ranks: int) -> None:
    for some, link in ((what, FREE), (replace(what, buckets=()), Link(1.0, 1.0))):
        found = predict(some, ranks, by(link, ranks))
        assert found.exposed == pytest.approx(0)
        assert found.efficiency == pytest.approx(1)
        assert found.step == pytest.approx(what.compute)


@given(PROFILES, RANKS)
def test_without_communication_strong_scaling_loses_the_optimizer_alone(what: Profile, ranks: int) -> None:
    found = predict(what, ranks, by(FREE, ranks), strong=True)
    work = (what.before + what.backward) * what.ranks
    assert found.step == pytest.approx(work / ranks + what.after)
    assert found.efficiency == pytest.approx((work + what.after) / (work + ranks * what.after))


@given(PROFILES, RANKS, LINKS, st.floats(1, 100), st.floats(1, 100), st.booleans())
def test_slower_link_is_never_faster(
    what: Profile, ranks: int, link: Link, slower: float, later: float, strong: bool
) -> None:
    worse = Link(link.latency * later, link.bandwidth / slower)
    a, b = (predict(what, ranks, by(x, ranks), strong=strong) for x in (link, worse))
    assert b.step >= a.step
    assert b.efficiency <= a.efficiency


@given(PROFILES, RANKS, LINKS)
def test_exposed_communication_lies_between_none_and_all(what: Profile, ranks: int, link: Link) -> None:
    overlapped = predict(what, ranks, by(link, ranks))
    serial = predict(what, ranks, by(link, ranks), overlapped=False)
    assert 0 <= overlapped.exposed <= overlapped.communication * (1 + 1e-9) + 1e-12
    assert serial.exposed == pytest.approx(serial.communication, abs=1e-9)
    last = what.buckets[-1][1] if what.buckets and what.buckets[-1][0] == what.backward else 0
    assert not last or overlapped.exposed >= by(link, ranks)(last) - 1e-9, "the last bucket has nothing to hide behind"


def test_buckets_wait_for_the_link_and_for_their_gradients() -> None:
    what = Profile(1.0, 4.0, 0.5, ((1.0, 10), (2.0, 10), (4.0, 20)), 2, 9.0)
    found = predict(what, 2, lambda count: count / 5)  # 1–3, 3–5, 5–9
    assert (found.exposed, found.communication, found.step) == (5.0, 8.0, 10.5)
    assert found.efficiency == pytest.approx(5.5 / 10.5)
    late = predict(what, 2, lambda count: count / 20)  # 1–1.5, 2–2.5, 4–5
    assert late.exposed == 1.0
    strong = predict(what, 4, lambda count: count / 20, strong=True)  # ready 0.5, 1, 2; 0.5–1, 1–1.5, 2–3
    assert (strong.compute, strong.exposed) == (3.0, 1.0)


def test_doublings_end_where_asked() -> None:
    assert doublings(1) == [1]
    assert doublings(6) == [1, 2, 4, 6]
    assert doublings(1024) == [1 << k for k in range(11)]


def recording(ranks: int = 8, count: int = 25 << 20, late: int = 0, each: int = 7) -> Recording:
    """Forward 35 ms, backward 70 ms with `each` buckets, one every 70/each ms, optimizer 6 ms; rank 1 is `late` ms
    later with all of it."""

    def step(rank: int, number: int) -> Step:
        at = number * 500 * MS
        slow = 1 + late * (rank == 1) / 35
        forward = at + int(35 * MS * slow)
        backward = forward + int(70 * MS * slow)
        ready = [forward + (i + 1) * (backward - forward) // each for i in range(each)]
        buckets = tuple(Bucket(i, count, r, r, r + 2 * MS) for i, r in enumerate(ready))
        done = at + int(105 * MS * (1 + late / 35)) + 2 * MS
        return Step(number, (at, forward), (forward, backward, done), (done, done + 6 * MS), buckets)

    return Recording({r: [step(r, n) for n in range(3)] for r in range(ranks)}, model="Net")


def foretell(**asked: Any) -> Forecast:
    measured = [m for n in (2, 4, 8) for m in made("ring", n, Link(6e-6, 220e9))]
    return forecast(recording(), measured, **{"inter_node": 25e9, "latency": 10e-6, **asked})


def test_forecast_goes_through_the_recorded_step_and_on() -> None:
    found = foretell()
    assert [p.ranks for p in found.weak] == [1, 2, 4, *(8 << k for k in range(11))]
    assert found.weak[0].efficiency == 1
    at_8 = next(p for p in found.weak if p.ranks == 8)
    assert at_8.step == pytest.approx(found.here.step)
    assert at_8.step == next(p for p in found.strong if p.ranks == 8).step, "as recorded, the two are the same"
    assert [p.nodes for p in found.whole_nodes(found.weak)] == [1 << k for k in range(11)]
    assert all(a.efficiency >= b.efficiency for a, b in itertools.pairwise(found.weak))
    assert found.extrapolated_from == 8


@pytest.mark.parametrize(
    ("seconds_", "said"),
    [(0, "0 ms"), (4.2e-7, "0.42 µs"), (52e-6, "52.0 µs"), (0.0123, "12.3 ms"), (0.9996, "1.00 s")],
)
def test_durations_have_three_digits(seconds_: float, said: str) -> None:
    assert duration(seconds_) == said


@pytest.mark.parametrize(
    ("worded", "said"),
    [
        (worded_speed(25e9), "25.0 GB/s"), (worded_speed(0.9999e9), "1.00 GB/s"), (worded_speed(1.25e8), "125 MB/s"),
        (worded_speed(math.inf), "too high to be seen"), (amount(2e9), "2.00 GB"), (amount(999.96e6), "1.00 GB"),
        (amount(2e4), "20.0 KB"), (size(24 << 20), "24 MiB"), (size(3900), "3.8 KiB"),
    ],
)  # fmt: skip
def test_speeds_and_bytes_have_the_unit_that_fits(worded: str, said: str) -> None:
    assert worded == said


def test_small_shares_are_not_nothing() -> None:
    assert [percent(s) for s in (0, 0.0001, 0.012, 0.5, 1)] == ["0 %", "<0.1 %", "1.2 %", "50 %", "100 %"]


# -- the grammar of speeds and times ------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("25GB/s", 25e9), ("200Gb/s", 25e9), ("800MB/s", 8e8), ("12GiB/s", 12 * 2**30), ("1.5TB/s", 1.5e12),
        ("25 GB/s", 25e9), ("8Kbit/s", 1e3), ("100B/s", 100), ("400Gbps", 50e9), ("1e3MB/s", 1e9), (".5GB/s", 5e8),
    ],
)  # fmt: skip
def test_speeds(text: str, value: float) -> None:
    assert speed(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("25", "'25' has no unit; type 25GB/s for bytes or 25Gb/s for bits per second"),
        ("25gb/s", "'25gb/s' has a lower-case prefix; type GB/s for bytes or Gb/s for bits per second"),
        ("25GB", "'25GB' is not a speed; type a number with its unit, such as 25GB/s"),
        ("fast", "'fast' is not a speed"), ("", "is not a speed"), ("-3GB/s", "'-3GB/s' is not a speed"),
        ("0GB/s", "'0GB/s' is not a link speed; type a positive one"), ("1e999GB/s", "is not a link speed"),
        ("25GB/h", "is not a speed"), ("25XB/s", "is not a speed"), ("²GB/s", "is not a speed"),
    ],
)  # fmt: skip
def test_what_is_no_speed_is_refused_with_what_to_type(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        speed(text)


@pytest.mark.parametrize(
    ("text", "value"), [("10us", 1e-5), ("10µs", 1e-5), ("10μs", 1e-5), ("800ns", 8e-7), ("0.1ms", 1e-4), ("0us", 0)]
)
def test_times(text: str, value: float) -> None:
    assert delay(text) == pytest.approx(value)


@pytest.mark.parametrize(("text", "says"), [("10", "'10' has no unit; type 10us"), ("10min", "'10min' is not a time")])
def test_what_is_no_time_is_refused_with_what_to_type(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        delay(text)


def test_the_line_is_parsed_and_its_mistakes_are_told() -> None:
    args = parse_command("forecast --inter-node 25GB/s --latency 10us --ranks-per-node 8 --strong --nodes 64").args
    assert args == {
        "inter_node": 25e9, "intra_node": None, "latency": pytest.approx(1e-5), "ranks_per_node": 8, "nodes": 64,
        "strong": True, "algorithm": None,
    }  # fmt: skip
    with pytest.raises(nbddp.BadInput, match="%ddp forecast --inter-node: '25' has no unit; type 25GB/s"):
        parse_command("forecast --inter-node 25")
    with pytest.raises(nbddp.BadInput, match="%ddp forecast --latency: '10' has no unit; type 10us"):
        parse_command("forecast --latency 10")
