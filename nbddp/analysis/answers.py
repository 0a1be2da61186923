"""Answers of ranks: their values, and one clock for ranks of several machines.

Rank 0 asks every other rank for its time, again and again. The shortest round trip gives the offset. The answer was
read somewhere within it, so its middle is at most half of it off (Cristian 1989; what NTP does). What was recorded
bounds the offset as well, at the time of recording: no rank has a bucket's result before every rank has sent it. Where
a clock has drifted since, it is moved to the nearest offset that these bounds allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nbddp.analysis.quantities import duration
from nbddp.analysis.steps import Recording, Step
from nbddp.launch.topology import Topology
from nbddp.protocol import pickling
from nbddp.protocol.run_spec import Question


def unpacked(answers: Mapping[int, Sequence[Any]]) -> dict[int, Any]:
    """Rank → the value that it sent."""
    return {r: pickling.unpack(buffers[0]) for r, buffers in answers.items()}


def clocks(ranks: IdleRanks) -> dict[int, ClockOffset]:
    """Each rank's clock against rank 0's; empty where all ranks are on one machine, which has one clock."""
    if len({n.host for n in ranks.placed().nodes}) < 2:
        return {}
    pings = unpacked(ranks.answers("clocks"))[0]
    return {0: ClockOffset(), **{r: clock([Ping(*p) for p in some]) for r, some in pings.items()}}


class IdleRanks(Protocol):
    """Ranks that no cell occupies."""

    def answers(
        self,
        op: str,
        ranks: Sequence[int] | None = None,
        buffers: Sequence[bytes] = (),
        *,
        meets: bool = True,
        **fields: Any,
    ) -> dict[int, list[Any]]:
        """Have ranks (all, if None) carry out what `worker.requests` knows; rank → the buffers it answered with. meets:
        whether they may meet at the pool's store."""
        ...

    def ask(self, rank: int, question: Question) -> Any:
        """A question to one rank's control thread; None without an answer."""
        ...

    def placed(self) -> Topology:
        """Who is where."""
        ...

    def newest(self) -> tuple[int, int] | None:
        """The number of the last cell's run, and the n of its In[n]; None if no cell has run."""
        ...


@dataclass(frozen=True)
class Ping:
    """One question: asked and answered on the asking rank's clock, `read` on the other's; nanoseconds."""

    asked: int
    read: int
    answered: int

    @property
    def took(self) -> int:
        return self.answered - self.asked


@dataclass(frozen=True)
class ClockOffset:
    """What is added to a rank's times to have them on rank 0's clock, and how far off that may be; nanoseconds."""

    offset: int = 0
    residual: int = 0


def clock(pings: Sequence[Ping]) -> ClockOffset:
    """The offset that the quickest round trip tells. Raises ValueError without pings."""
    best = min(pings, key=lambda p: p.took)
    return ClockOffset(best.asked + best.took // 2 - best.read, (best.took + 1) // 2)


def clocks_agree(residual: int) -> str:
    """What is said of an alignment's error in nanoseconds."""
    return f"The ranks' clocks agree within {duration(residual / 1e9)}."


def allowed(reference: Sequence[Step], other: Sequence[Step]) -> tuple[int, int] | None:
    """The least and the greatest offset of the other rank's clock at which no bucket of either is done before both
    have sent it; None where they have no bucket in common, or where no offset does it."""
    theirs = {(s.number, b.index): b for s in other for b in s.buckets}
    both = [(b, theirs[s.number, b.index]) for s in reference for b in s.buckets if (s.number, b.index) in theirs]
    if not both:
        return None
    low = max(a.sent - b.done for a, b in both)
    high = min(a.done - b.sent for a, b in both)
    return (low, high) if low <= high else None


def aligned(recording: Recording, clocks: Mapping[int, ClockOffset]) -> Recording:
    """The recording on the clock of its lowest rank, with the largest error of the alignment as `residual`.

    Without clocks all ranks have the same one: the recording as it is.
    """
    if not recording.steps or not clocks:
        return recording
    first = recording.ranks[0]
    base = clocks[first]
    steps, residual = {first: recording.steps[first]}, 0
    for rank in recording.ranks[1:]:
        own = clocks[rank]
        measured = own.offset - base.offset
        bounds = allowed(recording.steps[first], recording.steps[rank])
        offset = measured if bounds is None else min(max(measured, bounds[0]), bounds[1])
        steps[rank] = [s.shifted(offset) for s in recording.steps[rank]]
        residual = max(residual, own.residual + base.residual + abs(offset - measured))
    return replace(recording, steps=steps, residual=residual)
