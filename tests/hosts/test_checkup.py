"""What `%ddp doctor` says of a pool's hosts: each rule by a table, and the facts from a real one."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator

import pytest

from nbddp.capabilities.hosts import facts
from nbddp.capabilities.hosts.reachability import SILENCE
from nbddp.capabilities.hosts.report import HostsReport
from nbddp.pool.pool import WorkerPool
from tests import places
from tests.hosts.ssh_hosts import HERE, MISSING, Hosts, ssh_hosts
from tests.unit.test_checkup import ETH, FACTS, IB, one

ROOT = places.ROOT


def test_hosts_that_differ_do_not_meet_or_could_meet_faster_are_named() -> None:
    hosts = {"nodea": one(gpus=("H100",)), "nodeb": one(versions={"torch": "2.8"})}
    tried = {(0, 1, "10.0.0.1"): SILENCE, (1, 0, "10.0.0.1"): ""}
    found = HostsReport(hosts, [[ETH], [ETH]], tried, {"nodea": "", "nodeb": SILENCE})
    said = found.findings()
    assert said[0] == "the hosts differ in torch: 2.9 on nodea; 2.8 on nodeb; install the same version on all"
    assert said[1].startswith("the hosts have different GPUs: 1 H100 on nodea; none on nodeb")
    assert said[2].startswith("nodea cannot reach nodeb at 10.0.0.1 (eth0): no answer; a firewall drops the connection")
    assert said[3].startswith("nodeb cannot reach the notebook's machine: no answer")
    assert found.tables()[1]["reached by"] == ["all", "not nodea"]
    both = {(i, 1 - i, o.address): "" for i in (0, 1) for o in (ETH, IB)}
    same = {"nodea": one(), "nodeb": one()}
    (faster,) = HostsReport(same, [[IB, ETH], [IB, ETH]], both).findings()
    assert faster.startswith(
        "ib0 also connects all hosts and is faster (100 Gbit/s, eth0 1 Gbit/s); %ddp stop, then start"
    )
    assert HostsReport(same, [[IB, ETH], [IB, ETH]], both | {(0, 1, IB.address): SILENCE}).findings() == []
    assert "2 hosts: nothing to improve" in repr(HostsReport(same))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.mark.more
@pytest.mark.skipif(not HERE, reason=MISSING)
def test_a_pool_on_hosts_is_asked(hosts: Hosts) -> None:
    path = f"export PYTHONPATH={shlex.quote(str(ROOT))} NBDDP_RUNTIME_DIR={hosts.folder}; ulimit -Sn 1000"
    with WorkerPool(nproc=1, hosts="nodea,nodeb", ssh_config=str(hosts.config), setup=path) as pool:
        began = time.monotonic()
        found = pool.checkup()
        assert time.monotonic() - began < 20
        assert found is not None
        versions, rest = found.tables()
        assert versions["torch"] == [nbddp_torch()] * 2
        assert rest["reached by"] == ["all", "all"]
        assert rest["nofile"] == ["1000", "1000"]
        assert all("allows 1000 (ulimit -n)" in " ".join(found.findings()) for _ in hosts.names)
        assert all(abs(h.skew) <= h.within + 0.05 for h in found.hosts.values()), "one machine has one clock"
        assert set(found.home.values()) == {""}
        assert [h.facts["limits"]["nofile"][0] for h in found.hosts.values()] == [1000, 1000]
        left = [p for node in pool.group.added for p in node.agent.far_home.glob("facts*")]
        assert left == []
    with WorkerPool(nproc=1) as here:
        assert here.checkup() is None


def nbddp_torch() -> str:
    from importlib import metadata

    return metadata.version("torch")


def test_the_facts_of_this_machine_can_be_had() -> None:
    found = facts.facts()
    assert set(found) == set(FACTS)
    assert found["limits"]["nofile"][0] > 0
    assert found["root"] == (os.geteuid() == 0)
    assert facts.named("no-such-host.invalid") == []
