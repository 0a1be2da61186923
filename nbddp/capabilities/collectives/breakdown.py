"""The shares of compute, communication, copies and idle time of each rank, and the overlap.

Definitions of Holistic Trace Analysis (hta.readthedocs.io, "Temporal Breakdown" and "Communication Computation
Overlap"): compute is time with a kernel that computes; communication is exposed where nothing computes; idle is time
with none of all; the overlap is the share of communication behind which something computes. One thing is different: the
time is the same for all ranks, from the first activity on any of them to the last. A rank that begins late or ends
early is idle meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbddp.analysis.activity import Activity
from nbddp.analysis.steps import Span, common, length, minus


@dataclass(frozen=True)
class Split:
    """One rank's time in nanoseconds: compute + exposed + copies + idle = whole. waiting: of the exposed communication,
    until the last rank had come. communication: all of it, `hidden` behind compute; None if only what is exposed is
    known."""

    whole: int
    compute: int
    exposed: int
    copies: int
    idle: int
    communication: int | None
    hidden: int
    waiting: int = 0

    @property
    def overlap(self) -> float | None:
        """Of communication, the share behind compute; None without communication."""
        return self.hidden / self.communication if self.communication else None


def whole(ranks: Mapping[int, Activity]) -> Span:
    """From the first activity on any rank to the last; (0, 0) without any."""
    windows = [a.window for a in ranks.values() if a.window is not None]
    return (min(s for s, _ in windows), max(e for _, e in windows)) if windows else (0, 0)


def split(of: Activity, window: Span, waits: list[Span]) -> Split:
    """One rank's time. waits: when it waited for another rank to come to a collective."""
    total = window[1] - window[0]
    compute = length(of.compute)
    exposed = minus(of.communication, of.compute)
    copies = length(minus(of.copies, [*of.compute, *of.communication]))
    communicating = length(of.communication)
    return Split(
        total, compute, length(exposed), copies, total - compute - length(exposed) - copies,
        communicating, communicating - length(exposed), length(common(exposed, waits)),
    )  # fmt: skip
