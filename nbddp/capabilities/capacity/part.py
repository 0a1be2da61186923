"""How many workers a machine can hold: a rule over the need of each and the free resources. The nodes' agents say what
is free (`on_agent`), and are asked before anything is started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp.agent.gather import ask_all
from nbddp.errors import BadInput, counted
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import Topology

if TYPE_CHECKING:
    from nbddp.pool.state import PoolState


@dataclass(frozen=True)
class Limit:
    """`what` there are only so many of: `each` worker takes about so much, and so much is `free` (bytes for memory)."""

    what: str
    each: int
    free: int

    def describe(self, workers: int) -> str:
        """`about 244 GiB of memory, but only 17 GiB of memory are free`."""
        return f"about {self._amount(workers * self.each)}, but only {self._amount(max(0, self.free))} are free"

    def _amount(self, number: int) -> str:
        if self.what != "memory":
            return f"{number} {self.what}"
        large = number >= 10 << 30
        return f"{number / (1 << 30 if large else 1 << 20):.0f} {'GiB' if large else 'MiB'} of memory"


MANY = 32  # workers per core: more are slow in all they do, and may seem not to answer


def crowded(workers: int, cores: int) -> str:
    """A note on many more workers than cores; empty for fewer."""
    if workers <= MANY * cores:
        return ""
    return (
        f"{workers} workers share {counted(cores, 'core')}, so that starts, steps and answers are slow; "
        f"--nproc {cores} gives each worker a core"
    )


def refuse_crowd(living: int, wanted: int, nnodes: int, limits: Sequence[Limit]) -> None:
    """Raise BadInput if the machine cannot hold the workers that are wanted beside those that live, with what to type.

    nnodes: among how many nodes, all on this machine, `wanted` is shared.
    """
    new = wanted - living
    tight = min(limits, key=lambda limit: limit.free // limit.each, default=None)
    if new <= 0 or tight is None or tight.free // tight.each >= new:
        return
    fits = (living + max(0, tight.free // tight.each)) // nnodes
    advice = f"use --nproc {fits}{' or fewer' * (fits > 1)}" if fits else "end other programs"
    raise BadInput(
        f"{counted(new, 'more worker' if living else 'worker')} would need {tight.describe(new)}; {advice}, "
        "or add --oversubscribe to start them anyway"
    )


class CapacityPart:
    def __init__(self, pool: PoolState):
        self._pool = pool

    def planned(self, spec: LaunchSpec, topology: Topology) -> list[str]:
        """What is to be said of machines that get many more workers than they have cores. Raises BadInput for one that
        cannot hold them: simulated nodes share this machine; other hosts have room of their own each. What the pool
        does not start is there already."""
        group = self._pool.group
        if spec.oversubscribe or topology.world_size <= len(group.workers) or not group.can_respawn:
            return []
        hosts, here = group.hosts, not group.added
        wanted = Counter(group.node_index(place) for place in topology.workers)
        for i, answer in enumerate(ask_all([node.agent for node in hosts], "limits")):
            limits = [Limit(**row) for row in answer["limits"]]
            try:
                refuse_crowd(len(hosts[i].workers), wanted[i], topology.nnodes if here else 1, limits)
            except BadInput as e:
                raise e if here else BadInput(f"{topology.nodes[i].host}: {e}") from None
        told = [(node.host(i), crowded(wanted[i], node.host(i).cores)) for i, node in enumerate(hosts)]
        return [words if here else f"{host.host}: {words}" for host, words in told if words]
