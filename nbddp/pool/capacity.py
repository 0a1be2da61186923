"""Whether the pool's machines can hold the workers of a plan: asked of their agents before anything is started."""

from __future__ import annotations

from collections import Counter

from nbddp.agent.gather import ask_all
from nbddp.errors import BadInput
from nbddp.launch.capacity import Limit, crowded, refuse_crowd
from nbddp.launch.topology import Topology
from nbddp.pool.worker_group import WorkerGroup


def noted(group: WorkerGroup, topology: Topology) -> list[str]:
    """What is said of machines that get many more workers than they have cores."""
    if topology.world_size <= len(group.workers) or not group.renews:
        return []
    wanted = Counter(group.seat(place) for place in topology.workers)
    told = [(node.host(i), crowded(wanted[i], node.host(i).cores)) for i, node in enumerate(group.hosts)]
    return [f"{host.host}: {words}" if group.added else words for host, words in told if words]


def refuse(group: WorkerGroup, topology: Topology) -> None:
    """Raises BadInput for a machine that cannot. Simulated nodes share this one; other hosts have room of their own
    each. What the pool does not start is there already."""
    if topology.world_size <= len(group.workers) or not group.renews:
        return
    hosts, here = group.hosts, not group.added
    wanted = Counter(group.seat(place) for place in topology.workers)
    for i, answer in enumerate(ask_all([node.agent for node in hosts], "limits")):
        limits = [Limit(**row) for row in answer["limits"]]
        try:
            refuse_crowd(len(hosts[i].workers), wanted[i], topology.nnodes if here else 1, limits)
        except BadInput as e:
            raise e if here else BadInput(f"{topology.nodes[i].host}: {e}") from None
