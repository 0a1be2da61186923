"""Waiting and moving, told apart: a collective starts when its last rank arrives; where the backend carries out one
after the other, as NCCL does on its stream, not before the one before it has ended.

Bandwidths are those of nccl-tests (doc/PERFORMANCE.md): the algorithm bandwidth is size / time; the bus bandwidth of an
all-reduce on n ranks is that times 2 (n - 1) / n: that speed each link must have had.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nbddp.analysis.steps import Bucket, Recording, Step, split

BUS_FACTOR: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1.0,
}


@dataclass(frozen=True)
class Transfer:
    """One bucket across the ranks of one step.

    start: when the last rank had sent it and the backend was through with the bucket before, if it queues them.
    wait: rank → nanoseconds it waited for the last rank; the slowest has 0. moving: nanoseconds from start until the
    last rank had its result. `names` as the lowest rank has them.
    """

    index: int
    bytes: int
    start: int
    slowest: int
    wait: Mapping[int, int]
    moving: int
    names: tuple[str, ...] = ()

    def algorithm_bandwidth(self) -> float:
        """Bytes per second; 0 for a transfer without duration."""
        return self.bytes / self.moving * 1e9 if self.moving > 0 else 0.0

    def bus_bandwidth(self, ranks: int) -> float:
        """Bytes per second on each link of a ring of `ranks`."""
        return self.algorithm_bandwidth() * bus_factor("all_reduce", ranks)


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth / algorithm bandwidth of a collective on this many ranks. Raises KeyError for another name."""
    return float(BUS_FACTOR[collective](ranks))


def transfers(step: Mapping[int, Step]) -> list[Transfer]:
    """The buckets that every rank has in this step (rank → its step), in the order they were started."""
    by_rank = {r: {b.index: b for b in s.buckets} for r, s in step.items()}
    shared = set.intersection(*(set(b) for b in by_rank.values())) if by_rank else set()
    together = [{r: buckets[i] for r, buckets in by_rank.items()} for i in shared]
    found, free = [], 0  # when the backend is through with all before
    for buckets in sorted(together, key=lambda some: (_last_sent(some), min(b.index for b in some.values()))):
        found.append(_transfer(buckets, free))
        free = max(b.done for b in buckets.values())
    return found


def _last_sent(buckets: Mapping[int, Bucket]) -> int:
    return max(b.sent for b in buckets.values())


def _transfer(buckets: Mapping[int, Bucket], free: int) -> Transfer:
    arrived, end = _last_sent(buckets), max(b.done for b in buckets.values())
    slowest = min(r for r, b in buckets.items() if b.sent == arrived)
    first = buckets[min(buckets)]
    start = max(arrived, free) if first.queued else arrived
    wait = {r: arrived - b.sent for r, b in buckets.items()}
    return Transfer(first.index, first.bytes, start, slowest, wait, max(0, end - start), first.names)


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for: `late` nanoseconds, the median over buckets of the longest wait for it;
    `of` all buckets it was the last in `last`."""

    rank: int
    late: int
    last: int
    of: int


def straggler(found: Sequence[Transfer]) -> Straggler | None:
    """The rank that is last in most buckets; None without buckets or with one rank."""
    if not found or len(found[0].wait) < 2:
        return None
    count: dict[int, int] = {}
    for t in found:
        count[t.slowest] = count.get(t.slowest, 0) + 1
    rank = min(count, key=lambda r: (-count[r], r))
    late = [max(t.wait.values()) for t in found if t.slowest == rank]
    return Straggler(rank, int(statistics.median(late)), count[rank], len(found))


def typical(recording: Recording) -> int | None:
    """Number of the step whose duration (of its slowest rank) is the median one; the first two, with
    DDP's bucket rebuild, and steps without synchronisation do not count where there are others."""
    numbers = recording.numbers()
    usual = [
        n for n in numbers if all(s.synced and not s.rebuilt and not s.rebuilds for s in recording.step(n).values())
    ]
    durations = {n: duration(recording.step(n)) for n in usual or numbers}
    if not durations:
        return None
    order = sorted(durations, key=lambda n: (durations[n], n))
    return order[(len(order) - 1) // 2]


def duration(step: Mapping[int, Step]) -> int:
    """Nanoseconds of a step: of the rank that took longest."""
    return max(s.duration for s in step.values())


def spread(step: Mapping[int, Step]) -> int:
    """Nanoseconds between the first and the last rank to have computed its gradients."""
    ends = [s.backward[1] for s in step.values()]
    return max(ends) - min(ends)


@dataclass(frozen=True)
class CurvePoint:
    """One line of the step-by-step curves; nanoseconds."""

    number: int
    duration: int
    exposed: int
    spread: int
    hidden_share: float | None


def curves(recording: Recording) -> list[CurvePoint]:
    """Step time, exposed communication and spread between ranks, step by step."""
    found = []
    for n in recording.numbers():
        step = recording.step(n)
        parts = [split(s) for s in step.values()]
        shares = [behind / (behind + after) for behind, after in parts if behind + after]
        share = sum(shares) / len(shares) if shares else None
        found.append(CurvePoint(n, duration(step), max(after for _, after in parts), spread(step), share))
    return found
