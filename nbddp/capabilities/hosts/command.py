"""`%ddp scale` and `%ddp sync`; `Pool.scale`, `Pool.sync` and `Pool.checkup`: the hosts of a pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nbddp.capabilities.hosts import reachability
from nbddp.capabilities.hosts.node import RemoteNode
from nbddp.capabilities.hosts.pairwise_probe import tried
from nbddp.capabilities.hosts.remote_client import RemoteAgentClient
from nbddp.capabilities.hosts.report import HostReport, HostsReport
from nbddp.errors import BadInput
from nbddp.launch.options import Parser, positive
from nbddp.launch.topology import counted
from nbddp.notebook.commands import Asked, CommandLine
from nbddp.pool.worker_group import WorkerGroup

if TYPE_CHECKING:
    from nbddp.capabilities.hosts.report import HostsReport
    from nbddp.pool.pool import WorkerPool


def scale(pool: WorkerPool, nodes: int, progress: Callable[[str], None] | None = None) -> list[str]:
    """Change the number of nodes of a pool that was started with `nnodes=(MIN, MAX)`.

    - nodes (int): the new number.
    - progress (function of str): called with a line on each step (default: none).

    Returns sentences that describe the changes. Raises PoolNotRunning, or BadInput for a pool with a fixed number of
    nodes, or a number outside its bounds.

    Example:

        with nbddp.Pool(nproc=1, nnodes=(1, 3)) as pool:
            pool.scale(2)
    """
    from nbddp.capabilities.hosts.remote_nodes import RemoteNodes, fixed

    pool.group.need_running()
    source = pool.group.source
    if not isinstance(source, RemoteNodes):
        raise fixed(nodes)
    return source.scale(nodes, progress or (lambda text: None))


def sync(pool: WorkerPool, progress: Callable[[str], None] | None = None) -> list[str]:
    """Copy this process's working directory to the pool's hosts. Workers that start from now on start in the copy.

    - progress (function of str): called with a line on each step (default: none).

    Returns sentences that describe the copies. Raises PoolNotRunning, or BadInput if the pool is on this machine or the
    folder is too large.

    Example:

        with nbddp.Pool(nproc=4, hosts="nodea,nodeb", sync=True) as pool:
            pool.sync()  # once files have changed
    """
    from nbddp.capabilities.hosts.remote_nodes import RemoteNodes

    if not pool.group.nodes:
        pool.group.need_running()
    source = pool.group.source
    if pool.group.sees_files or not isinstance(source, RemoteNodes):
        raise BadInput("the pool runs on this machine, and its workers see these files; --sync is for --hosts")
    return source.sync([node.agent for node in source.nodes], progress or (lambda text: None))


def checkup(pool: WorkerPool, progress: Callable[[str], None] = lambda text: None) -> HostsReport | None:
    """Check the pool's hosts. Returns None for a pool on this machine."""
    return examine(pool.group, progress)


def scale_arguments(parser: Parser) -> None:
    parser.add_argument("nodes", type=positive, metavar="NODES")


def scale_in_notebook(asked: Asked, line: CommandLine) -> None:
    with asked.progress() as progress:
        notes = scale(asked.pool, line.args["nodes"], progress)
    print(*notes, sep="\n")


def scale_in_terminal(line: CommandLine) -> None:
    """Ask the owner of a pool for more or fewer nodes, also while a cell runs."""
    nodes = line.args["nodes"]
    for agent in line.agents():
        bounds = agent.request("status")["info"].get("elastic")
        if not bounds:
            raise BadInput(f"pool {agent.pool_id} has a fixed number of nodes; start one with --nnodes 1:{nodes}")
        if not bounds[0] <= nodes <= bounds[1]:
            asked = f"--nnodes {bounds[0]}:{bounds[1]}"
            raise BadInput(f"pool {agent.pool_id} was started with {asked} and cannot have {counted(nodes, 'node')}")
        agent.request("scale", nodes=nodes)
        print(
            f"pool {agent.pool_id} will have {counted(nodes, 'node')}: a running cell restarts on them, otherwise the "
            "next cell starts there"
        )


def sync_in_notebook(asked: Asked, line: CommandLine) -> None:
    with asked.progress() as progress:
        lines = sync(asked.pool, progress)
    print("\n".join(lines))


# -- what hosts are asked for -----------------------------------------------------------------------

# Asks the hosts of a pool for the facts that `%ddp doctor` reports, all at once.

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
