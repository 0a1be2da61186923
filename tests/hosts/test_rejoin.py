"""A connection to a host that is lost and made anew: with `--keep-alive` the workers there go on, names and all."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbddp
from nbddp.agent import runtime_dir
from nbddp.agent.process_id import ProcessId
from nbddp.capabilities.hosts.backlog import Backlog
from nbddp.capabilities.hosts.names import Host
from nbddp.capabilities.hosts.remote_client import RemoteAgentClient
from nbddp.capabilities.hosts.transports import TemplateTransport
from nbddp.errors import PoolNotRunning
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.codec import encode
from tests import places
from tests.hosts.ssh_hosts import HERE, MISSING, Hosts, ssh_hosts
from tests.waiting import until

ROOT = places.ROOT
real = pytest.mark.skipif(not HERE, reason=MISSING)
INIT = "import os, torch, torch.distributed as dist\nif not dist.is_initialized(): dist.init_process_group('gloo')\n"


def test_what_was_not_read_is_sent_again_and_taken_once() -> None:
    ours, theirs = Backlog(), Backlog()
    sent = [ours.number({"op": name}) for name in "abc"]
    assert [theirs.is_new(m) for m in sent[:2]] == [True, True]
    ours.read(theirs.got)
    assert [m["op"] for m in ours.rest()] == ["c"]
    assert [theirs.is_new(m) for m in sent] == [False, False, True]
    assert theirs.is_new({"ev": "ping"})


class Told(NullScreen):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as made:
        yield made


def on(hosts: Hosts, keep_alive: float) -> WorkerPool:
    setup = f"export PYTHONPATH={shlex.quote(str(ROOT))} NBDDP_RUNTIME_DIR={shlex.quote(str(hosts.folder))}"
    alive = keep_alive or None
    pool = WorkerPool(1, hosts="nodea,nodeb", ssh_config=str(hosts.config), setup=setup, keep_alive=alive)
    pool.start()
    return pool


def test_an_owner_that_comes_back_twice_is_served_on_its_last_connection(tmp_path: Path) -> None:
    """Beyond a cut cable the first one lives on for a while."""
    way = TemplateTransport(f"env PYTHONPATH={shlex.quote(str(ROOT))} AT={{host}} {{command}}", sys.executable)
    far = RemoteAgentClient(Host("here"), way, tmp_path / "here.log", {}, keep_alive=60)
    far.wait_warm()
    identity = ProcessId(far.hello.pid, far.hello.started)
    first, second = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    with first, second:
        for one in (first, second):
            one.settimeout(30)
            one.connect(str(runtime_dir.socket_of(far.far_home)))
            one.sendall(encode({"op": "own", "got": 0}))
            with one.makefile("rb") as lines:
                assert next(lines) == encode({"ev": "owned", "got": 0})
        while first.recv(65536):
            pass
        second.sendall(encode({"op": "clock", "id": 7}))
        with second.makefile("rb") as lines:
            assert any(b'"id":7' in line for line in lines)
        second.sendall(encode({"op": "stop"}))
        until(lambda: not identity.alive())
    far.stop()


@real
def test_a_cell_goes_on_while_ssh_is_lost_and_names_stay(hosts: Hosts) -> None:
    pool = on(hosts, 60)
    try:
        first, second = (node.agent for node in pool.group.added)
        pool.run_cell(f"{INIT}kept = 7", screen=NullScreen())
        told = Told()
        threading.Timer(0.5, lambda: [os.kill(a.process.pid, signal.SIGKILL) for a in (first, second)]).start()  # type: ignore[union-attr]
        code = "import time\nfor i in range(40): dist.barrier(); time.sleep(0.1)\nkept"
        assert list(pool.run_cell(code, want_value=True, screen=told)) == [7, 7]
        assert {line for line in told.said if "is unreachable" in line} == {
            f"{name} is unreachable (the connection was lost); nbddp keeps trying, and its workers keep running"
            for name in ("nodea", "nodeb")
        }
        until(lambda: first.away is None and second.away is None)
        assert list(pool.run_cell("kept + 1", want_value=True, screen=NullScreen())) == [8, 8]
        with pytest.raises(nbddp.WorkerFailed, match="rank 1 died: killed by SIGKILL"):
            pool.run_cell("import os\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)", screen=NullScreen())
        assert [note for note in pool.ensure(LaunchSpec()) if "is back" not in note] == ["rank 1 is new and empty"]
    finally:
        pool.stop()
    mine = [ProcessId(a.hello.pid, a.hello.started) for a in (first, second)]
    until(lambda: not any(identity.alive() for identity in mine))


@real
@pytest.mark.cuts
def test_a_rank_that_dies_while_its_host_is_away_is_told_afterwards(hosts: Hosts) -> None:
    """What the agent had to say meanwhile comes with the new connection."""
    pool = on(hosts, 60)
    try:
        agent = pool.group.added[1].agent
        far = pool.workers[1].pid

        def disturb() -> None:
            assert agent.process is not None
            os.kill(agent.process.pid, signal.SIGSTOP)  # nothing passes
            os.kill(far, signal.SIGKILL)
            time.sleep(0.3)
            os.kill(agent.process.pid, signal.SIGKILL)

        threading.Timer(0.3, disturb).start()
        with pytest.raises(nbddp.WorkerFailed, match="rank 1 died: killed by SIGKILL"):
            pool.run_cell("import time\ntime.sleep(30)", screen=NullScreen())
    finally:
        pool.stop()


@pytest.mark.cuts
@real
def test_a_host_that_does_not_come_back_is_given_up(hosts: Hosts) -> None:
    """Its agent ends by itself; a cell that is typed meanwhile waits for it."""
    pool = on(hosts, 4)
    agent = pool.group.added[1].agent
    agent.way.command = lambda host, module=(): ["sh", "-c", "exit 255"]  # type: ignore[method-assign]
    assert agent.process is not None
    os.kill(agent.process.pid, signal.SIGKILL)
    until(lambda: agent.away is not None)
    shown: list[str] = []
    with pytest.raises(
        PoolNotRunning, match=r"because nodeb is gone \(gave up on nodeb: it could not be reached for 4s"
    ):
        pool.ensure(LaunchSpec(), shown.append)
    assert shown[0].startswith("nodeb is unreachable; nbddp keeps trying for ")
    identity = ProcessId(agent.hello.pid, agent.hello.started)
    until(lambda: not identity.alive())
    pool.close()


@pytest.mark.cuts
@real
def test_an_agent_that_has_ended_meanwhile_is_told_at_once(hosts: Hosts) -> None:
    pool = on(hosts, 600)
    agent = pool.group.added[1].agent
    os.kill(agent.hello.pid, signal.SIGKILL)
    until(lambda: not agent.alive)
    with pytest.raises(PoolNotRunning, match="gave up on nodeb: its agent has exited meanwhile"):
        pool.ensure(LaunchSpec())
    pool.close()
