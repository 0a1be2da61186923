"""Answers of ranks: their values, and their clocks relative to rank 0's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbddp.analysis.clocks import ClockOffset, Ping, clock
from nbddp.execution.protocols import IdleRanks
from nbddp.protocol import pickling


def unpacked(answers: Mapping[int, Sequence[Any]]) -> dict[int, Any]:
    """Rank → the value that it sent."""
    return {r: pickling.unpack(buffers[0]) for r, buffers in answers.items()}


def clocks(ranks: IdleRanks) -> dict[int, ClockOffset]:
    """Each rank's clock against rank 0's; empty where all ranks are on one machine, which has one clock."""
    if len({n.host for n in ranks.placed().nodes}) < 2:
        return {}
    pings = unpacked(ranks.answers("clocks"))[0]
    return {0: ClockOffset(), **{r: clock([Ping(*p) for p in some]) for r, some in pings.items()}}
