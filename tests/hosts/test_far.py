"""The agent of another host, through a real ssh: it warms up, starts, tells of exits, and ends with its owner, also
where nothing tells it that this has gone."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbddp.agent import hardware
from nbddp.agent.process_id import ProcessId
from nbddp.capabilities.hosts import remote_agent, remote_client
from nbddp.capabilities.hosts.names import Host
from nbddp.capabilities.hosts.remote_agent import RemoteAgent
from nbddp.capabilities.hosts.remote_client import RemoteAgentClient
from nbddp.capabilities.hosts.transports import SshTransport
from nbddp.errors import AgentFailed
from tests import places
from tests.hosts.ssh_hosts import HERE, MISSING, Hosts, ssh_hosts
from tests.waiting import until

pytestmark = pytest.mark.skipif(not HERE, reason=MISSING)
ROOT = places.ROOT


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as made:
        yield made


def ssh_of(hosts: Hosts, *, setup: str = "") -> SshTransport:
    path = f"export PYTHONPATH={shlex.quote(str(ROOT))} NBDDP_RUNTIME_DIR={shlex.quote(str(hosts.folder))}"
    return SshTransport(str(hosts.config), sys.executable, f"{setup}\n{path}".strip())


@pytest.fixture
def far(hosts: Hosts, tmp_path: Path) -> Iterator[RemoteAgentClient]:
    noisy = "echo welcome; printf 'and no line end'"
    agent = RemoteAgentClient(Host("nodea"), ssh_of(hosts, setup=noisy), tmp_path / "nodea.log", {"HERE": "1"})
    yield agent
    agent.close()


def test_a_far_agent_warms_up_serves_and_ends_with_its_owner(far: RemoteAgentClient) -> None:
    warm = far.wait_warm()
    assert warm.cores >= 1
    assert not warm.missing
    assert far.far_home.is_dir(), "on this machine it can be seen"
    assert far.far_home.stat().st_mode & 0o777 == 0o700
    placed = far.request("put", name="../../keys.json", text="{}")["path"]
    assert Path(placed) == far.far_home / "keys.json"
    assert Path(placed).stat().st_mode & 0o777 == 0o600
    identity = ProcessId(far.hello.pid, far.hello.started)
    assert identity.alive()
    heard: list[dict[str, Any]] = []
    far.on_event(heard.append)
    store = far.request("store", timeout=60)
    assert store["port"]
    family = psutil.Process(identity.pid).children(recursive=True)
    assert family
    far.close()
    until(lambda: not identity.alive() and not any(p.is_running() for p in family))
    assert not far.far_home.exists()


def test_a_far_agent_that_is_killed_is_told(far: RemoteAgentClient) -> None:
    far.wait_until(lambda: far._hello is not None, 30)
    heard: list[dict[str, Any]] = []
    far.on_event(heard.append)
    os.kill(far.hello.pid, signal.SIGKILL)
    until(lambda: {"ev": "gone"} in heard, 5)
    assert not far.alive
    with pytest.raises(AgentFailed):
        far.request("status")


def test_a_far_agent_that_is_silent_counts_as_gone_and_is_named(
    far: RemoteAgentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_client, "SILENT", 3.0)
    far.wait_warm()
    identity = ProcessId(far.hello.pid, far.hello.started)
    os.kill(identity.pid, signal.SIGSTOP)

    def say_much() -> None:  # more than all that lies between takes: who says it waits
        with suppress(AgentFailed):
            far.tell("note", ranks=[], doing="x" * (16 << 20))

    threading.Thread(target=say_much, daemon=True).start()
    try:
        until(lambda: not far.alive, 12)
        assert far.last_words() == "nodea has been silent for 3 s"
    finally:
        os.kill(identity.pid, signal.SIGCONT)
    until(lambda: not identity.alive())


def test_what_is_still_connecting_is_not_waited_for(hosts: Hosts, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        host = Host("127.0.0.1", port=deaf.getsockname()[1])
        far = RemoteAgentClient(host, ssh_of(hosts), tmp_path / "deaf.log", {})
        with deaf.accept()[0]:
            began = time.monotonic()
            far.stop()
            assert time.monotonic() - began < 5


def test_a_host_whose_name_leads_nowhere_is_reached_at_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert any(remote_agent.reached_at() in one["addresses"] for one in hardware.interfaces())


@pytest.mark.more
def test_what_a_login_shell_has_left_running_may_print_at_any_time(hosts: Hosts, tmp_path: Path) -> None:
    """Its words are between the agent's, with and without the end of a line; they are noted, and nothing is lost."""
    noisy = "(while kill -0 $$; do echo 'you have mail'; printf 'and no line end'; sleep 0.1; done 2> /dev/null) &"
    log = tmp_path / "nodea.log"
    far = RemoteAgentClient(Host("nodea"), ssh_of(hosts, setup=noisy), log, {})
    far.wait_warm()
    assert all(far.request("limits")["limits"] for _ in range(20))
    until(lambda: "not a message: you have mail" in log.read_text())
    assert "not a message: and no line end" in log.read_text()
    far.close()


@pytest.mark.more
def test_an_owner_that_is_silent_is_given_up(hosts: Hosts, tmp_path: Path) -> None:
    class Mute(RemoteAgentClient):
        def _look_after(self) -> None:
            """As if the cable were cut on the way there."""

    ssh = ssh_of(hosts)
    command = [*ssh.command(Host("nodeb"))]
    command[-1] = command[-1].replace("nbddp.capabilities.hosts.remote_agent", "tests.pool.impatient")
    far = Mute(Host("nodeb"), ssh, tmp_path / "nodeb.log", {}, command)
    far.wait_warm()
    identity = ProcessId(far.hello.pid, far.hello.started)
    until(lambda: not identity.alive(), 15)
    assert not far.far_home.exists()
    far.close()


def test_an_owner_that_does_not_read_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As beyond a cut cable, once all that lies between is full: the agent is not held by what it has to say."""
    monkeypatch.setattr(remote_agent, "PATIENCE", 0.2)
    read, write = os.pipe()
    agent = RemoteAgent(tmp_path, read, write, {"cwd": ""})
    agent.tell(agent.owner, ev="much", words="x" * (1 << 20))
    assert not agent.running
    agent.selector.close()
    os.close(read)
    os.close(write)


def test_a_child_that_cannot_write_its_last_words_ends_all_the_same(tmp_path: Path) -> None:
    """It is a copy of the agent, and would go on as one."""
    code = (
        "import os, sys\nfrom nbddp.agent import children\n"
        "request = {'log': '/dev/full', 'env': dict(os.environ), 'cwd': '/', 'path': sys.path}\n"
        "try:\n    children.start('builtins:print', request, close=())\n"
        "except OSError:\n    pass\n"  # as the agent does with requests
        f"with open({str(tmp_path / 'continued')!r}, 'a') as file:\n    file.write('x')\n"
        "os.wait()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONUNBUFFERED": ""})
    assert (tmp_path / "continued").read_text() == "x"


def test_a_host_that_does_not_come_up_is_told_in_the_words_of_ssh(hosts: Hosts, tmp_path: Path) -> None:
    nowhere = RemoteAgentClient(Host("127.0.1.2", port=1), ssh_of(hosts), tmp_path / "nowhere.log", {})
    began = time.monotonic()
    with pytest.raises(AgentFailed, match=r"127.0.1.2:1 cannot be reached: .*Connection refused; check that sshd runs"):
        nowhere.wait_warm()
    nowhere.close()
    assert time.monotonic() - began < 10
    broken = RemoteAgentClient(
        Host("nodea"), SshTransport(str(hosts.config), sys.executable, "exit 3"), tmp_path / "b.log", {}
    )
    with pytest.raises(AgentFailed, match="the agent on nodea exited with code 3"):
        broken.wait_warm()
    broken.close()
