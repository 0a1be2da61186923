"""What `%ddp doctor` says of a pool's hosts: each rule by a table, and the facts from a real one."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nbddp
from nbddp.agent import facts
from nbddp.plan.checkup import Checked, Checkup
from nbddp.plan.versions import CUDA, DRIVER
from nbddp.plan.ways import SILENCE, Offer
from nbddp.trials.findings import Findings, Together
from tests.ssh_hosts import HERE, MISSING, Hosts, ssh_hosts

ROOT = Path(__file__).parent.parent
ETH, IB = Offer("eth0", "10.0.0.1", 1000), Offer("ib0", "10.1.0.1", 100_000)
VERSIONS = {"nbddp": "1", "Python": "3.12", "torch": "2.9", "ipyparallel": "9", CUDA: "12.8", DRIVER: "570.86.15"}
FACTS: dict[str, Any] = {
    "versions": VERSIONS, "shm": [8 << 30, 8 << 30], "infiniband": False, "name": "n1", "name_at": ["10.0.0.1"],
    "limits": {"nofile": [65536, 65536], "nproc": [-1, -1], "memlock": [8 << 20, 8 << 20]}, "root": False,
    "p2p": [], "p2p_untold": "",
}  # fmt: skip


def one(clock: tuple[float, float] = (0.0, 0.001), gpus: tuple[str, ...] = (), **changed: Any) -> Checked:
    limits = FACTS["limits"] | changed.pop("limits", {})
    versions = {k: v for k, v in (VERSIONS | changed.pop("versions", {})).items() if v}
    return Checked({**FACTS, "limits": limits, "versions": versions, **changed}, gpus, (), ETH, *clock)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (one(), []),
        (one(versions={CUDA: "", DRIVER: ""}), []),
        (one(versions={CUDA: ""}), ["nodea has NVIDIA's driver, but its torch was built without CUDA; install torch"]),
        (one(versions={DRIVER: "470.42"}), ["nodea's driver 470.42 is too old for torch's CUDA 12.8"]),
        (one(versions={CUDA: "11.8", DRIVER: "470.42"}), []),
        (one(gpus=("H", "H"), p2p=[[0, 1, "not supported"]]), ["nodea: GPUs 0 and 1 cannot read each other's"]),
        (one(p2p=[[0, i, "x"] for i in range(1, 7)]), ["nodea: GPUs 0 and 1", "nodea: GPUs 0 and 2", "nodea: GPUs 0",
                                                       "nodea: 3 more pairs of GPUs cannot either"]),
        (one(p2p_untold="Unknown Error"), ["nodea: NVML does not report which GPUs can read each other's"]),
        (one(shm=[64 << 20, 60 << 20]), ["nodea has 60 MiB of 64 MiB free in /dev/shm; data loaders"]),
        (one(shm=[8 << 30, 0]), ["nodea has 0 B of 8.0 GiB free in /dev/shm"]),
        (one(shm=None), []),
        (one(limits={"nofile": [1024, 1 << 20]}), ["nodea allows 1024 (ulimit -n); with fewer than 4096"]),
        (one(limits={"nofile": [1024, 1024]}), ["nodea allows 1024 (ulimit -n)"]),
        (one(limits={"nproc": [500, -1]}), ["nodea allows 500 (ulimit -u)"]),
        (one(limits={"nproc": [500, -1]}, root=True), []),
        (one(infiniband=True), ["nodea has InfiniBand but allows only 8 MiB of locked memory (ulimit -l)"]),
        (one(infiniband=True, limits={"memlock": [-1, -1]}), []),
        (one((3.2, 0.1)), ["nodea's clock is 3.2 s ahead of the notebook's machine"]),
        (one((-3.2, 0.1)), ["nodea's clock is 3.2 s behind the notebook's machine"]),
        (one((3.2, 3.0)), []),
        (one(name_at=["127.0.1.1"]), ["nodea: its own name n1 resolves to 127.0.1.1, which no other host can reach."]),
        (one(name_at=["127.0.1.1", "10.0.0.1"]), []),
        (one(name_at=[]), ["nodea: its own name n1 does not resolve there."]),
    ],
)  # fmt: skip
def test_each_fact_has_its_finding(host: Checked, words: list[str]) -> None:
    found = Checkup({"nodea": host}).findings()
    assert len(found) == len(words), found
    assert all(said.startswith(start) for said, start in zip(found, words, strict=True)), found


def test_a_limit_is_raised_by_whoever_may() -> None:
    (own,) = Checkup({"nodea": one(limits={"nofile": [1024, 1 << 20]})}).findings()
    assert own.endswith("--setup 'ulimit -n 4096'")
    (administrators,) = Checkup({"nodea": one(limits={"nofile": [1024, 1024]})}).findings()
    assert administrators.endswith("ask its administrator to raise nofile in limits.conf")


def test_hosts_that_differ_do_not_meet_or_could_meet_faster_are_named() -> None:
    hosts = {"nodea": one(gpus=("H100",)), "nodeb": one(versions={"torch": "2.8"})}
    tried = {(0, 1, "10.0.0.1"): SILENCE, (1, 0, "10.0.0.1"): ""}
    found = Checkup(hosts, [[ETH], [ETH]], tried, {"nodea": "", "nodeb": SILENCE})
    said = found.findings()
    assert said[0] == "the hosts differ in torch: 2.9 on nodea; 2.8 on nodeb; install the same version on all"
    assert said[1].startswith("the hosts have different GPUs: 1 H100 on nodea; none on nodeb")
    assert said[2].startswith("nodea cannot reach nodeb at 10.0.0.1 (eth0): no answer; a firewall drops the connection")
    assert said[3].startswith("nodeb cannot reach the notebook's machine: no answer")
    assert found.tables()[1]["reached by"] == ["all", "not nodea"]
    both = {(i, 1 - i, o.address): "" for i in (0, 1) for o in (ETH, IB)}
    same = {"nodea": one(), "nodeb": one()}
    (faster,) = Checkup(same, [[IB, ETH], [IB, ETH]], both).findings()
    assert faster.startswith(
        "ib0 also connects all hosts and is faster (100 Gbit/s, eth0 1 Gbit/s); %ddp stop, then start"
    )
    assert Checkup(same, [[IB, ETH], [IB, ETH]], both | {(0, 1, IB.address): SILENCE}).findings() == []
    assert "2 hosts: nothing to improve" in repr(Checkup(same))


def test_it_fits_a_screen_and_says_the_same_in_html() -> None:
    found = Checkup({"<a>": one(shm=None), "nodeb": one((3.2, 0.1), ("NVIDIA H100 80GB HBM3",) * 8)})
    assert max(len(line) for table in found.tables() for line in repr(table).splitlines()) <= 130
    shown = Together([found, Findings({"torch": "2"})])
    assert "&lt;a&gt;" in shown._repr_html_()
    assert "s clock is 3.2 s ahead" in shown._repr_html_()
    assert repr(shown).startswith(repr(found))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.mark.skipif(not HERE, reason=MISSING)
def test_a_pool_on_hosts_is_asked(hosts: Hosts) -> None:
    path = f"export PYTHONPATH={shlex.quote(str(ROOT))} NBDDP_RUNTIME_DIR={hosts.folder}; ulimit -Sn 1000"
    with nbddp.Pool(nproc=1, hosts="nodea,nodeb", ssh_config=str(hosts.config), setup=path) as pool:
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
        left = [p for node in pool.group.spread for p in node.agent.far_home.glob("facts*")]
        assert left == []
    with nbddp.Pool(nproc=1) as here:
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
