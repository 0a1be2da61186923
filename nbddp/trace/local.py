"""What a rank does by itself in DDP's steps, part by part, and why the slowest rank is slow.

The time from the end of backward, in which the ranks wait for each other, to the next is a rank's own, but for what it
waits in a hook that sends its buckets. DDP lets all ranks leave backward together, so a slow one shows in none of its
total times; the time until the gradients of the last bucket are ready is the rank's own, and shows it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbddp.plan.topology import counted
from nbddp.trace.activity import BACKWARD, FORWARD, INPUT, OPTIMIZER
from nbddp.trace.cause import Cause, cause
from nbddp.trace.overlap import common, length
from nbddp.trace.quantities import duration
from nbddp.trace.steps import Bucket, Recording, Span, Step
from nbddp.trace.waiting import duration as step_duration
from nbddp.trace.waiting import transfers

BETWEEN, LOSS = "between steps", "loss"
LATE, MUCH = 0.05, 0.1  # of a step: a rank that takes LATE longer is slow if it is last in MOST buckets, or with MUCH
MOST = 2 / 3
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
    """The rank with the most time of its own. extra: nanoseconds per step more than the median of the others. last: in
    how many of all `of` buckets it was the last. worst: the bucket of whose gradients it is latest, where backward is
    the cause. `cause` says why it is slow."""

    rank: int
    extra: int
    steps: int
    last: int
    of: int
    cause: Cause
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


def times(recording: Recording, numbers: Sequence[int]) -> dict[int, dict[str, int]]:
    """Rank → part → nanoseconds in all of these steps."""
    found: dict[int, dict[str, int]] = {}
    for rank, steps in recording.steps.items():
        by_number = {s.number: s for s in steps}
        found[rank] = {}
        for n in numbers:
            for part, took in parts(by_number[n], by_number.get(n - 1)).items():
                found[rank][part] = found[rank].get(part, 0) + took
    return found


def usual(recording: Recording) -> list[int]:
    """The steps in which the ranks do not wait for each other in forward, and of which the one before is known."""
    numbers = recording.numbers()
    first = set(numbers[:1])
    found = [n for n in numbers if not any(s.rebuilt or s.rebuilds for s in recording.step(n).values())]
    return [n for n in found if n not in first]


def slow(recording: Recording) -> Slow | None:
    """The slowest rank and its cause; None if no rank is much slower than the others."""
    numbers = usual(recording)
    if not numbers or len(recording.ranks) < 2:
        return None
    own = times(recording, numbers)
    rank = max(own, key=lambda r: (sum(own[r].values()), -r))
    others = statistics.median(sum(own[r].values()) for r in own if r != rank)
    extra = int((sum(own[rank].values()) - others) / len(numbers))
    exchanged = [t for n in numbers for t in transfers(recording.step(n))]
    last = sum(t.slowest == rank for t in exchanged)
    share = extra / max(1.0, statistics.fmean(step_duration(recording.step(n)) for n in numbers))
    if share < (LATE if last >= MOST * len(exchanged) else MUCH):
        return None
    why = cause(own, rank, queued(recording, numbers), inputs(recording, numbers))
    if why is None:
        return None
    worst = latest_bucket(recording, numbers, rank) if why.what == BACKWARD else None
    return Slow(rank, extra, len(numbers), last, len(exchanged), why, worst)


def queued(recording: Recording, numbers: Sequence[int]) -> dict[int, int] | None:
    """Rank → nanoseconds that it waited for a core from the first of these steps to the last; None if unknown."""
    ends = {r: [recording.step(n)[r].queued for n in (numbers[0], numbers[-1])] for r in recording.ranks}
    return {
        r: last - first for r, (first, last) in ends.items() if first is not None and last is not None
    } if all(None not in some for some in ends.values()) else None  # fmt: skip


def inputs(recording: Recording, numbers: Sequence[int]) -> dict[int, int] | None:
    """Rank → elements of its inputs in these steps; None if they are not known of all."""
    found = {r: [recording.step(n)[r].inputs for n in numbers] for r in recording.ranks}
    if any(n is None for some in found.values() for n in some):
        return None
    return {r: sum(n for n in some if n is not None) for r, some in found.items()}


def latest_bucket(recording: Recording, numbers: Sequence[int], rank: int) -> Bucket | None:
    """The bucket before whose ready time this rank loses most in backward, against the median of the others."""
    lost: dict[int, float] = {}
    named: dict[int, Bucket] = {}
    for n in numbers:
        step = recording.step(n)
        own = _until_ready(step[rank])
        others = [_until_ready(s) for r, s in step.items() if r != rank]
        for bucket in step[rank].buckets:
            if all(bucket.index in o for o in others):
                usual_ = statistics.median(o[bucket.index] for o in others)
                lost[bucket.index] = lost.get(bucket.index, 0.0) + own[bucket.index] - usual_
                named[bucket.index] = bucket
    return named[max(lost, key=lambda i: lost[i])] if lost and len(lost) > 1 else None


def _until_ready(step: Step) -> Mapping[int, int]:
    """Bucket → nanoseconds from the bucket before it, or the beginning of backward, until it was ready."""
    at, found = step.backward[0], {}
    for bucket in sorted(step.buckets, key=lambda b: b.ready):
        found[bucket.index] = max(0, bucket.ready - at)
        at = max(at, bucket.sent)
    return found
