"""What a rank does by itself in DDP's steps, part by part, and why the slowest rank is slow.

The time from the end of backward, in which the ranks wait for each other, to the next is a rank's own, but for what it
waits in a hook that sends its buckets. DDP lets all ranks leave backward together, so a slow one shows in none of its
total times; the time until the gradients of the last bucket are ready is the rank's own, and shows it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbddp.analysis.cause import (
    BACKWARD,
    BATCH,
    EITHER,
    FORWARD,
    INPUT,
    MACHINE,
    OPTIMIZER,
    UNKNOWN,
    SlowRankCause,
    cause,
)
from nbddp.analysis.overlap import common, length
from nbddp.analysis.quantities import duration
from nbddp.analysis.significance import PART, WHOLE, Evidence, differences, judged, mostly, slower_part
from nbddp.analysis.steps import Bucket, Recording, Span, Step
from nbddp.analysis.wait_time import transfers
from nbddp.launch.topology import counted

OF_ALL = (MACHINE, BATCH, EITHER)  # causes that make all parts slower, also if one of them stands out
BETWEEN, LOSS = "between steps", "loss"
AFTER = "host-to-device copy (between data loader and forward)"  # all that is between them


def parts(step: Step, before: Step | None) -> dict[str, int]:
    """Nanoseconds of a step by part. before: the step before it on the rank, without which nothing is known of the time
    between the two."""
    start, computed, done = step.backward
    sending = sum(b.sent - b.ready for b in step.buckets)
    found = {
        FORWARD: step.forward[1] - step.forward[0],
        LOSS: max(0, start - step.forward[1]),
        BACKWARD: max(0, computed - start - sending),
        OPTIMIZER: max(0, step.optimizer[1] - done) if step.optimizer else 0,
    }
    return {**(_before((before.end, step.start), step.loader) if before else {}), **found}


def _before(gap: Span, loader: Sequence[Span]) -> dict[str, int]:
    """The time between two steps: until the data loader, in it, and after it."""
    inside = common([gap], loader)
    if not inside:
        return {BETWEEN: max(0, gap[1] - gap[0]), INPUT: 0, AFTER: 0}
    after = gap[1] - inside[-1][1]
    return {BETWEEN: gap[1] - gap[0] - length(inside) - after, INPUT: length(inside), AFTER: after}


@dataclass(frozen=True)
class Slow:
    """The slow rank. extra: nanoseconds per step more than the median of the others, in the median. last: in how many
    of all `of` buckets it was the last. worst: the bucket of whose gradients it is latest, where backward is the cause.
    `cause` says why it is slow."""

    rank: int
    extra: int
    steps: int
    last: int
    of: int
    cause: SlowRankCause
    worst: Bucket | None = None

    def words(self) -> list[str]:
        """A sentence on the rank and one on its cause."""
        last = f"; it starts {self.last} of {counted(self.of, 'bucket')} last" if self.of else ""
        lines = [
            f"over {counted(self.steps, 'step')} rank {self.rank} takes {duration(self.extra / 1e9)} longer per step "
            f"than the other ranks{last}",
            self.cause.words(),
        ]
        if self.worst is not None and self.worst.names:
            lines[1] += f"; it loses most before {self.worst.names[-1]} is ready, in bucket {self.worst.index}"
        return lines


@dataclass(frozen=True)
class SlowRankVerdict:
    """Which rank is slow, if that is known; what was found out about that."""

    evidence: Evidence
    slow: Slow | None = None

    def words(self) -> list[str]:
        if self.slow is not None:
            return self.slow.words()
        found = self.evidence
        steps = counted(found.steps, "step")
        if not found.known:
            return [
                f"whether a rank is slower is not known: {steps} after the first two show no large difference, and a "
                f"small one takes {found.enough}"
            ]
        return [f"no rank is slower than noise (± {duration(found.noise / 1e9)} over {steps})"]


def own(before: Step, step: Step) -> tuple[int, int]:
    """Nanoseconds of a step in which a rank works by itself: from the end of the exchange before until its gradients
    are there, without what it waits in a hook for a bucket to be sent; and of these what its thread waits for a core
    (0 if unknown), which is taken off."""
    work = step.backward[1] - before.backward[2]
    for bucket in step.buckets:
        work -= bucket.sent - bucket.ready
    queued = step.queued[0] - before.queued[1] if step.queued and before.queued else 0
    queued = min(max(0, work), max(0, queued))
    return max(0, work) - queued, queued


def usual(recording: Recording) -> list[int]:
    """The steps in which the ranks do not wait for each other in forward, and of which the one before is known."""
    numbers = recording.numbers()
    there = set(numbers)
    found = [n for n in numbers if not any(s.rebuilt or s.rebuilds for s in recording.step(n).values())]
    return [n for n in found if n - 1 in there]


def verdict(recording: Recording) -> SlowRankVerdict | None:
    """Whether a rank is slow, and why; None where there is one rank, or no step."""
    numbers = usual(recording)
    if not numbers or len(recording.ranks) < 2:
        return None
    steps = {n: recording.step(n) for m in numbers for n in (m - 1, m)}
    pairs = {r: [(steps[n - 1][r], steps[n][r]) for n in numbers] for r in recording.ranks}
    step = statistics.median(
        max(s.backward[2] - a.backward[2] for a, s in at) for at in zip(*pairs.values(), strict=True)
    )
    known = {r: [own(*pair) for pair in some] for r, some in pairs.items()}
    times, queued = ({r: [one[i] for one in some] for r, some in known.items()} for i in (0, 1))
    found, waits = judged(times, queued, [max(s.end for s in steps[n].values()) for n in numbers], step)
    if found is None or found.more < WHOLE * PART * step:
        return None if found is None else SlowRankVerdict(found)
    by_part = parts_by_step(pairs, queued)
    alone = slower_part(times, by_part, step)
    if alone is not None:
        found, waits = alone[0], False
    if found.rank is None:
        return SlowRankVerdict(found)
    if waits:
        why: SlowRankCause | None = SlowRankCause(found.rank, MACHINE, int(found.more), queued=int(found.more))
    else:
        why = cause(typical_parts(by_part, found.rank), found.rank, inputs(recording, numbers))
        if alone is not None and (why is None or why.what not in OF_ALL):
            why = SlowRankCause(found.rank, alone[1], int(found.more), why.by_part if why else {})
    return SlowRankVerdict(
        found, _slow(recording, numbers, found.rank, found.more, why or SlowRankCause(found.rank, UNKNOWN, 0))
    )


def parts_by_step(
    pairs: Mapping[int, Sequence[tuple[Step, Step]]], queued: Mapping[int, Sequence[int]]
) -> dict[str, dict[int, list[float]]]:
    """Part → rank → nanoseconds in each step, of the parts that a rank has. pairs: rank → each step and the one before
    it; queued: rank → what it waits for a core in each step.

    In which part it waits is not known. Each gives of that by how much longer it takes than in a quick step; the rest
    is taken off in proportion to what is left.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for rank, some in pairs.items():
        by_step = [parts(step, before) for before, step in some]
        quick = {part: sorted(of[part] for of in by_step)[len(by_step) // 4] for part in by_step[0]}
        for of, waited in zip(by_step, queued[rank], strict=True):
            longer = {part: max(0, took - quick[part]) for part, took in of.items()}
            late = sum(longer.values())
            share = min(1.0, waited / max(1, late))
            rest = min(1.0, max(0, waited - late) / max(1, sum(of.values()) - late))
            for part, took in of.items():
                left = took - share * longer[part] - rest * (took - longer[part])
                found.setdefault(part, {}).setdefault(rank, []).append(left)
    return {part: by_rank for part, by_rank in found.items() if any(map(any, by_rank.values()))}


def slow(recording: Recording) -> Slow | None:
    """The slow rank and its cause; None if none is known to be slow."""
    found = verdict(recording)
    return found.slow if found is not None else None


def _slow(recording: Recording, numbers: Sequence[int], rank: int, extra: float, why: SlowRankCause) -> Slow:
    exchanged = [t for n in numbers for t in transfers(recording.step(n))]
    worst = latest_bucket(recording, numbers, rank) if why.what == BACKWARD else None
    last = sum(t.slowest == rank for t in exchanged)
    return Slow(rank, int(extra), len(numbers), last, len(exchanged), why, worst)


def typical_parts(by_part: Mapping[str, Mapping[int, Sequence[float]]], rank: int) -> dict[int, dict[str, int]]:
    """Rank → part → nanoseconds in a typical step: of the others the median, of `rank` that and the median of what it
    takes longer in the same steps."""
    found: dict[int, dict[str, int]] = {}
    for part, times in by_part.items():
        apart = differences(times)[rank]
        usual_ = statistics.median(took - more for took, more in zip(times[rank], apart, strict=True))
        for r in times:
            found.setdefault(r, {})[part] = int(usual_ + (statistics.median(apart) if r == rank else 0))
    return found


def inputs(recording: Recording, numbers: Sequence[int]) -> dict[int, int] | None:
    """Rank → elements of its inputs in these steps; None if they are not known of all."""
    found = {r: [recording.step(n)[r].inputs for n in numbers] for r in recording.ranks}
    if any(n is None for some in found.values() for n in some):
        return None
    return {r: sum(n for n in some if n is not None) for r, some in found.items()}


def latest_bucket(recording: Recording, numbers: Sequence[int], rank: int) -> Bucket | None:
    """The bucket before whose ready time this rank loses most in backward, against the median of the others; None if
    that is another one too often."""
    worst, named = Counter[int](), dict[int, Bucket]()
    for n in numbers:
        step = recording.step(n)
        own = _until_ready(step[rank])
        others = [_until_ready(s) for r, s in step.items() if r != rank]
        shared = [b for b in step[rank].buckets if all(b.index in o for o in others)]
        lost = {b.index: own[b.index] - statistics.median(o[b.index] for o in others) for b in shared}
        worst.update(sorted(lost, key=lambda i: -lost[i])[:1])
        named.update((b.index, b) for b in shared)
    for index, times in worst.most_common(1):
        if len(named) > 1 and mostly(times, worst.total(), len(named)):
            return named[index]
    return None


def _until_ready(step: Step) -> Mapping[int, int]:
    """Bucket → nanoseconds from the bucket before it, or the beginning of backward, until it was ready."""
    at, found = step.backward[0], {}
    for bucket in sorted(step.buckets, key=lambda b: b.ready):
        found[bucket.index] = max(0, bucket.ready - at)
        at = max(at, bucket.sent)
    return found
