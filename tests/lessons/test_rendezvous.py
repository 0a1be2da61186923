"""Lesson 03: who finds whom on paper is who finds whom on real ranks, and every broken configuration is told why."""

from __future__ import annotations

import pytest

import nbddp
from nbddp.agent.controller import quiet_ports
from nbddp.lessons.framework.answer import Exercise
from nbddp.lessons.framework.on_rank import meet
from nbddp.lessons.l03_finding_each_other import simulation as finding_each_other_simulation
from nbddp.lessons.l03_finding_each_other.exercise import reachable
from nbddp.lessons.l03_finding_each_other.figure import arrivals
from nbddp.output.screens import NullScreen
from nbddp.teach import check, explore
from tests.lessons.answers import Mutant, defined, exercise, pool_of, solution

NPROC = 4  # of the module's pool

FOUR = ("by_address", "by_rank", "by_size", "by_host")


def test_three_of_four_wait_and_localhost_is_another_machine_on_the_second_node() -> None:
    """What the lesson's questions about the explorer say."""
    made = finding_each_other_simulation.arrival(arrived=3)
    assert [p.state for p in made.places] == [
        finding_each_other_simulation.HOSTS,
        finding_each_other_simulation.WAITS,
        finding_each_other_simulation.WAITS,
    ]
    local = finding_each_other_simulation.arrival(fault=finding_each_other_simulation.OWN)
    assert [p.state for p in local.places] == [
        finding_each_other_simulation.HOSTS,
        finding_each_other_simulation.WAITS,
        finding_each_other_simulation.SEEKS,
        finding_each_other_simulation.SEEKS,
    ]
    first, second = explore.arrived().settings
    assert finding_each_other_simulation.arrival(**first).met
    assert finding_each_other_simulation.arrival(**second) == local


def test_the_figure_has_a_place_for_every_rank() -> None:
    for fault in finding_each_other_simulation.FAULTS:
        shown = arrivals(finding_each_other_simulation.arrival(fault=fault))
        texts = [t.get_text() for axes in shown.figure.axes for t in axes.texts]
        stores = [t for t in texts if t.startswith("store at")]
        assert len(stores) == len(finding_each_other_simulation.arrival(fault=fault).stores())
        assert all(t.get_fontsize() >= 6.5 for axes in shown.figure.axes for t in axes.texts)
        shown.png()


# -- and for real ----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", finding_each_other_simulation.FAULTS)
def test_real_processes_meet_exactly_if_they_do_on_paper(pool: nbddp.Pool, fault: str) -> None:
    made = finding_each_other_simulation.faulty(2, 2, fault)
    patience = 15.0 if finding_each_other_simulation.meeting(made).met else 1.0
    claim, ports = quiet_ports(4)
    with claim:
        found = pool.call(meet, (reachable(made, ports), patience), screen=NullScreen(), hang_after=None, timeout=40)
    met = [kind == "met" for kind, _, _ in found]
    assert met == [
        place.state == finding_each_other_simulation.MEETS
        for place in finding_each_other_simulation.meeting(made).places
    ]


def test_looking_for_each_other_leaves_the_ranks_as_they_were(pool: nbddp.Pool) -> None:
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


def config(name: str, **parts: str) -> str:
    given = {"MASTER_ADDR": "'node0'", "MASTER_PORT": "29400", "WORLD_SIZE": "4", "RANK": "2 * node + local_rank"}
    rows = ", ".join(f"{k!r}: {v}" for k, v in {**given, **parts}.items() if v)
    return f"def {name}(node, local_rank):\n    return {{{rows}}}"


def wrong(name: str, says: str, **parts: str) -> Mutant:
    return Mutant(name, config("by_address", **parts), says)


WRONG = [
    wrong("localhost", "localhost means its own node, but rank 0 is on another", MASTER_ADDR="'localhost'"),
    wrong("127.0.0.1", "127.0.0.1 means its own node", MASTER_ADDR="'127.0.0.1'"),
    wrong("the other node", "finds no store: rank 0 hosts none at node1:29400", MASTER_ADDR="'node1'"),
    wrong("no such node", "looks for a host called node7; the nodes are node0 and node1", MASTER_ADDR="'node7'"),
    wrong("local ranks", "rank 0 on node1 has no place: rank 0 is taken by rank 0 on node0", RANK="local_rank"),
    wrong("all rank 0", "rank 0 on node0 has no place: rank 0 is taken", RANK="0"),
    wrong("from one", "no process has rank 0, which hosts the store", RANK="2 * node + local_rank + 1"),
    wrong("too many", "rank 0 on node0 waits for ranks 4–5, but only 4 processes are started", WORLD_SIZE="6"),
    wrong("each node by itself", "rank 2 on node1 has no place: with WORLD_SIZE 2 the last rank is 1", WORLD_SIZE="2"),
    wrong("sizes differ", "WORLD_SIZE must be the same on every process; here it is 4 and 5", WORLD_SIZE="4 + node"),
    wrong("ports differ", "rank 2 on node1 finds no store: rank 0 hosts none at", MASTER_PORT="29400 + node"),
    wrong(
        "everybody alone", "each process meets only itself; all 4 must meet in one group",
        RANK="0", WORLD_SIZE="1", MASTER_ADDR="f'node{node}'", MASTER_PORT="29400 + local_rank",
    ),
    wrong(
        "two groups", "each process meets only 2 of them; all 4 must meet in one group",
        RANK="local_rank", WORLD_SIZE="2", MASTER_ADDR="f'node{node}'",
    ),
    wrong("nothing said", "by_address(0, 0) does not set MASTER_PORT", MASTER_PORT=""),
    wrong("an empty one", "does not set MASTER_ADDR", MASTER_ADDR="''"),
    wrong("words", "by_address(0, 0) sets RANK to 'first'; it must be an integer", RANK="'first'"),
    wrong("no such port", "sets MASTER_PORT to 99999; ports are numbered from 1 to 65535", MASTER_PORT="99999"),
    wrong("port 0", "sets MASTER_PORT to 0; ports are numbered", MASTER_PORT="0"),
    wrong("below 0",
           "by_address(1, 0) sets RANK to -2; it must be an integer, 0 or greater", RANK="local_rank - 2 * node"),
    wrong("backwards",
           "; rank 0 runs on node1, and its store is at port 29400 there", RANK="3 - 2 * node - local_rank"),
    wrong("address and port", "looks for a host called node0:29400; the nodes are", MASTER_ADDR="'node0:29400'"),
    Mutant("one node", "def by_address(node, local_rank):\n    if node == 0: return {'MASTER_ADDR': 'node0', "
           "'MASTER_PORT': 29400, 'WORLD_SIZE': 4, 'RANK': local_rank}",
           "by_address(1, 0) is None; here the function ends without a value"),
    Mutant("a typing error", config("by_address").replace("MASTER_ADDR", "MASTER_ADRR"), "does not set MASTER_ADDR"),
    Mutant("small letters", config("by_address").replace("'RANK'", "'rank'"), "does not set RANK"),
    Mutant("the environment", "def by_address(node, local_rank):\n    import os\n    return os.environ",
           "by_address(0, 0) is os.environ; return a dict with MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE"),
    Mutant("unwritten", "def by_address(node, local_rank): ...", "still to be written"),
    Mutant("a list", "def by_address(node, local_rank): return [1]", "by_address(0, 0) is [1]; return a dict with"),
    Mutant("raises", "def by_address(node, local_rank): return 1 // node", "by_address(0, 0) raised ZeroDivisionError"),
]  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize("mutant", WRONG, ids=str)
def test_wrong_configurations_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.by_address)


@pytest.mark.parametrize("name", FOUR)
def test_each_shipped_configuration_is_broken_and_its_solution_meets(pool: nbddp.Pool, name: str) -> None:
    its: Exercise = getattr(check, name)
    assert not its(exercise("03", name)).ok
    assert its(solution("03", name))


def test_right_configurations_written_otherwise_meet(pool: nbddp.Pool) -> None:
    assert check.by_rank(defined(config("by_rank", RANK="local_rank * 2 + node", WORLD_SIZE="'4'"), "by_rank"))
    assert check.by_rank(defined(config("by_rank", RANK="[[0, 1], [2, 3]][node][local_rank]"), "by_rank"))
    assert check.by_rank(defined(config("by_rank", MASTER_ADDR="'Node0'"), "by_rank"))
    assert check.by_rank(defined(config("by_rank", MASTER_ADDR="'node1'", RANK="2 - 2 * node + local_rank"), "by_rank"))
    assert check.by_rank(defined(config("by_rank", MASTER_ADDR="['localhost', 'node0'][node]"), "by_rank"))


def test_a_group_that_still_stands_is_told(pool: nbddp.Pool) -> None:
    pool.run_cell("import torch.distributed as dist\ndist.init_process_group()", screen=NullScreen())
    answer = check.by_rank(solution("03", "by_rank"))
    assert "an earlier cell left a process group" in answer.line
    pool.run_cell("dist.destroy_process_group()", screen=NullScreen())
    assert check.by_rank(solution("03", "by_rank"))


def test_too_few_ranks_are_told_with_what_to_type() -> None:
    with pool_of(2):
        line = check.by_rank(solution("03", "by_rank")).line
    assert line == "this check needs 4 ranks and the pool has 2; %ddp start --nproc 4 makes them"
