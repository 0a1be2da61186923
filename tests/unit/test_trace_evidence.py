"""Which rank is slow, and which only seems so: the test over steps, on series with known answers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from nbddp.analysis import significance
from nbddp.analysis.activity import Activity, CollectivePart, Key
from nbddp.analysis.significance import enough, judged, slower, slower_part, waits
from nbddp.capabilities.collectives.instances import latest, meetings, stretches
from nbddp.capabilities.collectives.program import shown

STEP = 10.0


def calm(dice: random.Random, count: int) -> list[float]:
    return [STEP + dice.gauss(0, 0.2) for _ in range(count)]


def tailed(dice: random.Random, count: int) -> list[float]:
    """One step in five is interrupted, some for many steps' time."""
    return [STEP + dice.gauss(0, 0.2) + (dice.paretovariate(0.9) if dice.random() < 0.2 else 0) for _ in range(count)]


def drifting(dice: random.Random, count: int) -> list[float]:
    """Each step is like the one before, as where another process comes and goes."""
    found, level = [], 0.0
    for _ in range(count):
        level = 0.5 * level + dice.gauss(0, 0.5)
        found.append(STEP + level)
    return found


def warming(dice: random.Random, count: int) -> list[float]:
    return [STEP * (1 + 3 / (1 + i)) + dice.gauss(0, 0.5) for i in range(count)]


KINDS = [calm, tailed, drifting, warming]
Kind = Callable[[random.Random, int], list[float]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "steps"), [(2, 3), (2, 10), (2, 30), (2, 100), (4, 30), (16, 30)])
def test_of_300_runs_of_equal_ranks_at_most_three_name_one(kind: Kind, ranks: int, steps: int) -> None:
    dice = random.Random(1)
    runs = ({r: kind(dice, steps) for r in range(ranks)} for _ in range(300))
    found = [slower(times, STEP) for times in runs]
    assert sum(f is not None and f.rank is not None for f in found) <= 3


def named_by_collectives(dice: random.Random, kind: Kind, ranks: int, count: int, more: float = 0) -> int | None:
    """The rank that is called late of so many in all-reduces, between which they work, the last one `more` longer."""
    took = [kind(dice, count) for _ in range(ranks)]
    took[-1] = [t + more * STEP for t in took[-1]]
    parts: list[dict[Key, CollectivePart]] = [{} for _ in took]
    at, spans = 0, [list[tuple[int, int]]() for _ in took]
    for n, times in enumerate(zip(*took, strict=True)):
        arrived = [at + int(t * 1e6) for t in times]
        at = max(arrived) + 100_000
        for rank, since in enumerate(arrived):
            spans[rank].append((since, at))
            parts[rank]["0", n, 0] = CollectivePart("all_reduce", since, at, tuple(range(ranks)))
    made = {r: Activity(False, [], spans[r], [], parts=parts[r]) for r in range(ranks)}
    found = latest(made, meetings(made), (0, at))
    return None if found is None else found.rank


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_of_collectives_of_equal_ranks_none_names_one_and_of_a_late_one_all(kind: Kind, ranks: int) -> None:
    dice = random.Random(3)
    for count, runs in ((10, 100), (250, 10)):
        found = [named_by_collectives(dice, kind, ranks, count) for _ in range(runs)]
        assert sum(rank is not None for rank in found) <= runs // 100, count
    assert [named_by_collectives(dice, kind, ranks, 250, more=6) for _ in range(3)] == [ranks - 1] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("more", "steps"), [(0.1, 30), (0.05, 100)])
def test_a_planted_delay_is_found_on_the_rank_that_has_it(kind: Kind, more: float, steps: int) -> None:
    dice, hit = random.Random(2), 0
    for _ in range(100):
        times = {r: kind(dice, steps) for r in range(4)}
        times[2] = [t + more * STEP for t in times[2]]
        found = slower(times, STEP)
        assert found is not None
        assert found.rank in (2, None), "never another"
        hit += found.rank == 2
    assert hit >= (90 if kind in (calm, tailed) else 60)


@pytest.mark.parametrize(
    ("own", "rank", "known"),
    [
        ([[10] * 4, [90] * 4], None, False),  # too few, however slow
        ([[10] * 5, [21] * 5], 1, True),
        ([[10] * 5, [21, 21, 21, 21, 19]], None, False),  # one of a few is not twice as long
        ([[10] * 10, [12] * 10], None, False),
        ([[10] * 11, [12] * 11], 1, True),
        ([[10] * 11, [12] * 10 + [9]], None, True),
        ([[10] * 100, [10.25] * 100], None, True),  # sure, and too little to matter
        ([[10] * 12, [12] * 12, [10] * 12], 1, True),
    ],
)
def test_few_steps_show_large_differences_alone_and_small_ones_do_not_matter(
    own: list[list[float]], rank: int | None, known: bool
) -> None:
    found = slower(dict(enumerate(own)), STEP)
    assert found is not None
    assert (found.rank, found.known) == (rank, known)


def test_more_ranks_need_more_steps_since_one_of_them_is_always_the_last() -> None:
    assert [enough(n) for n in (2, 4, 8, 64)] == [11, 12, 13, 16]
    for ranks in (2, 4, 64):
        times = {r: [12.0 if r == 1 else 10.0] * enough(ranks) for r in range(ranks)}
        found, one_less = slower(times, STEP), slower({r: t[1:] for r, t in times.items()}, STEP)
        assert found is not None
        assert one_less is not None
        assert (found.rank, one_less.rank) == (1, None)


def test_nothing_to_compare_is_no_evidence() -> None:
    assert slower({}, STEP) is None
    assert slower({0: [1.0]}, STEP) is None
    assert slower({0: [], 1: []}, STEP) is None


def test_one_that_waits_longer_for_a_core_does_so_for_many_seconds() -> None:
    own = {r: [8.0] * 300 for r in range(2)}
    queued = {0: [0.1] * 300, 1: [3.0] * 300}
    for seconds, rank in ((3, None), (60, 1)):
        ends = [i * seconds * 1e9 / 300 for i in range(300)]
        found, of_cores = judged(own, queued, ends, STEP)
        assert found is not None
        assert (found.rank, of_cores) == (rank, rank is not None)
    turns = {r: [3.0 if i // 40 % 2 == r else 0.1 for i in range(300)] for r in range(2)}
    by_turns = waits(turns, [i * 60e9 / 300 for i in range(300)], STEP)
    assert by_turns is not None
    assert by_turns.rank is None


def test_the_bound_is_that_of_the_sign_test() -> None:
    """Of 28 fair coins at most 5 fall to one side in 0.05 % of cases (0.046 %), and 6 in more (0.19 %)."""
    assert significance._rare(28, 0.5, 0.0005) - 1 == 5
    assert significance._rare(98, 0.5, 0.0005) - 1 == 32
    assert significance._rare(10, 0.5, 0.0005) == 0


def test_one_disturbance_is_not_the_cause_of_a_rank_that_is_late_each_time() -> None:
    """Rank 1 takes three times as long, in its optimizer, between 40 all-reduces; once it loses 20 s in forward."""
    for lost, what in ((0, "optimizer"), (20_000_000_000, "not known")):
        parts: list[dict[Key, CollectivePart]] = [{}, {}]
        phases: list[dict[str, list[tuple[int, int]]]] = [{"forward": [], "optimizer": []} for _ in range(2)]
        spans, at = [list[tuple[int, int]]() for _ in range(2)], 0
        for n in range(40):
            arrived = []
            for rank in range(2):
                forward = at + 50_000_000 + lost * (rank == 1 and n == 20)
                arrived.append(forward + (250_000_000 if rank else 50_000_000))
                phases[rank]["forward"].append((at, forward))
                phases[rank]["optimizer"].append((forward, arrived[rank]))
            at = max(arrived) + 100_000
            for rank, since in enumerate(arrived):
                spans[rank].append((since, at))
                parts[rank]["0", n, 0] = CollectivePart("all_reduce", since, at, (0, 1))
        made = {r: Activity(False, [], spans[r], [], phases[r], parts[r]) for r in range(2)}
        found = shown(made, [], meetings(made))
        assert found.late is not None
        assert found.why is not None
        assert (found.late.rank, found.why.what) == (1, what)
        cut = stretches(meetings(made), 0)
        assert (len(cut), cut[0][1], stretches(meetings(made)[:1], 7)[0][0]) == (5, cut[1][0], 7)


# -- part by part ------------------------------------------------------------------------------------

PARTS = {"forward": 2.0, "backward": 5.0, "optimizer": 1.0, "between steps": 0.5}


def by_part(
    dice: random.Random, steps: int, ranks: int = 2, more: float = 0.0, where: str = "", times: float = 1.0
) -> tuple[dict[int, list[float]], dict[str, dict[int, list[float]]]]:
    """The last rank takes `more` of a step longer in one part, and all of its parts `times` as long; backward, as on a
    shared core, is longer in half of the steps by up to a step."""
    found: dict[str, dict[int, list[float]]] = {part: {} for part in PARTS}
    for r in range(ranks):
        last = r == ranks - 1
        for part, usual in PARTS.items():
            took = [usual * (times if last else 1) * (1 + dice.gauss(0, 0.03)) for _ in range(steps)]
            found[part][r] = [t + more * STEP * (last and part == where) for t in took]
        found["backward"][r] = [t + dice.choice((0, 0, 1, 3, 10)) for t in found["backward"][r]]
    own = {r: [sum(at) for at in zip(*(found[part][r] for part in PARTS), strict=True)] for r in range(ranks)}
    return own, found


@pytest.mark.parametrize("where", ["forward", "optimizer", "between steps"])
def test_a_small_delay_in_one_part_is_found_though_another_part_hides_it_in_the_whole(where: str) -> None:
    dice, parts, whole = random.Random(4), 0, 0
    for _ in range(20):
        own, found = by_part(dice, 100, more=0.05, where=where)
        own = {r: [t - b for t, b in zip(own[r], found["backward"][r], strict=True)] for r in own}  # mostly waits
        judged_ = slower_part(own, found, STEP)
        parts += judged_ is not None and (judged_.evidence.rank, judged_.part) == (1, where)
        summed = {r: [sum(at) for at in zip(*(found[p][r] for p in PARTS), strict=True)] for r in own}
        of_sums = slower(summed, STEP)
        whole += of_sums is not None and of_sums.rank == 1
    assert (parts, whole < 10) == (20, True)


@pytest.mark.parametrize(("ranks", "steps"), [(2, 30), (2, 100), (4, 30), (8, 100)])
@pytest.mark.parametrize("times", [1.0, 1.3])
def test_of_equal_ranks_no_part_stands_out_also_where_one_is_slower_in_all(
    ranks: int, steps: int, times: float
) -> None:
    dice = random.Random(5)
    found = [slower_part(*by_part(dice, steps, ranks, times=times), STEP) for _ in range(40)]
    assert [f for f in found if f is not None] == []


def test_a_part_names_its_rank_also_if_another_rank_seems_slowest() -> None:
    """Rank 2 takes longer in backward in 16 of 30 steps, by more than rank 1 does in forward in all."""
    times = {part: {r: [usual] * 30 for r in range(4)} for part, usual in PARTS.items()}
    times["forward"][1] = [2.5] * 30
    times["backward"][2] = [7.0 if i < 16 else 3.0 for i in range(30)]
    own = {
        r: [sum(at) + 0.1 * (r == 1) for at in zip(*(of[r] for of in times.values()), strict=True)]
        for r in times["forward"]
    }
    found = slower_part(own, times, STEP)
    assert found is not None
    assert (found.evidence.rank, found.part, found.evidence.more) == (1, "forward", 0.5), "not what is longer in all"
    assert slower_part(own, times, STEP, 2) is None


def test_each_part_of_each_rank_is_a_comparison() -> None:
    """Of two ranks with four parts chance has eight tries: twelve steps of one kind are rare in one of them alone."""
    assert enough(8) == 13
    for steps, known in ((12, False), (13, True)):
        times = {part: {0: [2.0] * steps, 1: [3.0 if part == "forward" else 2.0] * steps} for part in PARTS}
        own = {0: [8.0] * steps, 1: [9.0] * steps}
        assert (slower_part(own, times, STEP) is not None) == known
    times["forward"][1][3] = 1.0
    assert slower_part(own, times, STEP) is None, "one of thirteen is the other way round"


@pytest.mark.parametrize(
    ("more", "whole", "named"),
    [
        (0.3, 0.3, True),
        (0.19, 0.19, False),  # too little to matter
        (0.3, 0.1, False),  # the rank gains elsewhere what it loses here
    ],
)
def test_a_part_counts_that_matters_to_the_whole_step(more: float, whole: float, named: bool) -> None:
    own = {0: [8.0] * 30, 1: [8.0 + whole] * 30}
    times = {part: {0: [2.0] * 30, 1: [2.0 + more if part == "forward" else 2.0] * 30} for part in PARTS}
    assert (slower_part(own, times, STEP) is not None) == named


def test_what_other_parts_are_shorter_is_taken_off_the_time_that_a_rank_takes_longer() -> None:
    parts_ = {"forward": {0: [300.0] * 40, 1: [350.0] * 40}, "backward": {0: [700.0] * 40, 1: [675.0] * 40}}
    own_ = {r: [a + b for a, b in zip(parts_["forward"][r], parts_["backward"][r], strict=True)] for r in (0, 1)}
    found = slower_part(own_, parts_, 1000.0)
    assert found is not None
    assert (found.part, found.evidence.rank, found.evidence.more) == ("forward", 1, 25.0)
