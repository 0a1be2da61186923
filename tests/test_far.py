"""The agent of another host, through a real ssh: it warms up, starts, tells of exits, and ends with its owner, also
where nothing tells it that this has gone."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbddp.agent.far import FarAgent
from nbddp.agent.identity import Identity
from nbddp.agent.reach import Ssh
from nbddp.errors import AgentFailed
from nbddp.plan.hosts import Host
from tests.ssh_hosts import HERE, MISSING, Hosts, ssh_hosts

pytestmark = pytest.mark.skipif(not HERE, reason=MISSING)
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as made:
        yield made


def ssh_of(hosts: Hosts, *, setup: str = "") -> Ssh:
    path = f"export PYTHONPATH={shlex.quote(str(ROOT))} NBDDP_RUNTIME_DIR={shlex.quote(str(hosts.folder))}"
    return Ssh(str(hosts.config), sys.executable, f"{setup}\n{path}".strip())


def until(done: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def far(hosts: Hosts, tmp_path: Path) -> Iterator[FarAgent]:
    noisy = "echo welcome; printf 'and no line end'"
    agent = FarAgent.by_ssh(Host("nodea"), ssh_of(hosts, setup=noisy), tmp_path / "nodea.log", {"HERE": "1"})
    yield agent
    agent.close()


def test_a_far_agent_warms_up_serves_and_ends_with_its_owner(far: FarAgent) -> None:
    warm = far.wait_warm()
    assert warm["cores"] >= 1
    assert not warm["missing"]
    assert far.far_home.is_dir(), "on this machine it can be seen"
    assert far.far_home.stat().st_mode & 0o777 == 0o700
    placed = far.request("put", name="../../keys.json", text="{}")["path"]
    assert Path(placed) == far.far_home / "keys.json"
    assert Path(placed).stat().st_mode & 0o777 == 0o600
    assert far.request("route", to="127.0.0.1")["address"] == "127.0.0.1"
    identity = Identity(far.hello["pid"], far.hello["started"])
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


def test_a_far_agent_that_is_killed_is_told(far: FarAgent) -> None:
    far.wait_warm()
    heard: list[dict[str, Any]] = []
    far.on_event(heard.append)
    os.kill(far.hello["pid"], signal.SIGKILL)
    until(lambda: {"ev": "gone"} in heard, 5)
    assert not far.alive
    with pytest.raises(AgentFailed):
        far.request("status")


def test_a_far_agent_that_is_silent_counts_as_gone_and_is_named(far: FarAgent) -> None:
    far.wait_warm()
    identity = Identity(far.hello["pid"], far.hello["started"])
    os.kill(identity.pid, signal.SIGSTOP)
    try:
        until(lambda: not far.alive, 12)
        assert far.last_words() == "nodea has been silent for 8 s"
    finally:
        os.kill(identity.pid, signal.SIGCONT)
    until(lambda: not identity.alive())


def test_an_owner_that_is_silent_is_given_up(hosts: Hosts, tmp_path: Path) -> None:
    class Mute(FarAgent):
        def _keep_alive(self) -> None:
            """As if the cable were cut on the way there."""

    ssh = ssh_of(hosts)
    command = [*ssh.command(Host("nodeb"))]
    command[-1] = command[-1].replace("nbddp.agent.reached", "tests.impatient")
    far = Mute(Host("nodeb"), command, tmp_path / "nodeb.log", {}, str(tmp_path), ssh)
    far.wait_warm()
    identity = Identity(far.hello["pid"], far.hello["started"])
    until(lambda: not identity.alive(), 15)
    assert not far.far_home.exists()
    far.close()


def test_a_host_that_does_not_come_up_is_told_in_the_words_of_ssh(hosts: Hosts, tmp_path: Path) -> None:
    nowhere = FarAgent.by_ssh(Host("127.0.1.2", port=1), ssh_of(hosts), tmp_path / "nowhere.log", {})
    began = time.monotonic()
    with pytest.raises(AgentFailed, match=r"127.0.1.2:1 cannot be reached: .*Connection refused; check that sshd runs"):
        nowhere.wait_warm()
    nowhere.close()
    assert time.monotonic() - began < 10
    broken = FarAgent.by_ssh(Host("nodea"), Ssh(str(hosts.config), sys.executable, "exit 3"), tmp_path / "b.log", {})
    with pytest.raises(AgentFailed, match="the agent on nodea ended with exit code 3"):
        broken.wait_warm()
    broken.close()
