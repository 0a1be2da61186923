"""The state of the ranks, one row each: from a run's samples, the agents' counts and the recorded steps. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nbddp.analysis.significance import judged
from nbddp.deadlock.positions import Position
from nbddp.deadlock.proof import waiting_words
from nbddp.errors import RankStatus
from nbddp.launch.topology import Topology

RECENT = 8  # steps that a rate is of
WARM_UP = 2  # steps: DDP rebuilds its buckets, and the ranks wait for each other in forward
SIGNS = {  # a state, and a sign of a shape of its own
    "idle": "○", "running": "●", "waiting": "◐", "finished": "✓", "failed": "✕", "dead": "✕", "silent": "?",
    "stopped": "⏸",
}  # fmt: skip
STATES = {  # a row for each member
    RankStatus.STARTING: "idle", RankStatus.IDLE: "idle",
    RankStatus.RUNNING: "running", RankStatus.BLOCKED: "waiting", RankStatus.SILENT: "silent",
    RankStatus.UNKNOWN: "silent", RankStatus.ABSENT: "idle", RankStatus.FINISHED: "finished",
    RankStatus.ENDED: "finished", RankStatus.FAILED: "failed", RankStatus.INTERRUPTED: "failed",
    RankStatus.REPLACED: "dead", RankStatus.DIED: "dead", RankStatus.TERMINATED: "dead",
}  # fmt: skip


@dataclass(frozen=True)
class Pace:
    """A DDP step as a rank tells of it while it runs: nanoseconds of its own clock. exposed: after the gradients, until
    all buckets had come. queued: what its thread has waited for a core since it began, as of the gradients and as of
    `end`."""

    number: int
    begin: int
    end: int
    exposed: int
    queued: tuple[int, int] = (0, 0)

    @property
    def duration(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Use:
    """What a process has used at a moment. `at`: seconds of a clock; cpu: seconds of CPU; memory: bytes; gpu: percent,
    of its GPUs the busiest; gpu_memory: bytes in use of them all, by any process. None: not told."""

    at: float
    cpu: float | None = None
    memory: int | None = None
    gpu: int | None = None
    gpu_memory: int | None = None


@dataclass(frozen=True)
class Rank:
    """One row. `state`: one of SIGNS; rate: steps per second; cpu: percent of a core; `slowest`: the others wait for
    it."""

    rank: int
    place: str
    device: str
    state: str = "idle"
    doing: str = ""
    rate: float | None = None
    cpu: float | None = None
    memory: int | None = None
    gpu: int | None = None
    gpu_memory: int | None = None
    slowest: bool = False


@dataclass(frozen=True)
class SeenRanks:
    """What was seen at a moment. `lives`: ranks with a process. `program`: what runs, empty if nothing does; of that
    run: `positions`, and how ranks have `ended` it."""

    lives: frozenset[int]
    program: str = ""
    ranks: frozenset[int] = frozenset()
    positions: Mapping[int, Position] | None = None
    ended: Mapping[int, RankStatus] | None = None


def rows(
    placed: Topology,
    look: SeenRanks,
    before: Mapping[int, Use],
    now: Mapping[int, Use],
    paces: Mapping[int, Sequence[Pace]],
) -> tuple[Rank, ...]:
    """A row for each rank of the layout."""
    slow = slowest({r: paces[r] for r in paces if r in look.ranks})
    return tuple(
        replace(_row(placed, w.rank, look, before.get(w.rank), now.get(w.rank), paces.get(w.rank, ())),
                slowest=w.rank == slow)
        for w in placed.workers
    )  # fmt: skip


def _row(
    placed: Topology, rank: int, look: SeenRanks, before: Use | None, now: Use | None, paces: Sequence[Pace]
) -> Rank:
    place, node = placed.workers[rank], placed.nodes[placed.workers[rank].node]
    state, doing = doing_of(rank, look)
    host = f" {node.host}" if node.host and not node.simulated and placed.nnodes > 1 else ""
    return Rank(
        rank, f"node {node.index}{host}", place.device_words(), state, doing,
        rate=rate(paces) if look.program else None, cpu=share(before, now),
        memory=now.memory if now is not None else None,
        gpu=now.gpu if now is not None else None, gpu_memory=now.gpu_memory if now is not None else None,
    )  # fmt: skip


def doing_of(rank: int, look: SeenRanks) -> tuple[str, str]:
    """A rank's state, and in words what it does."""
    if rank not in look.lives:
        return "dead", "its process has exited"
    if not look.program or rank not in look.ranks:
        return "idle", ""
    ended = (look.ended or {}).get(rank)
    if ended is not None:
        return STATES[ended], ""
    position = (look.positions or {}).get(rank)
    if position is None:
        return "running", ""
    if position.stopped:
        return "stopped", position.where
    waits = waiting_words(position, look.positions or {}).replace("waiting in", "in", 1)
    return STATES[position.state], ", ".join(filter(None, (waits, position.where)))


def share(before: Use | None, now: Use | None) -> float | None:
    """CPU time between two moments, in percent of a core; None where it is not known."""
    if before is None or now is None or before.cpu is None or now.cpu is None or now.at <= before.at:
        return None
    return max(0.0, 100 * (now.cpu - before.cpu) / (now.at - before.at))


def rate(paces: Sequence[Pace]) -> float | None:
    """Steps per second, of the newest; None before there are two."""
    recent = paces[-RECENT:]
    if len(recent) < 2 or recent[-1].begin <= recent[0].begin:
        return None
    return (len(recent) - 1) / ((recent[-1].begin - recent[0].begin) / 1e9)


def slowest(paces: Mapping[int, Sequence[Pace]]) -> int | None:
    """The rank that its peers wait for, by the test that `%ddp timings` makes (`analysis.significance`); None if no
    rank is known to be slow, or the steps of one are not known."""
    by_number = {r: {p.number: p for p in some} for r, some in paces.items()}
    if len(by_number) < 2:
        return None
    both = set.intersection(*(set(of) for of in by_number.values()))
    numbers = [n for n in sorted(both)[WARM_UP:] if n - 1 in both]
    if not numbers:
        return None
    pairs = {r: [(of[n - 1], of[n]) for n in numbers] for r, of in by_number.items()}
    queued = {r: [_queued(*pair) for pair in some] for r, some in pairs.items()}
    works = {r: [_works(*pair) - q for pair, q in zip(some, queued[r], strict=True)] for r, some in pairs.items()}
    ends = [max(of[n].end for of in by_number.values()) for n in numbers]
    step = statistics.median(max(of[n].end - of[n - 1].end for of in by_number.values()) for n in numbers)
    found, _ = judged(works, queued, ends, step)
    return found.rank if found is not None else None


def _works(before: Pace, step: Pace) -> int:
    """Nanoseconds from one exchange to the next."""
    return max(0, step.end - step.exposed - before.end)


def _queued(before: Pace, step: Pace) -> int:
    """Nanoseconds that a rank waits for a core between the two."""
    return min(_works(before, step), max(0, step.queued[0] - before.queued[1]))


def merged(before: Sequence[Pace], new: Sequence[Sequence[int]], most: int) -> tuple[Pace, ...]:
    """With steps that have come since; the newest `most`."""
    last = before[-1].begin if before else 0
    found = (Pace(n, begin, end, exposed, (a, b)) for n, begin, end, exposed, a, b in new if begin > last)
    return (*before, *found)[-most:]
