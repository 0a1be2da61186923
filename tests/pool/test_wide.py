"""Many agents: all are asked at once, and waited for together. Torch is a stub there (`benchmarks/stub`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nbddp
from nbddp.agent.gather import AgentRequests, end_all
from nbddp.capabilities.hosts.names import Host
from nbddp.capabilities.hosts.node import RemoteNode
from nbddp.capabilities.hosts.remote_client import RemoteAgentClient
from nbddp.capabilities.hosts.transports import TemplateTransport
from nbddp.errors import AgentFailed, RankStatus
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen
from nbddp.pool.node import Posted
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.agent import StartWorker, Warm
from tests.benchmarks.wide import many

AGENTS, LATE = 5, 0.3  # late: seconds by which all that an agent says comes later
Said = list[tuple[str, str]]


@pytest.fixture(scope="module")
def said() -> Said:
    """Which agent was asked (`+op`) and waited for (`-op`), in order."""
    return []


@pytest.fixture(scope="module")
def begun() -> Said:
    """What was said when the pool started."""
    return []


@pytest.fixture(scope="module")
def pool(said: Said, begun: Said) -> Iterator[WorkerPool]:
    post, take, ops = RemoteAgentClient.post, RemoteAgentClient.take, {}

    def posting(agent: RemoteAgentClient, op: str, **fields: Any) -> int:
        key = post(agent, op, **fields)
        ops[agent, key] = op
        said.append((f"+{op}", agent.host.name))
        return key

    def taking(agent: RemoteAgentClient, key: int, timeout: float = 30.0) -> Any:
        said.append((f"-{ops[agent, key]}", agent.host.name))
        return take(agent, key, timeout)

    with pytest.MonkeyPatch.context() as patch, many(AGENTS, 1, LATE) as pool:
        patch.setattr(RemoteAgentClient, "post", posting)
        patch.setattr(RemoteAgentClient, "take", taking)
        pool.start()
        begun += said
        yield pool


def at_once(said: Said, op: str) -> bool:
    """Whether all agents were asked before one was waited for."""
    steps = [(step, host) for step, host in said if step[1:] == op]
    return {host for _, host in steps[:AGENTS]} == {f"node{i}" for i in range(AGENTS)} and all(
        step[0] == "+" for step, _ in steps[:AGENTS]
    )


def test_a_start_asks_all_agents_at_once(pool: WorkerPool, begun: Said) -> None:
    assert [op for op in ("limits", "put", "start") if not at_once(begun, op)] == []


def test_agents_that_answer_late_do_not_add_up(pool: WorkerPool) -> None:
    pool.run_cell("pass", screen=NullScreen())  # the first opens a way to the store
    for work in (pool.status, lambda: pool.run_cell("pass", screen=NullScreen())):
        began = time.monotonic()
        work()
        assert time.monotonic() - began < LATE * (AGENTS - 1)


def test_ranks_that_run_on_are_interrupted_at_once(pool: WorkerPool, said: Said) -> None:
    """Also where the command that starts agents runs here: no worker begins with Stop blocked."""
    said.clear()
    with pytest.raises(nbddp.WorkerFailed, match="rank 2 raised ZeroDivisionError") as caught:
        pool.run_cell("import os, time\nif os.environ['RANK'] == '2': 1 / 0\ntime.sleep(60)", screen=NullScreen())
    others = {s.status for s in caught.value.states if s.rank != 2}
    assert others == {RankStatus.INTERRUPTED}
    assert not [step for step, _ in said if step == "-signal"], "nobody waits for that"


def test_what_others_have_started_is_known_where_one_node_fails(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.ensure(LaunchSpec(nproc=1))
    lost, post = pool.group.added[1].agent, RemoteAgentClient.post

    def failing(agent: RemoteAgentClient, op: str, **fields: Any) -> int:
        if agent is lost and op == "start":
            raise AgentFailed("no room")
        return post(agent, op, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteAgentClient, "post", failing)
        with pytest.raises(AgentFailed, match="no room"):
            pool.restart()
    assert sorted(pool.workers) == [0, 2, 3, 4]
    assert pool.start() == ["pool grown from 4 to 5 workers; ranks 0, 2–4 keep their variables"]
    assert list(pool.run_cell("import os; int(os.environ['RANK'])", want_value=True, screen=NullScreen())) == [
        *range(5)
    ]


def test_each_host_needs_room_for_its_own_workers_alone(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    take, room = RemoteAgentClient.take, {"limits": [{"what": "memory", "each": 50 << 20, "free": 60 << 20}]}
    monkeypatch.setattr(RemoteAgentClient, "take", lambda *a: room if "limits" in (answer := take(*a)) else answer)
    with pytest.raises(nbddp.BadInput, match=r"node0: 2 more workers would need .*use --nproc 2 or fewer"):
        pool.ensure(LaunchSpec(nproc=3))
    pool.ensure(LaunchSpec(nproc=2))
    assert len(pool.workers) == 2 * AGENTS


def test_what_a_node_has_started_is_known_where_it_cannot_start_all(tmp_path: Path) -> None:
    class Answered(AgentRequests):
        def answers(self) -> list[Any]:
            return [{"pid": 1, "started": 0.0}, AgentFailed("no room")]

    agent = RemoteAgentClient(
        Host("h"), TemplateTransport("sleep {host} {command}"), tmp_path / "log", {}, ["sleep", "100"]
    )
    node = RemoteNode(agent, lambda rank, event: None, lambda event: None)
    starts = [StartWorker(r, f"{r}", {}, "", (), f"{r}.log", "", "") for r in range(2)]
    with pytest.raises(AgentFailed, match="no room"):
        node.take_starts(Posted(starts, {"0.log": 0, "1.log": 0}, Answered()), lambda started: None)
    end_all([agent], timeout=0.0)
    assert sorted(node.workers) == [0]


def test_agents_that_do_not_end_have_their_time_together(tmp_path: Path) -> None:
    way = TemplateTransport("sleep {host} {command}")
    agents = [RemoteAgentClient(Host(f"h{i}"), way, tmp_path / f"{i}.log", {}, ["sleep", "100"]) for i in range(4)]
    for agent in agents:
        agent.warm = Warm()  # one that is not has nothing to end, and is not waited for
    began = time.monotonic()
    end_all(agents, timeout=0.5)
    assert time.monotonic() - began < 1.5
    assert [agent.process.returncode for agent in agents if agent.process is not None] == [-9] * 4
