"""The part of a pool that a question to all ranks needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from nbddp.launch.topology import Topology
from nbddp.protocol.run_spec import Question


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
