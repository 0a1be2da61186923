"""By which interface hosts meet: the rules as a table, the connections with real sockets, sshds and namespaces."""

from __future__ import annotations

import selectors
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import nbddp
from nbddp.capabilities.hosts import pairwise_probe
from nbddp.capabilities.hosts.on_agent import Listeners
from nbddp.capabilities.hosts.reachability import ANOTHER, SILENCE, Endpoint, chosen, home_words, offers, why_not
from nbddp.errors import PoolError
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests import places
from tests.hosts.cabled_hosts import CABLE, NET, cabled_hosts
from tests.hosts.cabled_hosts import why_not as no_cables
from tests.hosts.ssh_hosts import HERE, MISSING, Hosts, ssh_hosts

ROOT = places.ROOT
NO_CABLES = no_cables()
SLOW, FAST, LOOP = "eth0", "ib0", "lo"


# -- the rules ----------------------------------------------------------------------------------------


def host(i: int, *interfaces: str) -> list[Endpoint]:
    made = {
        SLOW: Endpoint(SLOW, f"10.0.0.{i}", 1000), FAST: Endpoint(FAST, f"10.1.0.{i}", 100_000),
        LOOP: Endpoint(LOOP, "127.0.0.1", loopback=True), "ens5": Endpoint("ens5", f"10.0.0.{i}", 10_000),
    }  # fmt: skip
    return [made[name] for name in interfaces]


def everywhere(
    *hosts: Sequence[Endpoint], but: dict[tuple[int, int, str], str] | None = None
) -> dict[tuple[int, int, str], str]:
    found = {
        (who, whom, offer.address): "Connection refused" if offer.loopback else ""
        for whom, own in enumerate(hosts) for who in range(len(hosts)) for offer in own if who != whom
    }  # fmt: skip
    return found | (but or {})


@pytest.mark.parametrize(
    ("hosts", "lost", "taken"),
    [
        ([host(1, SLOW, LOOP), host(2, SLOW, LOOP)], {}, [SLOW, SLOW]),
        ([host(1, FAST, SLOW), host(2, FAST, SLOW)], {}, [FAST, FAST]),
        ([host(1, FAST, SLOW), host(2, FAST, SLOW)], {(0, 1, "10.1.0.2"): SILENCE}, [SLOW, SLOW]),
        ([host(1, FAST, SLOW), host(2, SLOW)], {}, [SLOW, SLOW]),
        ([host(1, SLOW), host(2, "ens5")], {}, [SLOW, "ens5"]),
        ([host(1, SLOW), host(2, SLOW)], {(1, 0, "10.0.0.1"): SILENCE}, None),
        ([host(1, LOOP), host(2, LOOP)], {}, None),
        ([host(1, SLOW), host(2, SLOW), host(3, SLOW)], {(2, 1, "10.0.0.2"): SILENCE}, None),
        ([host(1, SLOW)], {}, [SLOW]),
        ([host(1, SLOW), []], {}, None),
    ],
)
def test_the_interface_that_joins_all_is_taken(
    hosts: list[list[Endpoint]], lost: dict[tuple[int, int, str], str], taken: list[str] | None
) -> None:
    found = chosen(hosts, everywhere(*hosts, but=lost))
    assert (None if found is None else [o.interface for o in found]) == taken


@pytest.mark.parametrize(
    ("why", "advice"),
    [
        (SILENCE, "a firewall drops the connection. Allow TCP connections between these hosts on all ports"),
        ("Connection refused", "a firewall rejects the connection"),
        (ANOTHER, "two machines have this address"),
        ("No route to host", "there is no route between these addresses"),
    ],
)
def test_the_pair_and_the_address_are_named(why: str, advice: str) -> None:
    hosts = [host(1, SLOW), host(2, SLOW)]
    said = why_not(["nodea", "nodeb"], hosts, everywhere(*hosts, but={(0, 1, "10.0.0.2"): why}))
    assert said.startswith(f"nodea cannot reach nodeb at 10.0.0.2 (eth0): {why}; {advice}"), said


def test_of_many_pairs_some_are_named() -> None:
    hosts = [host(i, SLOW) for i in range(4)]
    said = why_not([f"n{i}" for i in range(4)], hosts, {})
    assert said.count("cannot reach") == 3
    assert "and 9 more pairs" in said
    loops = [host(1, LOOP), host(2, LOOP)]
    assert "a loopback interface connects each host to itself" in why_not(["a", "b"], loops, everywhere(*loops))


def test_that_hosts_do_not_reach_the_notebook_is_said() -> None:
    said = home_words(["nodea", "nodeb"], [(host(9, SLOW)[0], ["", SILENCE]), (host(9, LOOP)[0], ["x", "y"])])
    assert said.startswith("nodeb (no answer) cannot reach this machine at 10.0.0.9 (eth0). Workers connect to")


def test_gloos_address_of_each_interface_is_offered() -> None:
    rows = [
        {"name": "lo", "speed": 0, "loopback": True, "addresses": ["127.0.0.1", "::1"]},
        {"name": "a", "speed": 10, "loopback": False, "addresses": ["fe80::1%a", "fd00::1", "10.0.0.1"]},
        {"name": "b", "speed": 100, "loopback": False, "addresses": ["fd00::2"]},
        {"name": "c", "speed": 0, "loopback": False, "addresses": ["fe80::2%c"]},
    ]
    assert [(o.interface, o.address) for o in offers(rows)] == [
        ("b", "fd00::2"),
        ("a", "10.0.0.1"),
        ("lo", "127.0.0.1"),
    ]


# -- the connections ----------------------------------------------------------------------------------


def test_doors_answer_and_what_answers_otherwise_is_told() -> None:
    selector = selectors.DefaultSelector()
    doors, found = Listeners(selector), list[list[str]]()
    (good, _), (other, _) = *doors.open([("127.0.0.1", 0)], "token"), *doors.open([("127.0.0.1", 0)], "else")
    assert doors.open([("192.0.2.77", 0)], "token")[0] == (0, "Cannot assign requested address")
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = [good, other, free.getsockname()[1], mute.getsockname()[1]]
        doors.knock([["127.0.0.1", port, "token"] for port in ports], 0.5, found.append)
        end = time.monotonic() + 10
        while not found:
            assert time.monotonic() < end
            for key, _ in selector.select(0.1):
                key.data()
            doors.look()
    assert found == [["", ANOTHER, "Connection refused", SILENCE]]
    doors.close()
    assert not selector.get_map()
    selector.close()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as made:
        yield made


def on(hosts: Hosts, setup: str = "", **more: object) -> WorkerPool:
    path = f"export PYTHONPATH={shlex.quote(str(ROOT))} NBDDP_RUNTIME_DIR={shlex.quote(str(hosts.folder))}; {setup}"
    asked: dict[str, object] = {"nproc": 1, "ssh_config": str(hosts.config), "setup": path, **more}
    return WorkerPool(hosts=",".join(hosts.names), python=sys.executable, **asked)  # type: ignore[arg-type]


SUM = (
    "import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nt = torch.ones(1)\n"
    "dist.all_reduce(t)\n[os.environ[n] for n in ('GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME', 'MASTER_ADDR')], t.item()"
)


@pytest.mark.skipif(not HERE, reason=MISSING)
@pytest.mark.more
def test_an_interface_that_a_host_lacks_is_refused_with_those_it_has(hosts: Hosts) -> None:
    pool = on(hosts, "export GLOO_SOCKET_IFNAME=ens99")
    with pytest.raises(
        nbddp.BadInput,
        match=r"GLOO_SOCKET_IFNAME=ens99 in its set-up: nodea has no interface ens99 .* it has .*lo \(127",
    ):
        pool.start()
    assert not pool.running
    pool.close()


@pytest.mark.more
@pytest.mark.skipif(bool(NO_CABLES), reason=NO_CABLES)
def test_the_cable_that_joins_the_hosts_is_found_where_the_kernels_way_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairwise_probe, "SECONDS", 0.5)
    with cabled_hosts(tmp_path) as hosts, on(hosts, "export NCCL_SOCKET_IFNAME==eth0") as pool:
        found = pool.run_cell(SUM, want_value=True, screen=NullScreen())
        assert list(found) == [([CABLE, "=eth0", f"{NET}.9.1"], 2.0)] * 2
        with pytest.raises(nbddp.BadInput, match="the pool's hosts are already connected; %ddp stop"):
            pool.ensure(LaunchSpec(interface="lo"))
        home, far = pool.group.nodes[0], pool.group.added
        blocked = rf"nodeb cannot reach nodea at {NET}.0.1 \(eth0\): no answer; .*; a firewall drops the connection"
        with pytest.raises(PoolError, match=blocked):
            pairwise_probe.find(home, far, "eth0")
        looped = r"nodeb cannot reach nodea at 127.0.0.1 \(lo\): Connection refused; .* connects each host to itself"
        with pytest.raises(PoolError, match=looped):
            pairwise_probe.find(home, far, "lo")
        for node in far:
            node.agent.hello.joining["GLOO_SOCKET_IFNAME"] = "eth0"
        with pytest.raises(PoolError, match=blocked):
            pairwise_probe.find(home, far, None)
        before = home.address
        pairwise_probe.find(home, far, CABLE)
        assert (home.address, [node.address for node in far]) == (before, [f"{NET}.9.1", f"{NET}.9.2"])
        probe = pairwise_probe.tried(home, far, [[], []], [Endpoint("lo", "127.0.0.1", loopback=True)])
        assert probe.home_offer() is None
        assert home_words(probe.names, probe.home).startswith(
            "nodea (Connection refused), nodeb (Connection refused) cannot reach this machine at 127.0.0.1 (lo). "
        )
        assert pool.group.alive, "it answers on"
        checkup = pool.checkup()
        assert checkup is not None
        assert checkup.tables()[1]["reached by"] == ["all", "all"], "by the cable"
