"""What one recorded step shows, worked out once for its text, its table and its figure. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from nbddp.analysis.overlap import communication, lanes, split
from nbddp.analysis.row_limit import drawn
from nbddp.analysis.steps import Bucket, Origin, Recording, Span, Step
from nbddp.analysis.wait_time import CurvePoint, Straggler, Transfer, curves, duration, straggler, transfers
from nbddp.capabilities.timings.rank_time import Slow, SlowRankVerdict, verdict

LATE = 0.02  # of the step: a rank that is later than this is worth a sentence


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


def analysed(recording: Recording, number: int) -> StepView:
    """What step `number` shows. Raises KeyError if a rank does not have it."""
    step = recording.step(number)
    found, judged = transfers(step), verdict(recording)
    late = straggler(found)
    if late is not None and late.late <= LATE * duration(step):
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
        all(s.synced for s in step.values()), curves(recording),
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
