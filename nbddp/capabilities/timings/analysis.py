"""The analysis of one recorded step, computed once for its text, its table and its figure. Pure.

The ranks wait for each other at the end of backward. The time from there to the next such end is a rank's own, without
its waits in a hook that sends its buckets. DDP lets all ranks leave backward together, so a slow one shows in none of
its total times; the time until the gradients of the last bucket are ready is the rank's own, and shows it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nbddp.analysis.cause import (
    BACKWARD,
    BATCH,
    EITHER,
    FORWARD,
    INPUT,
    MACHINE,
    MOST,
    OPTIMIZER,
    UNKNOWN,
    SlowRankCause,
    cause,
)
from nbddp.analysis.quantities import drawn, duration
from nbddp.analysis.significance import (
    PART,
    WHOLE,
    Evidence,
    SlowPart,
    differences,
    enough,
    judged,
    mostly,
    shared,
    slower_part,
)
from nbddp.analysis.steps import Bucket, Origin, Recording, Span, Step, common, communication, lanes, length, split
from nbddp.analysis.wait_time import CurvePoint, Straggler, Transfer, curves, straggler, transfers
from nbddp.analysis.wait_time import duration as step_duration
from nbddp.launch.topology import counted

LATE = 0.02  # of the step: a rank that is later than this is worth a sentence
OF_ALL = (MACHINE, BATCH, EITHER)  # causes that make all parts slower, also if one of them stands out
BETWEEN, LOSS = "between steps", "loss"
AFTER = "host-to-device copy (between data loader and forward)"  # all that is between them


@dataclass(frozen=True)
class BucketView:
    """A bucket on one rank. lane: below the rank's computation, from 0. start: when it begins to move, after it was
    sent. slowest: the rank that sent it last, or this one if a rank does not have it."""

    bucket: Bucket
    lane: int
    start: int
    slowest: int


@dataclass(frozen=True)
class RankView:
    """One rank's step. phases: their names and spans. hidden, exposed: nanoseconds of communication behind backward and
    after it; tail: from the first exposed communication to the end of the last. last: buckets that it sent last, of
    those that all ranks have."""

    rank: int
    step: Step
    phases: Sequence[tuple[str, Span]]
    buckets: Sequence[BucketView]
    hidden: int
    exposed: int
    tail: Span | None
    last: int

    @property
    def depth(self) -> int:
        """Lanes, with that of the computation."""
        return 1 + max((b.lane + 1 for b in self.buckets), default=0)

    @property
    def hidden_share(self) -> float | None:
        """0 to 1; None without communication."""
        return self.hidden / (self.hidden + self.exposed) if self.hidden + self.exposed else None


@dataclass(frozen=True)
class StepView:
    """Step `number` of a recording. ranks: those that are drawn, of `count`. hidden_share: the ranks' mean. late: the
    rank that the others wait for in this step; judged: whether one is slow over all steps. curves: of all steps."""

    number: int
    model: str
    origin: Origin | None
    missing: Sequence[int]
    residual: int
    begin: int
    end: int
    ranks: Sequence[RankView]
    count: int
    transfers: Sequence[Transfer]
    hidden_share: float | None
    late: Straggler | None
    judged: SlowRankVerdict | None
    rebuilt: bool
    rebuilds: bool
    synced: bool
    curves: Sequence[CurvePoint]

    @property
    def slow(self) -> Slow | None:
        return self.judged.slow if self.judged is not None else None


def analysed(recording: Recording, number: int, like: StepView | None = None) -> StepView:
    """What step `number` shows. like: another step of the recording. Raises KeyError if a rank does not have it."""
    step = recording.step(number)
    found, judged = transfers(step), verdict(recording) if like is None else like.judged
    late = straggler(found)
    if late is not None and late.late <= LATE * step_duration(step):
        late = None
    slow = judged.slow if judged is not None else None
    ranks = {r: _rank(r, mine, found) for r, mine in step.items()}
    shares = [share for r in ranks.values() if (share := r.hidden_share) is not None]
    return StepView(
        number, recording.model, recording.origin, recording.missing, recording.residual,
        min(s.start for s in step.values()), max(s.end for s in step.values()),
        [ranks[r] for r in drawn(ranks, [one.rank for one in (late, slow) if one is not None])], len(ranks),
        found, statistics.mean(shares) if shares else None, late, judged,
        any(s.rebuilt for s in step.values()), any(s.rebuilds for s in step.values()),
        all(s.synced for s in step.values()), curves(recording) if like is None else like.curves,
    )  # fmt: skip


def _rank(rank: int, mine: Step, found: Sequence[Transfer]) -> RankView:
    phases = [("forward", mine.forward), ("backward", mine.backward[:2])]
    if mine.optimizer:
        phases.append(("optimizer", mine.optimizer))
    moved = {t.index: t for t in found}
    placed = lanes([(b.sent, b.done) for b in mine.buckets])
    buckets = [_bucket(b, lane, rank, moved.get(b.index)) for b, lane in zip(mine.buckets, placed, strict=True)]
    hidden, exposed = split(mine)
    busy = communication(mine)
    tail = (max(mine.backward[1], busy[0][0]), busy[-1][1]) if exposed else None
    return RankView(rank, mine, phases, buckets, hidden, exposed, tail, sum(t.slowest == rank for t in found))


def _bucket(bucket: Bucket, lane: int, rank: int, moved: Transfer | None) -> BucketView:
    if moved is None:
        return BucketView(bucket, lane, bucket.sent, rank)
    return BucketView(bucket, lane, min(max(moved.start, bucket.sent), bucket.done), moved.slowest)


# -- which rank is slow, and why -------------------------------------------------------------------


def parts(before: Step, step: Step) -> dict[str, int]:
    """The time that `own` has, in nanoseconds by part: the optimizer is that of the step before."""
    start, computed, _ = step.backward
    sending = sum(b.sent - b.ready for b in step.buckets)
    return {
        **_before((before.end, step.start), step.loader),
        FORWARD: step.forward[1] - step.forward[0],
        LOSS: max(0, start - step.forward[1]),
        BACKWARD: max(0, computed - start - sending),
        OPTIMIZER: max(0, before.end - before.backward[2]),
    }


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

    def describe(self) -> list[str]:
        """A sentence on the rank and one on its cause."""
        last = f"; it starts {self.last} of {counted(self.of, 'bucket')} last" if self.of else ""
        lines = [
            f"over {counted(self.steps, 'step')} rank {self.rank} takes {duration(self.extra / 1e9)} longer per step "
            f"than the other ranks{last}",
            self.cause.describe(),
        ]
        if self.worst is not None and self.worst.names:
            lines[1] += f"; it loses most before {self.worst.names[-1]} is ready, in bucket {self.worst.index}"
        return lines


@dataclass(frozen=True)
class SlowRankVerdict:
    """Which rank is slow, if that is known; what was found out about that."""

    evidence: Evidence
    slow: Slow | None = None

    def describe(self) -> list[str]:
        if self.slow is not None:
            return self.slow.describe()
        found = self.evidence
        steps = counted(found.steps, "step")
        if not found.known:
            return [
                f"whether a rank is slower is not known: {steps} after the first two show no large difference, and a "
                f"small one takes {found.enough}"
            ]
        return [f"no rank is slower than noise (± {duration(found.noise / 1e9)} over {steps})"]


def own(before: Step, step: Step) -> tuple[int, int]:
    """Nanoseconds of a step in which a rank works by itself, and those in which its thread waits for a core (0 if
    unknown). The work lasts from the end of the exchange before until its gradients exist. Its waits in a hook for a
    bucket to be sent do not count, nor do those for a core."""
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
    whole = found.rank is not None and not waits
    alone = slower_part(times, by_part, step, found.rank if whole else None)
    if waits and alone is not None and alone.evidence.rank != found.rank and alone.evidence.more < found.more:
        alone = None
    named = found if whole or alone is None else alone.evidence
    if named.rank is not None:
        why = _why(by_part, named, alone, inputs(recording, numbers))
        if not whole and why.what in (*OF_ALL, UNKNOWN) and shared(queued, step):
            named, alone = found, None  # cold caches take a rank longer in all parts, though not by the same factor
    if named.rank is None:
        return SlowRankVerdict(replace(found, enough=enough(len(times) * len(by_part))))
    if waits and alone is None:
        why = SlowRankCause(named.rank, MACHINE, int(named.more), queued=int(named.more))
    return SlowRankVerdict(named, _slow(recording, numbers, named.rank, named.more, why))


def _why(
    by_part: Mapping[str, Mapping[int, Sequence[float]]],
    found: Evidence,
    alone: SlowPart | None,
    elements: Mapping[int, int] | None,
) -> SlowRankCause:
    """Of a rank with a part that stands out, this is the cause if it has most of what is known to take longer."""
    assert found.rank is not None
    why = cause(typical_parts(by_part, found.rank), found.rank, elements)
    if alone is None or (why is not None and why.what in OF_ALL):
        return why or SlowRankCause(found.rank, UNKNOWN, 0)
    if why is not None and alone.shares.get(why.what, 0.0) >= MOST:
        return why
    known = min(1.0, alone.evidence.more / found.more)
    shares = {part: known * share for part, share in alone.shares.items()}
    return SlowRankCause(found.rank, alone.part if shares[alone.part] > 0.5 else UNKNOWN, int(found.more), shares)


def parts_by_step(
    pairs: Mapping[int, Sequence[tuple[Step, Step]]], queued: Mapping[int, Sequence[int]]
) -> dict[str, dict[int, list[float]]]:
    """Part → rank → nanoseconds in each step, of the parts that a rank has. pairs: rank → each step and the one before
    it; queued: rank → its wait for a core in each step.

    The part in which the rank waits is not known. So the wait is first subtracted from each part's excess over a quick
    step. Any remainder is subtracted from all parts, in proportion to their quick times.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for rank, some in pairs.items():
        by_step = [parts(*pair) for pair in some]
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
    """Rank → part → nanoseconds in a typical step. For the others that is the median; for `rank` it is that plus the
    median of its extra time in the same steps."""
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
        if len(named) > 1 and 2 * times > worst.total() and mostly(times, worst.total(), len(named)):
            return named[index]
    return None


def _until_ready(step: Step) -> Mapping[int, int]:
    """Bucket → nanoseconds from the bucket before it, or the beginning of backward, until it was ready."""
    at, found = step.backward[0], {}
    for bucket in sorted(step.buckets, key=lambda b: b.ready):
        found[bucket.index] = max(0, bucket.ready - at)
        at = max(at, bucket.sent)
    return found
