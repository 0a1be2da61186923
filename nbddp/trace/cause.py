"""Why a rank is late: in which part of a step it takes longer than the others.

A table of times, rank → part → nanoseconds, of what each rank does by itself, without waiting for others. The late
rank's time in each part is compared with the median of the other ranks':

- all parts take longer by about the same factor, or the rank waits for a core: the machine;
- forward and backward do, and the optimizer does not: its share of the batch; where the optimizer is too short to
  tell, one of the two;
- one part has most of the extra time: that part;
- anything else: the cause is not known, and the largest parts are named.

Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from nbddp.trace.quantities import digits, duration, percent

MACHINE, BATCH, EITHER, UNKNOWN = "the machine", "more work", "more work or the machine", "not known"
MOST = 0.6  # of the extra time: what has more of it is the cause
SLOWER, ALIKE = 1.04, 3.0  # times as long, at least; and what is more than once differs by this at most
COUNTS = 0.03  # of the others' time: a part that takes less says nothing about a factor
COVER = 0.5  # of the others' time that the parts with a factor must make up
WORK = ("forward", "loss", "backward", "optimizer")  # what a slow machine slows, whatever the data are


@dataclass(frozen=True)
class Cause:
    """what: a part's name, MACHINE, BATCH, EITHER or UNKNOWN. extra: nanoseconds that the rank takes longer than the
    median of the others; by_part: part → its share of that, largest first. factor: how many times as long its work
    takes, of MACHINE, BATCH and EITHER. queued: nanoseconds that it waits for a core, more than the others do; 0 if
    that is not known."""

    rank: int
    what: str
    extra: int
    by_part: Mapping[str, float] = field(default_factory=dict)
    factor: float = 1.0
    queued: int = 0

    def words(self) -> str:
        """One sentence, or two."""
        if self.what == MACHINE and self.queued:
            return (
                f"cause: the machine: rank {self.rank} waits {duration(self.queued / 1e9)} longer than the others for "
                "a free core; other processes use its cores"
            )
        if self.what == MACHINE:
            return f"cause: the machine: everything takes rank {self.rank} about {digits(self.factor)} times as long"
        if self.what == BATCH:
            return (
                f"cause: more work: forward and backward take rank {self.rank} about {digits(self.factor)} times as "
                "long, the optimizer no longer than the others: a larger batch or longer inputs"
            )
        if self.what == EITHER:
            return (
                f"cause: forward and backward take rank {self.rank} about {digits(self.factor)} times as long: a "
                "larger batch, longer inputs or a slower machine; the optimizer is too short to tell which"
            )
        if self.what == UNKNOWN:
            parts = ", ".join(f"{name} {percent(share)}" for name, share in list(self.by_part.items())[:3])
            return f"cause: not known; rank {self.rank}'s extra time is spread over several parts ({parts})"
        share = self.by_part[self.what]
        return f"cause: {self.what}, which has {percent(share)} of rank {self.rank}'s extra time"


def cause(times: Mapping[int, Mapping[str, int]], rank: int, queued: Mapping[int, int] | None = None) -> Cause | None:
    """Why `rank` is late; None if it takes no longer than the others, or is alone. queued: rank → nanoseconds that it
    waited for a core."""
    others = [r for r in times if r != rank]
    if not others:
        return None
    usual = {part: statistics.median(times[r][part] for r in others) for part in times[rank]}
    extra = {part: times[rank][part] - usual[part] for part in usual}
    longer = {part: more for part, more in extra.items() if more > 0}
    total = int(sum(longer.values()))
    if total <= 0 or sum(extra.values()) <= 0:
        return None
    shares = {part: more / total for part, more in sorted(longer.items(), key=lambda pair: -pair[1])}
    found = Cause(rank, UNKNOWN, total, shares)
    return _of_cores(found, others, queued) or _of_factor(found, times[rank], usual) or _of_part(found)


def _of_cores(found: Cause, others: list[int], queued: Mapping[int, int] | None) -> Cause | None:
    if not queued:
        return None
    more = int(queued[found.rank] - statistics.median(queued[r] for r in others))
    if more < MOST * found.extra:
        return None
    return Cause(found.rank, MACHINE, found.extra, found.by_part, queued=more)


def _of_factor(found: Cause, own: Mapping[str, int], usual: Mapping[str, float]) -> Cause | None:
    part, share = next(iter(found.by_part.items()))
    if part not in WORK and share >= MOST:  # a sleep between steps: that forward is slower as well explains little
        return None
    whole = sum(usual.values())
    factors = {part: own[part] / usual[part] for part in WORK if usual.get(part, 0) > COUNTS * whole}
    slower = {part: f for part, f in factors.items() if f >= SLOWER}
    if len(slower) < 2 or sum(usual[part] for part in slower) < COVER * whole:
        return None
    if max(slower.values()) - 1 > ALIKE * (min(slower.values()) - 1):
        return None
    factor = sum(own[part] for part in slower) / sum(usual[part] for part in slower)
    rest = set(factors) - set(slower)
    what = BATCH if rest == {"optimizer"} else "" if rest else MACHINE if "optimizer" in factors else EITHER
    return Cause(found.rank, what, found.extra, found.by_part, factor) if what else None


def _of_part(found: Cause) -> Cause:
    part, share = next(iter(found.by_part.items()))
    return Cause(found.rank, part if share >= MOST else UNKNOWN, found.extra, found.by_part)
