"""Collectives across ranks: when each rank arrived, which one was last, and how long the others waited for it."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nbddp.analysis.activity import Activity, CollectivePart, Key
from nbddp.analysis.significance import CHANCE, FEW, enough, mostly, slower
from nbddp.analysis.steps import Place, Span, common, length, minus, union
from nbddp.launch.topology import counted

LATE, MOST = 0.03, 0.5  # of the time, and of all waiting: a rank that costs the others less is not named
BLOCKS, LONG = 16, 2.0  # parts of a program's collectives that are compared; seconds that they last, but on GPUs
# times as long as the others: a rank that takes that much longer each time is late in any case; which of more than two
# ranks comes last by chance changes more often
MUCH, MUCH_OF_MORE = 5.0, 2.0
PLACES = 3  # lines that are named
AGAIN = 1.5  # times as long as any other: so much longer one of several ranks takes in most blocks


@dataclass(frozen=True)
class CollectiveInstance:
    """One collective: rank → its part."""

    group: str
    sequence: int
    parts: Mapping[int, CollectivePart]

    @property
    def op(self) -> str:
        return self.parts[min(self.parts)].op

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.parts))

    @property
    def begins(self) -> int:
        """When the last rank arrived."""
        return max(p.arrived for p in self.parts.values())

    @property
    def last(self) -> int:
        """The rank that arrived last."""
        return min(r for r, p in self.parts.items() if p.arrived == self.begins)

    @property
    def late(self) -> int:
        """By how many nanoseconds the last rank came after the one before it."""
        arrived = sorted(p.arrived for p in self.parts.values())
        return arrived[-1] - arrived[-2]

    @property
    def longest_wait(self) -> int:
        return self.begins - min(p.arrived for p in self.parts.values())

    @property
    def moving(self) -> int:
        """Nanoseconds from the last arrival to the last end."""
        return max(0, max(p.ended for p in self.parts.values()) - self.begins)

    def wait(self, rank: int) -> Span:
        """When this rank waited for the last one; empty for the last."""
        part = self.parts[rank]
        return part.arrived, max(part.arrived, min(self.begins, part.ended))


def meetings(ranks: Mapping[int, Activity]) -> list[CollectiveInstance]:
    """The collectives that more than one rank has a part in, in the order in which they began."""
    together: dict[Key, dict[tuple[int, ...], dict[int, CollectivePart]]] = {}
    for rank, activity in ranks.items():
        for key, part in activity.parts.items():  # groups of different ranks may have the same name
            together.setdefault(key, {}).setdefault(part.members, {})[rank] = part
    found = [
        CollectiveInstance(key[0], key[1], parts)
        for key, some in together.items()
        for parts in some.values()
        if len(parts) > 1
    ]
    return sorted(found, key=lambda m: (m.begins, m.sequence))


def waits(found: Sequence[CollectiveInstance], rank: int, last: int | None = None) -> list[Span]:
    """When this rank waited for others in any of these collectives, or for the rank `last` alone."""
    return union(m.wait(rank) for m in found if rank in m.parts and last in (None, m.last))


def stretches(found: Sequence[CollectiveInstance], start: int) -> list[Span]:
    """The time from the first meeting to the last, in at most FEW parts of as many meetings; up to the only one from
    `start`, where there is one."""
    if len(found) < 2:
        return [(start, m.begins) for m in found]
    count = min(FEW, len(found) - 1)
    cuts = [found[i * (len(found) - 1) // count].begins for i in range(count + 1)]
    return list(pairwise(cuts))


@dataclass(frozen=True)
class Kind:
    """The collectives of one operation in one group. last: rank → in how many it was the last. late: nanoseconds, the
    median of the longest wait; moving: the median from the last arrival to the end. places: of the noted calls the
    lines, as `places` has them."""

    op: str
    ranks: tuple[int, ...]
    count: int
    last: Mapping[int, int]
    late: int
    moving: int
    places: Sequence[Place] = ()


def kinds(found: Sequence[CollectiveInstance]) -> list[Kind]:
    """One row per operation and group, those with the longest waits in all first."""
    by_kind: dict[tuple[str, str, tuple[int, ...]], list[CollectiveInstance]] = {}
    for m in found:
        by_kind.setdefault((m.op, m.group, m.ranks), []).append(m)
    order = sorted(by_kind.items(), key=lambda pair: (-sum(m.longest_wait for m in pair[1]), pair[0]))
    return [
        Kind(op, ranks, len(some), Counter(m.last for m in some), _median(m.longest_wait for m in some),
             _median(m.moving for m in some), places(some))
        for (op, _, ranks), some in order
    ]  # fmt: skip


def places(found: Iterable[CollectiveInstance], rank: int | None = None) -> list[Place]:
    """The lines that called these collectives, on any rank or on one, as far as they were noted. At most PLACES: those
    with the longest waits in all, the longest first."""
    waited: Counter[Place] = Counter()
    for m in found:
        for r, part in m.parts.items():
            if part.place is not None and rank in (None, r):
                start, end = m.wait(r)
                waited[part.place] += end - start
    return sorted(waited, key=lambda at: (-waited[at], at))[:PLACES]


def _median(values: Iterable[int]) -> int:
    return int(statistics.median(values))


@dataclass(frozen=True)
class LateRank:
    """The rank that the others wait for most: `cost` nanoseconds each in the mean, in which they compute nothing; it is
    the last in `last` of the `of` collectives that it takes part in."""

    rank: int
    cost: int
    last: int
    of: int

    def describe(self, longest: str) -> str:
        return (
            f"rank {self.rank} arrives last at {self.last} of {counted(self.of, 'collective')}, "
            f"and each of the other ranks waits {longest} for it"
        )


def latest(ranks: Mapping[int, Activity], found: Sequence[CollectiveInstance], window: Span) -> LateRank | None:
    """The rank for which the others wait longest in all; None in three cases: that is no large part of the time; the
    others wait as long for one another, so no rank in particular is late; or chance explains it."""
    costs = {}
    exposed = {r: minus(a.communication, a.compute) for r, a in ranks.items()}
    for last in {m.last for m in found}:
        others = [r for r in ranks if r != last]
        idle = [length(common(waits(found, r, last), exposed[r])) for r in others]
        costs[last] = sum(idle) // max(1, len(others))
    rank = min(costs, key=lambda r: (-costs[r], r), default=None)
    if rank is None or costs[rank] < max(LATE * (window[1] - window[0]), MOST * sum(costs.values())):
        return None
    own = [m for m in found if rank in m.parts]
    lasts = any(a.gpu for a in ranks.values()) or window[1] - window[0] >= LONG * 1e9
    if not _evident(rank, own, lasts):
        return None
    return LateRank(rank, costs[rank], sum(m.last == rank for m in own), len(own))


def own_times(found: Sequence[CollectiveInstance]) -> list[dict[int, int]]:
    """For each of one group's meetings but the first, rank → nanoseconds from where it could go on to its arrival."""
    return [{r: p.arrived - _free(a, a.parts[r], p.arrived) for r, p in m.parts.items()} for a, m in pairwise(found)]


def _free(before: CollectiveInstance, part: CollectivePart, arrived: int) -> int:
    """Since when a rank that arrives now was at work by itself: the meeting before had ended, or had begun; a rank that
    arrives earlier than that did not wait for it."""
    if part.known and before.begins <= part.ended <= arrived:
        return part.ended
    return before.begins if before.begins <= arrived else part.arrived


def _evident(rank: int, found: Sequence[CollectiveInstance], lasts: bool) -> bool:
    """Whether this rank is late by more than chance, in the kind of collectives in which it costs most. How many of
    them make up a step of the program is not known. So they are put together into as many blocks as the test needs, and
    each block has to show it. A few blocks do for a rank that takes several times as long as the others; or, of more
    than two ranks, is the longest in each. How long ranks waited for a core is not known here. So the differences must
    be large in a short program on CPUs."""
    by_group: dict[tuple[str, tuple[int, ...]], list[CollectiveInstance]] = {}
    for m in found:
        by_group.setdefault((m.group, m.ranks), []).append(m)
    by_kind: dict[tuple[str, tuple[int, ...], str], list[dict[int, int]]] = {}
    for (group, ranks), some in by_group.items():
        for m, times in zip(some[1:], own_times(some), strict=True):
            by_kind.setdefault((group, ranks, m.op), []).append(times)
    if not by_kind:
        return False
    own = max(by_kind.values(), key=lambda some: sum(_more(rank, of) for of in some))
    count = len(own[0])
    if count > 2 and _longest(rank, own, 1.0 if lasts else AGAIN):
        return True
    many = max(BLOCKS, enough(count))
    tries = [_blocks(own, blocks) for blocks in ((many, FEW) if lasts else (FEW,)) if blocks <= len(own)]
    much = MUCH if count == 2 else MUCH_OF_MORE
    judged = [slower(of, statistics.fmean(map(max, zip(*of.values(), strict=True))), much) for of in tries]
    return any(one is not None and one.rank == rank for one in judged)


def _longest(rank: int, own: Sequence[Mapping[int, int]], again: float) -> bool:
    """Whether this rank of several takes longest, by a factor, in more blocks than chance explains: of many, or of as
    few as it takes."""
    ranks = len(own[0])
    for count in {min(BLOCKS, len(own)), max(FEW, math.ceil(1 + math.log(1 / CHANCE, ranks)))}:
        blocks = _blocks(own, min(count, len(own)))
        others = (b for r, b in blocks.items() if r != rank)
        lasts = [t > again * max(o) for t, *o in zip(blocks[rank], *others, strict=True)]
        if mostly(sum(lasts), len(lasts), ranks):
            return True
    return False


def _more(rank: int, times: Mapping[int, int]) -> float:
    """How much longer it takes this rank than the median of the others."""
    return times[rank] - statistics.median(t for r, t in times.items() if r != rank)


def _blocks(times: Sequence[Mapping[int, int]], count: int) -> dict[int, list[int]]:
    """Rank → the sums of so many parts of its times."""
    cuts = [i * len(times) // count for i in range(count + 1)]
    return {r: [sum(of[r] for of in times[a:b]) for a, b in pairwise(cuts)] for r in times[0]}
