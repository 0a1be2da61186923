"""Is one rank slower than the others, or does it only seem so? A test over steps; every statement that names a rank
comes from here.

Ranks that are alike differ by chance in each step: other processes take a core, caches are cold, the clock of a core
changes. These times have long tails and come in bursts, so means say little. What is tested is the median over steps of
how much longer a rank takes than the median of the others in the same step. The sign test gives its lower bound: a
difference that many steps exceed. By chance, as many exceed it in one of 1 / CHANCE comparisons of as many ranks. A
rank is slow if that bound is more than BEYOND of a step, and the median SIZE of it or more.

Ranks that share their cores, with each other or with other processes, are not alike all the time. For seconds, one rank
may lose its core more often, and finds its caches cold when it is back. Then all parts of its steps take up to 1.3
times as long, without its waits for the core. There a rank is slow only if it takes HALF as long again, or in one part.
On two cores with two busy loops, 11 of 200 pieces of equal ranks would otherwise be reported as slow, and none is.

Where steps are noisy, they are so in one part, mostly in backward. So each part is tested by itself, beyond the share
by which the others take longer too; all parts of all ranks count as comparisons. A part that stands out names its rank
only if that rank's own time in all is longer by WHOLE of that.

With fewer steps than that needs (11 for two ranks), the rule is stricter. A rank is slow only if each of at least FEW
steps takes it twice as long as the others. Bursts last up to some tenths of a second on a busy machine. In 2,300 pieces
of 8 steps of equal ranks none was 33 % slower throughout. In 3,800 pieces of 5 steps four were twice as slow.
(`tests/benchmarks/equal.py` measures all of this.)

Pure.
"""

from __future__ import annotations

import functools
import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

CHANCE = 0.001  # that one of equal ranks is named
SIZE, BEYOND = 0.03, 0.015  # of a step: the least median of the difference, and its lower bound
PART, BEYOND_PART = 0.02, 0.005  # of a step: the same for one part of it, beyond what the other parts explain
WHOLE = 0.5  # of that: so much longer the rank's own time must be in all
FEW = 5  # steps
SHARED = 0.01  # of a step: a rank that waits so long for a core shares it
HALF = 0.5  # of the others' time: more than a shared core takes a rank longer by itself
WAITS_BLOCKS, WAITS_SECONDS = 12, 1.0  # what a rank waits for a core is compared in so many blocks of this length


@dataclass(frozen=True)
class Evidence:
    """rank: the slow one; None if none is. more: how much longer a step takes it, or the one that seems slowest, than
    the median of the others; noise: by how much a step of equal ranks may differ; of so many `steps`, where `enough`
    would do for any difference. All in the unit of the times."""

    rank: int | None
    more: float
    noise: float
    steps: int
    enough: int

    @property
    def known(self) -> bool:
        """Whether it is known that a rank is slow, or that none is."""
        return self.rank is not None or self.steps >= self.enough


def differences(times: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    """Rank → by step, how much longer it takes the rank than the median of the others."""
    found: dict[int, list[float]] = {r: [] for r in times}
    for at in zip(*times.values(), strict=True):
        order = sorted(at)
        for rank, own in zip(times, at, strict=True):
            found[rank].append(own - _median_without(order, own))
    return found


def _median_without(order: Sequence[float], one: float) -> float:
    """The median of what is left without one of these, which are in order."""
    left, at = len(order) - 1, bisect_left(order, one)
    low, high = ((i + (i >= at)) for i in ((left - 1) // 2, left // 2))
    return (order[low] + order[high]) / 2


def enough(ranks: int) -> int:
    """Steps of which all must take a rank longer, so that chance does not explain it."""
    return math.ceil(-math.log2(CHANCE / ranks))


def slower(times: Mapping[int, Sequence[float]], step: float, much: float = 1.0) -> Evidence | None:
    """times: rank → its own time in each step, without waiting for others. step: how long a step lasts. much: how many
    times as long as the others it must take in addition, in each of a few steps. None with one rank, or without
    steps."""
    count = min(map(len, times.values()), default=0)
    if len(times) < 2 or not count:
        return None
    apart = differences(times)
    (rank, more), needed = _seems_slowest(apart), enough(len(times))
    if count < needed:
        usual = [own - d for own, d in zip(times[rank], apart[rank], strict=True)]
        sure = count >= FEW and all(d > max(much * u, BEYOND * step) for d, u in zip(apart[rank], usual, strict=True))
        return Evidence(rank if sure else None, more, abs(more), count, needed)
    least = sorted(apart[rank])[_rare(count, 0.5, CHANCE / len(times)) - 1]
    sure = more >= SIZE * step and least > BEYOND * step
    return Evidence(rank if sure else None, more, max(SIZE * step, more - least), count, needed)


@dataclass(frozen=True)
class SlowPart:
    """The rank and its `part` that stands out. shares: of the parts whose difference chance does not explain, part →
    its share of their extra time, largest first; evidence: `more` is that time, without what others are shorter."""

    evidence: Evidence
    part: str
    shares: Mapping[str, float]


def slower_part(
    own: Mapping[int, Sequence[float]],
    parts: Mapping[str, Mapping[int, Sequence[float]]],
    step: float,
    rank: int | None = None,
) -> SlowPart | None:
    """Whether one part of its steps takes a rank, or this one, longer than its other parts explain; None if that is not
    known. own, step: as `slower` has them; parts: part → rank → its time in each step."""
    whole = {r: statistics.median(some) for r, some in differences(own).items()}
    count, needed = min(map(len, own.values())), enough(len(own) * len(parts))
    if count < needed:
        return None
    at = _rare(count, 0.5, CHANCE / (len(own) * len(parts))) - 1
    apart = {part: differences(times) for part, times in parts.items()}
    found, most = None, PART * step
    for r in whole if rank is None else [rank]:
        extra = {part: statistics.median(some[r]) for part, some in apart.items()}
        usual = {p: statistics.median(t - d for t, d in zip(parts[p][r], apart[p][r], strict=True)) for p in parts}
        least = {part: sorted(some[r])[at] for part, some in apart.items()}
        for part in parts:
            alike = _alike({p: extra[p] for p in parts if p != part}, usual) * usual[part]
            sure = least[part] - alike > BEYOND_PART * step and whole[r] >= WHOLE * extra[part]
            if sure and extra[part] - alike >= most:
                shown = {p: extra[p] for p in sorted(parts, key=lambda p: -extra[p]) if least[p] > 0}
                total = sum(shown.values())
                shorter = sum(extra[p] for p, some in apart.items() if sorted(some[r])[-1 - at] < 0)
                shares = {p: more / total for p, more in shown.items()}
                most = extra[part] - alike
                found = SlowPart(Evidence(r, total + shorter, PART * step, count, needed), part, shares)
    return found


def _alike(extra: Mapping[str, float], usual: Mapping[str, float]) -> float:
    """By which share of their usual time these parts take longer: all together, or most of them, whichever is more."""
    shares = [more / usual[part] for part, more in extra.items() if usual[part] > 0]
    together = sum(extra.values()) / (sum(usual[part] for part in extra) or 1.0)
    return max(0.0, together, statistics.median(shares or [0.0]))


def _seems_slowest(apart: Mapping[int, Sequence[float]]) -> tuple[int, float]:
    """The rank with the largest median, and that."""
    medians = {r: statistics.median(some) for r, some in apart.items()}
    rank = max(medians, key=lambda r: (medians[r], -r))
    return rank, medians[rank]


def mostly(last: int, of: int, ranks: int) -> bool:
    """Whether a rank that was the last of `ranks` in `last` of so many is so by more than chance; so for buckets."""
    return of - last < _rare(of, 1 - 1 / ranks, CHANCE / ranks)


@functools.lru_cache(64)
def _rare(count: int, share: float, chance: float) -> int:
    """The least number whose like, or less, happens more often than `chance` if each of `count` has a probability of
    `share`; 0: even none is not rare."""
    total = 0.0
    for k in range(count + 1):
        ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        total += math.exp(ways + k * math.log(share) + (count - k) * math.log(1 - share))
        if total > chance * (1 + 1e-9):
            return k
    return count + 1


def judged(
    own: Mapping[int, Sequence[float]], queued: Mapping[int, Sequence[float]], ends: Sequence[float], step: float
) -> tuple[Evidence | None, bool]:
    """Which rank is slow by itself, and else which waits longer for a core than the others (True). own, queued: rank →
    its time in each step without what it waits for a core, and that; ends: when each step ended, in nanoseconds."""
    found = slower(own, step)
    if found is None:
        return None, False
    if found.rank is not None:
        usual = statistics.median(own[found.rank]) - found.more
        if found.more >= HALF * usual or not shared(queued, step):
            return found, False
        found = replace(found, rank=None, noise=max(found.noise, found.more))
    crowded = waits(queued, ends, step)
    return (crowded, True) if crowded is not None and crowded.rank is not None else (found, False)


def shared(queued: Mapping[int, Sequence[float]], step: float) -> bool:
    """Whether a rank shares its core, with another rank or with another process."""
    return any(statistics.fmean(some) >= SHARED * step for some in queued.values())


def waits(queued: Mapping[int, Sequence[float]], ends: Sequence[float], step: float) -> Evidence | None:
    """Whether one rank waits longer for a core than the others. Which rank shares its core with another process changes
    by the second, so steps are put together into blocks of WAITS_SECONDS or more; None if they are too few."""
    size = max(WAITS_SECONDS * 1e9, (ends[-1] - ends[0]) / (4 * WAITS_BLOCKS))
    blocks: dict[int, list[int]] = {}
    for i, end in enumerate(ends):
        blocks.setdefault(int((end - ends[0]) / size), []).append(i)
    if len(blocks) < max(WAITS_BLOCKS, enough(len(queued))):
        return None
    return slower({r: [statistics.fmean(of[i] for i in some) for some in blocks.values()] for r, of in queued.items()},
                  step)  # fmt: skip
