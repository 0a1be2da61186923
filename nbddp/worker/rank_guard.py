"""Who may reach the stores and groups that programs make on a rank: the part for ranks of a row's `Guard`.

Imports no torch: a process that a rank starts by spawn has a guard too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nbddp.protocol.capability import guard_row, load
from nbddp.protocol.run_spec import Rendezvous

Making = Callable[..., None]  # `__init__` of a store


class RankGuard(Protocol):
    """The guard of one process."""

    def begin(self, here: Rendezvous) -> None:
        """A run begins, whose ranks meet there."""

    def belong_to(self, roots: Sequence[int]) -> None:
        """The pool's processes on this machine are these and what they start; none: the worker's parent, the agent."""

    def store_made(self, original: Making) -> Making:
        """What `TCPStore.__init__` becomes."""

    def group_made(self, descriptors: Sequence[int], store: Any, rank: int, size: int) -> bool:
        """A gloo group has been made, and this rank got these sockets. Whether all ranks are known to be through.

        store: where the ranks met, if only the pool reaches it. Raises RuntimeError if the group may not be used.
        """

    def rest(self) -> None:
        """No pool has this process from here on."""


class Unguarded:
    """All is as torch makes it: any process that reaches this machine's ports may connect, as under torchrun."""

    def begin(self, here: Rendezvous) -> None:
        pass

    def belong_to(self, roots: Sequence[int]) -> None:
        pass

    def store_made(self, original: Making) -> Making:
        return original

    def group_made(self, descriptors: Sequence[int], store: Any, rank: int, size: int) -> bool:
        return False

    def rest(self) -> None:
        pass


@functools.cache
def guard() -> RankGuard:
    """This process's. Where a row has one that cannot be loaded, that is an error, and nothing goes on unguarded."""
    row = guard_row()
    if row is None:
        return Unguarded()
    found: RankGuard = load(row.rank)()
    return found
