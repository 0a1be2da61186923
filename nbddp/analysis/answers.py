"""Answers of ranks: their values, and their clocks relative to rank 0's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nbddp.analysis.clocks import ClockOffset, Ping, clock
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
        self, op: str, ranks: Sequence[int] | None = None, buffers: Sequence[bytes] = (), **fields: Any
    ) -> dict[int, list[Any]]:
        """Have ranks (all, if None) carry out what `worker.requests` knows; rank → the buffers it answered with."""
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
