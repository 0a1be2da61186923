"""The guard of a rank: its programs' stores listen where the pool alone is (`loopback`), and who is connected to a new
group is checked before that is used (`peer_check`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbddp.capabilities.private import loopback, peer_check
from nbddp.protocol.run_spec import Rendezvous
from nbddp.worker.rank_guard import Making, RankGuard


class Guard:
    def begin(self, here: Rendezvous) -> None:
        loopback.listen(here.listen, (here.master, here.store))

    def belong_to(self, roots: Sequence[int]) -> None:
        peer_check.belong_to(roots)

    def store_made(self, original: Making) -> Making:
        return loopback.on_loopback(original)

    def group_made(self, descriptors: Sequence[int], store: Any, rank: int, size: int) -> bool:
        return peer_check.check(descriptors, store, rank, size)

    def rest(self) -> None:
        loopback.listen(None)
        peer_check.belong_to([])


def guard() -> RankGuard:
    return Guard()
