"""The stores in which runs meet: which is open, for whom, and until when. The agents' store hosts hold them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nbddp.agent.client import START_TIMEOUT
from nbddp.protocol.agent import KEY_BYTES, OpenedStore, OpenStore
from nbddp.protocol.codec import Message, from_json, to_json
from nbddp.protocol.outcome import GroupFacts


class Keeper(Protocol):
    """What holds a store, or a gate to it: a node's agent."""

    @property
    def alive(self) -> bool: ...
    def post(self, op: str, **fields: Any) -> int: ...
    def take(self, key: int, timeout: float = ...) -> Message: ...
    def tell(self, op: str, **fields: Any) -> None: ...


@dataclass(frozen=True)
class Open:
    """A store, by the number that each keeper has given it, and the port at which its node's processes reach it."""

    numbers: tuple[int, ...]
    ports: tuple[int, ...]


class RendezvousStores:
    """A store serves as long as runs end well, each under a prefix of its own. After a bad one a fresh store, opened
    ahead of time, takes its place, since nobody knows what waits at the old one; that stays as long as a group of the
    run lives that has met there. `unguarded`: why anybody on this machine can reach the last one; empty if nobody can.

    keepers: of each node one; the first holds the stores, those of other nodes gates that lead there. address: where
    they reach the first node.
    """

    def __init__(
        self,
        keepers: Sequence[Keeper],
        address: str = "",
        roots: Sequence[int] = (),
        keeper_of: Sequence[int] | None = None,
    ):
        """roots: processes of the first node that belong to the pool although its agent has not started them.
        keeper_of: node → its keeper, where several nodes have the same."""
        self._keepers, self._address = tuple(keepers), address
        self._keeper_of = tuple(range(len(keepers)) if keeper_of is None else keeper_of)
        self._roots = tuple(roots)
        self._key = secrets.token_bytes(KEY_BYTES).hex()
        self._spare = self._post()  # where its process is spawned, it imports torch meanwhile
        self._open: Open | None = None
        self._of_run: dict[int, Open] = {}
        self.unguarded = ""
        self.serves = True  # no process that held stores has ended since the last was taken

    def heard(self, event: Message) -> None:
        """An agent's event, in its reader thread."""
        if event["ev"] == "exit" and event["kind"] == "store":
            self.serves = False

    def _post(self) -> int:
        first, *others = self._keepers
        asked = OpenStore(roots=self._roots)
        if others:
            asked = replace(asked, outside=self._address, key=self._key)
        return first.post("store", **to_json(asked))

    def _take(self) -> Open:
        """The store that was asked for ahead of time, and the gates of other nodes to it."""
        first, *others = self._keepers
        try:
            answers = [from_json(OpenedStore, first.take(self._spare, START_TIMEOUT))]
        finally:  # also after Stop or an error: an answer is given once, and nobody is to wait for it again
            self._spare = self._post()
        way = OpenStore(of=(self._address, answers[0].outside), key=self._key)
        asked = [k.post("store", **to_json(way)) for k in others]
        answers += [
            from_json(OpenedStore, keeper.take(key, START_TIMEOUT)) for keeper, key in zip(others, asked, strict=True)
        ]
        self.unguarded = next(filter(None, (a.unguarded for a in answers)), "")
        return Open(tuple(a.store for a in answers), tuple(a.port for a in answers))

    def ports_of(self, run: int) -> tuple[int, ...]:
        """The port, on each node's loopback, of the store in which this run is to meet. Raises AgentFailed."""
        self.open_now()
        assert self._open is not None
        self._of_run[run] = self._open
        return tuple(self._open.ports[keeper] for keeper in self._keeper_of)

    def open_now(self) -> None:
        """Have a store for the next run; raises now if there can be none. Raises AgentFailed."""
        if not self.serves:
            self.serves, self._open, self._spare = True, None, self._post()
            self._of_run.clear()
        self._open = self._open or self._take()

    def cut(self) -> None:
        """Close the store of the run in progress: who waits there gets the error that the connection is lost."""
        if self._open is not None:
            self._close([self._open])
            self._open = None

    def after(self, well: bool, groups: Mapping[int, GroupFacts] | None) -> None:
        """A run has ended. groups: rank → facts of its living group, if all ranks took part. Then stores that neither
        the next run nor such a group needs are closed."""
        if not well:
            self._open = None
        if groups is not None:
            self._close_but({g.run for g in groups.values()})

    def _close_but(self, runs: set[int | None]) -> None:
        needed = {self._of_run[n] for n in runs if n in self._of_run}
        current = {self._open} if self._open else set()
        idle = set(self._of_run.values()) - needed - current
        if idle:
            self._close(sorted(idle, key=lambda store: store.numbers))
        self._of_run = {n: s for n, s in self._of_run.items() if n in runs}

    def end(self) -> None:
        """Close all that are open; nobody meets here any more."""
        self._close(sorted({*self._of_run.values(), *filter(None, [self._open])}, key=lambda store: store.numbers))
        self._of_run, self._open = {}, None

    def _close(self, stores: Sequence[Open]) -> None:
        for i, keeper in enumerate(self._keepers):
            if keeper.alive:
                keeper.tell("close_stores", stores=[store.numbers[i] for store in stores])
