"""Lesson 03: who finds whom on paper is who finds whom on real ranks, and every broken configuration is told why."""

from __future__ import annotations

import pytest

from nbddp.agent.controller import quiet_ports
from nbddp.lessons.framework.on_rank import meet
from nbddp.lessons.l03_finding_each_other import simulation
from nbddp.lessons.l03_finding_each_other.exercise import reachable
from nbddp.lessons.l03_finding_each_other.figure import arrivals
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.teach import check, explore
from tests.lessons.answers import exercise, solution

NPROC = 4  # of the module's pool


def test_three_of_four_wait_and_localhost_is_another_machine_on_the_second_node() -> None:
    """What the lesson's questions about the explorer say."""
    made = simulation.arrival(arrived=3)
    assert [p.state for p in made.places] == [
        simulation.HOSTS,
        simulation.WAITS,
        simulation.WAITS,
    ]
    local = simulation.arrival(fault=simulation.OWN)
    assert [p.state for p in local.places] == [
        simulation.HOSTS,
        simulation.WAITS,
        simulation.SEEKS,
        simulation.SEEKS,
    ]
    first, second = explore.arrived().settings
    assert simulation.arrival(**first).met
    assert simulation.arrival(**second) == local


def test_the_figure_has_a_place_for_every_rank() -> None:
    for fault in simulation.FAULTS:
        shown = arrivals(simulation.arrival(fault=fault))
        texts = [t.get_text() for axes in shown.figure.axes for t in axes.texts]
        stores = [t for t in texts if t.startswith("store at")]
        assert len(stores) == len(simulation.arrival(fault=fault).stores())
        shown.png()


# -- and for real ----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", simulation.FAULTS)
def test_real_processes_meet_exactly_if_they_do_on_paper(pool: WorkerPool, fault: str) -> None:
    made = simulation.faulty(2, 2, fault)
    patience = 15.0 if simulation.meeting(made).met else 1.0
    claim, ports = quiet_ports(4)
    with claim:
        found = pool.call(meet, (reachable(made, ports), patience), screen=NullScreen(), hang_after=None, timeout=40)
    met = [kind == "met" for kind, _, _ in found]
    assert met == [place.state == simulation.MEETS for place in simulation.meeting(made).places]


def test_looking_for_each_other_leaves_the_ranks_as_they_were(pool: WorkerPool) -> None:
    pool.push({"kept": 41})
    before = list(pool.call(environment))
    check.by_size(exercise("03", "by_size"))
    assert list(pool.call(environment)) == before
    assert list(pool.pull(["kept"])["kept"]) == [41] * 4
    assert check.by_size(solution("03", "by_size"))


def environment() -> dict[str, str]:
    import os

    volatile = ("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID")
    return {k: v for k, v in os.environ.items() if k not in volatile}


# -- the checks ------------------------------------------------------------------------------


def test_a_group_that_still_stands_is_told(pool: WorkerPool) -> None:
    pool.run_cell("import torch.distributed as dist\ndist.init_process_group()", screen=NullScreen())
    answer = check.by_rank(solution("03", "by_rank"))
    assert "an earlier cell left a process group" in answer.line
    pool.run_cell("dist.destroy_process_group()", screen=NullScreen())
    assert check.by_rank(solution("03", "by_rank"))
