"""The stores in which runs meet: which is open, for whom, and until when. The agent's store host holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from nbddp.agent.handle import START_TIMEOUT


class Keeper(Protocol):
    """What holds the stores: a node's agent."""

    @property
    def alive(self) -> bool: ...
    def post(self, op: str, **fields: Any) -> int: ...
    def take(self, key: int, timeout: float = ...) -> dict[str, Any]: ...
    def tell(self, op: str, **fields: Any) -> None: ...


class RendezvousStores:
    """A store serves as long as runs end well, each under a prefix of its own. After a bad one a fresh store, opened
    ahead of time, takes its place, since nobody knows what waits at the old one; that stays as long as a group of the
    run lives that has met there. `unguarded`: why anybody on this machine can reach the last one; empty if nobody can.
    """

    def __init__(self, keeper: Keeper):
        self._keeper = keeper
        self._spare = keeper.post("store")  # where its process is spawned, it imports torch meanwhile
        self._open: tuple[int, int] | None = None  # number, port
        self._of_run: dict[int, int] = {}
        self.unguarded = ""

    def port_of(self, run: int) -> int:
        """The port of the store in which this run is to meet. Raises AgentFailed."""
        if self._open is None:
            answer = self._keeper.take(self._spare, START_TIMEOUT)
            self._spare = self._keeper.post("store")
            self._open, self.unguarded = (answer["store"], int(answer["port"])), answer["unguarded"]
        self._of_run[run] = self._open[0]
        return self._open[1]

    def cut(self) -> None:
        """Close the store of the run in progress: who waits there is told that the connection is lost."""
        if self._open is not None and self._keeper.alive:
            self._keeper.tell("close_stores", stores=[self._open[0]])
            self._open = None

    def after(self, well: bool, groups: Mapping[int, Mapping[str, Any]] | None) -> None:
        """A run has ended. groups: rank → facts of its living group, if all ranks took part: then stores that neither
        the next run nor such a group needs are closed."""
        if not self._keeper.alive:
            return
        if not well:
            self._open = None
        if groups is not None:
            self._close_but({g["run"] for g in groups.values()})

    def _close_but(self, runs: set[int | None]) -> None:
        needed = {self._of_run[n] for n in runs if n in self._of_run}
        current = {self._open[0]} if self._open else set()
        idle = set(self._of_run.values()) - needed - current
        if idle:
            self._keeper.tell("close_stores", stores=sorted(idle))
        self._of_run = {n: s for n, s in self._of_run.items() if n in runs}
