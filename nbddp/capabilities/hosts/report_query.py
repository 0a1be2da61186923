"""Asks the hosts of a pool for the facts that `%ddp doctor` reports, all at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from nbddp.capabilities.hosts import reachability
from nbddp.capabilities.hosts.node import RemoteNode
from nbddp.capabilities.hosts.pairwise_probe import tried
from nbddp.capabilities.hosts.remote_client import RemoteAgentClient
from nbddp.capabilities.hosts.report import HostReport, HostsReport
from nbddp.pool.worker_group import WorkerGroup

ASKED = 3  # times for the clock; the quickest answer counts
PATIENCE = 60.0


def examine(group: WorkerGroup, progress: Callable[[str], None]) -> HostsReport | None:
    """The pool's hosts; None where it is on this machine, or there is none."""
    hosts = group.added
    if not hosts or not group.running:
        return None
    progress(f"asking {', '.join(str(node.agent.host) for node in hosts)}")
    keys = [node.agent.post("facts") for node in hosts]
    clocks = [skew(node.agent) for node in hosts]
    home = group.nodes[0]
    every = [_with(reachability.offers(node.facts.interfaces), node) for node in hosts]
    probe = tried(home, hosts, every, [reachability.offer_at(home.address, home.facts.interfaces)])
    facts = [node.agent.take(key, PATIENCE)["facts"] for node, key in zip(hosts, keys, strict=True)]
    checked = {
        str(node.agent.host): HostReport(
            found, [device.get("name", "GPU") for device in node.facts.devices], node.facts.untold,
            reachability.offer_at(node.address, node.facts.interfaces), *clock,
        )
        for node, found, clock in zip(hosts, facts, clocks, strict=True)
    }  # fmt: skip
    (_, heard), *_ = probe.home
    return HostsReport(checked, probe.offered, probe.tried, dict(zip(checked, heard, strict=True)))


def _with(offers: Sequence[reachability.Endpoint], node: RemoteNode) -> list[reachability.Endpoint]:
    """The offers, and the address in use if it is none of them."""
    now = reachability.offer_at(node.address, node.facts.interfaces)
    return [*offers, *([now] if now not in offers else [])]


def skew(agent: RemoteAgentClient) -> tuple[float, float]:
    """How many seconds the host's clock is ahead of this machine's, and how far off that may be."""
    found = []
    for _ in range(ASKED):
        before = time.time()
        theirs = agent.request("clock")["now"]
        after = time.time()
        found.append((theirs - (before + after) / 2, (after - before) / 2))
    return min(found, key=lambda pair: pair[1])
