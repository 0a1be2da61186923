"""What capabilities add to a node agent. It stays one thread and imports no torch for them, and needs none of them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbddp import capabilities
from nbddp.agent import client, server
from nbddp.agent.client import AgentClient
from nbddp.capabilities.hosts.reachability import SILENCE
from nbddp.errors import AgentFailed

ASKED: dict[str, dict[str, Any]] = {  # op → with which it is asked for
    "use": {"memory": [0]},
    "doors": {"addresses": ["127.0.0.1"], "towards": "127.0.0.1", "quiet": True, "token": "t"},
    "knock": {"doors": [["127.0.0.1", 9, "t"]], "seconds": 1.0},
    "close_doors": {},
    "scale": {"nodes": 1},
    "keep": {"seconds": 5.0, "inherited": {}},
    "limits": {},
    "hold": {"pid": 1, "streams": []},
    "written": {"run": 1, "ranks": [(0, {"stdout": 0})]},
}


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentClient]:
    """One that has not imported torch, so that it would be seen."""
    found = AgentClient.launch(os.environ, controls_only=True)
    found.wait_warm()
    yield found
    found.stop()


@pytest.mark.parametrize("op", [op for row in capabilities.ROWS for op in row.on_agent.ops])
def test_an_agent_does_what_a_row_adds_in_its_one_thread_and_without_torch(op: str, agent: AgentClient) -> None:
    with pytest.raises(AgentFailed, match="KeyError: 1") if op == "hold" else nullcontext():  # it has no such child
        assert "error" not in agent.request(op, **ASKED[op])
    assert psutil.Process(agent.hello.pid).num_threads() == 1
    if sys.platform.startswith("linux"):
        assert "libtorch" not in Path(f"/proc/{agent.hello.pid}/maps").read_text()


def test_what_has_begun_for_a_row_is_looked_at_each_second(agent: AgentClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        answer = agent.request("knock", doors=[["127.0.0.1", silent.getsockname()[1], "t"]], seconds=0.5)
    assert answer["found"] == [SILENCE]


def test_what_no_row_has_is_refused(agent: AgentClient) -> None:
    with pytest.raises(AgentFailed, match="KeyError: 'os:system'"):
        agent.request("os:system")
    with pytest.raises(AgentFailed, match="KeyError: 'os:system'"):
        agent.request("start", kind="os:system", log="", env={}, cwd="/", path=[])


def test_no_row_takes_the_place_of_what_an_agent_does_itself() -> None:
    own = {*server.NodeAgent.REQUESTS, *server.TARGETS}
    added = [row.on_agent for row in capabilities.ROWS]
    names = [name for row in added for name in (*row.ops, *row.starts)]
    assert sorted({*names} - own) == sorted(names)


def test_without_a_source_an_agent_is_launched_and_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "rows", tuple)
    assert client.ask(os.environ) is None
    agent = AgentClient.launch(os.environ, controls_only=True)
    agent.wait_warm()
    assert agent.why_not_kept() == "nothing here keeps a process"
    agent.keep(60)
    assert agent.request("status")["keep"] == 0
    agent.close()
    assert agent.process is not None
    assert agent.process.poll() == 0
