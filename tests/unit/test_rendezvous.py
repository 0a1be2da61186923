"""Lesson 03: who finds whom on paper is who finds whom on real ranks, and every broken configuration is told why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.lessons.framework.answer import Wrong
from nbddp.lessons.l03_finding_each_other import simulation
from nbddp.lessons.l03_finding_each_other.exercise import processes_of

# -- on paper --------------------------------------------------------------------------------


@given(nodes=st.integers(1, 4), per_node=st.integers(1, 4), last_first=st.booleans())
def test_all_meet_when_the_last_has_come_and_not_before(nodes: int, per_node: int, last_first: bool) -> None:
    size = nodes * per_node
    for arrived in range(1, size + 1):
        made = simulation.arrival(nodes, per_node, arrived, last_first)
        assert made.met == (arrived == size)
        assert [p.state == simulation.MEETS for p in made.places] == [arrived == size] * arrived


@given(nodes=st.integers(2, 4), per_node=st.integers(1, 4), fault=st.sampled_from(simulation.FAULTS[1:]))
def test_every_fault_stops_every_process(nodes: int, per_node: int, fault: str) -> None:
    made = simulation.meeting(simulation.faulty(nodes, per_node, fault))
    assert not any(p.state == simulation.MEETS for p in made.places)
    assert simulation.differs(simulation.faulty(nodes, per_node, fault))


@given(
    per_node=st.integers(1, 4),
    fault=st.sampled_from([simulation.OWN, simulation.TWICE, simulation.PORTS]),
)
def test_some_faults_do_not_show_on_one_node(per_node: int, fault: str) -> None:
    assert simulation.meeting(simulation.faulty(1, per_node, fault)).met


def test_who_waits_for_whom_in_words() -> None:
    assert simulation.arrival(arrived=3).describe() == (
        "3 of 4 processes have started: init_process_group blocks on each of them until all have started or it times"
        " out\n  rank 0 on node0: hosts the store, waits: for rank 3\n  rank 1 on node0: waits: for rank 3\n"
        "  rank 2 on node1: waits: for rank 3"
    )
    assert "rank 3 on node1: finds no store: rank 0 hosts none at node0:29400" in (
        simulation.arrival(arrived=2, last_first=True).describe()
    )


def test_an_environment_is_read_as_torch_reads_it() -> None:
    good = {"MASTER_ADDR": "node0", "MASTER_PORT": 29400, "WORLD_SIZE": 4, "RANK": 0}
    assert [p.rank for p in processes_of("f", [("value", {**good, "RANK": r}) for r in range(4)])] == [0, 1, 2, 3]
    with pytest.raises(Wrong, match="does not set RANK"):
        processes_of("f", [("value", {**good, "RANK": None})] * 4)
