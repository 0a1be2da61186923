"""Lesson 02: layouts on paper against closed forms, and the checks of its two exercises on real ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbddp.lessons.l02_ranks_and_devices.simulation import GLOBAL, LOCAL, block, simulate_layout

small = st.integers(1, 4)


# -- the explorer ----------------------------------------------------------------------------


@given(nodes=small, processes=small, own=small)
def test_by_local_rank_every_gpu_has_one_owner(nodes: int, processes: int, own: int) -> None:
    made = simulate_layout(nodes, processes * own, own, LOCAL)
    assert made.works
    for node in range(nodes):
        taken = [i for t in made.taken if t.node == node for i in t.gpus]
        assert sorted(taken) == list(range(processes * own))


@given(nodes=small, processes=small, own=small)
def test_by_global_rank_only_node_0_starts(nodes: int, processes: int, own: int) -> None:
    made = simulate_layout(nodes, processes * own, own, GLOBAL)
    assert [not t.missing for t in made.taken] == [t.node == 0 for t in made.taken]
    assert made.works == (nodes == 1)


@given(nodes=small, processes=small, own=small)
def test_the_arithmetic_is_that_of_the_planned_topology(nodes: int, processes: int, own: int) -> None:
    for worker, taken in zip(
        (made := simulate_layout(nodes, processes * own, own)).placed.workers, made.taken, strict=True
    ):
        assert [d.index for d in worker.devices] == list(taken.gpus) == block(worker.local_rank, own)
        assert (worker.node, worker.local_rank) == divmod(worker.rank, processes)
