"""Which stores are open when, by what the agent is told."""

from __future__ import annotations

from typing import Any

import pytest

from nbddp.errors import AgentFailed
from nbddp.pool.stores import RendezvousStores
from nbddp.protocol.outcome import GroupFacts


class Keeper:
    """An agent that opens stores 1, 2, 3, … at ports 1001, 1002, …"""

    def __init__(self) -> None:
        self.alive, self.opened, self.closed = True, 0, list[int]()

    def post(self, op: str, **fields: Any) -> int:
        self.opened += 1
        return self.opened

    def take(self, key: int, timeout: float = 0) -> dict[str, Any]:
        return {"store": key, "port": 1000 + key, "unguarded": ""}

    def tell(self, op: str, **fields: Any) -> None:
        self.closed += fields["stores"]


def group(run: int) -> dict[int, GroupFacts]:
    """All ranks have a living group that was made in this run."""
    return {0: GroupFacts(run), 1: GroupFacts(run)}


def test_runs_that_end_well_meet_in_one_store_and_one_is_ready() -> None:
    keeper = Keeper()
    stores = RendezvousStores([keeper])
    for run in (1, 2, 3):
        assert stores.ports_of(run) == (1001,)
        stores.after(True, {})
    assert (keeper.opened, keeper.closed) == (2, [])


def test_after_a_bad_run_the_next_meet_elsewhere_and_the_old_one_is_closed() -> None:
    keeper = Keeper()
    stores = RendezvousStores([keeper])
    stores.ports_of(1)
    stores.after(False, {})
    assert keeper.closed == [1]
    assert stores.ports_of(2) == (1002,)


def test_a_store_stays_as_long_as_a_group_lives_that_has_met_there() -> None:
    keeper = Keeper()
    stores = RendezvousStores([keeper])
    stores.ports_of(1)
    stores.after(True, group(1))
    stores.ports_of(2)
    stores.after(False, group(1))  # it failed behind the group's back
    assert keeper.closed == []
    assert stores.ports_of(3) == (1002,)
    stores.after(True, group(3))
    assert keeper.closed == [1]


def test_a_run_of_some_ranks_closes_nothing_of_the_others() -> None:
    keeper = Keeper()
    stores = RendezvousStores([keeper])
    stores.ports_of(1)
    stores.after(False, None)
    assert stores.ports_of(2) == (1002,)
    assert keeper.closed == []
    stores.after(True, {})
    assert keeper.closed == [1]


def test_a_store_that_is_cut_is_not_used_again() -> None:
    keeper = Keeper()
    stores = RendezvousStores([keeper])
    stores.ports_of(1)
    stores.cut()
    stores.cut()
    assert keeper.closed == [1]
    assert stores.ports_of(2) == (1002,)


def test_stores_of_a_process_that_has_ended_are_not_used_again() -> None:
    keeper = Keeper()
    stores = RendezvousStores([keeper])
    stores.ports_of(1)
    stores.heard({"ev": "gone"})
    stores.heard({"ev": "exit", "kind": "worker"})
    assert stores.ports_of(2) == (1001,)
    stores.heard({"ev": "exit", "kind": "store"})
    assert stores.ports_of(3) == (1003,)  # the one opened ahead of time has ended too
    assert stores.ports_of(4) == (1003,)


def test_a_keeper_that_has_ended_is_told_nothing() -> None:
    keeper = Keeper()
    stores = RendezvousStores([keeper])
    stores.ports_of(1)
    keeper.alive = False
    stores.cut()
    stores.after(False, {})
    assert keeper.closed == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, AgentFailed("it did not answer")])
def test_who_waited_in_vain_for_a_store_asks_anew(error: type[BaseException] | BaseException) -> None:
    """An answer is given once: Stop may come when it has been taken, and the next cell would wait for it for ever."""
    keeper = Keeper()
    stores = RendezvousStores([keeper])
    take = keeper.take

    def stopped(key: int, timeout: float = 0) -> dict[str, Any]:
        raise error

    keeper.take = stopped  # type: ignore[method-assign]
    with pytest.raises((KeyboardInterrupt, AgentFailed)):
        stores.ports_of(1)
    keeper.take = take  # type: ignore[method-assign]
    assert stores.ports_of(2) == (1002,)
