"""Lesson 02's explorer: a layout on paper, and the device of each rank that uses its global or local rank as index.
Pure: imports only `nbddp.launch.topology` and what that may."""

from __future__ import annotations

from dataclasses import dataclass

from nbddp.analysis.placement import describe, planned
from nbddp.errors import several
from nbddp.launch.topology import Topology, rank_words

LOCAL, GLOBAL = "local rank", "global rank"


@dataclass(frozen=True)
class TakenGpus:
    """What one rank takes. `gpus`: the device indices it asks for; `missing`: those its node does not have."""

    rank: int
    node: int
    gpus: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True)
class DeviceLayout:
    """A placement, and how its processes find their devices: `by` is LOCAL or GLOBAL."""

    placed: Topology
    by: str
    taken: tuple[TakenGpus, ...]

    @property
    def works(self) -> bool:
        """Whether every rank gets GPUs that are there."""
        return not any(t.missing for t in self.taken)

    def verdict(self) -> str:
        """Whether it works, and whose devices are not there, in a sentence."""
        rule = "cuda:" + ("LOCAL_RANK" if self.by == LOCAL else "RANK")
        if self.placed.gpus_per_proc > 1:
            rule += f" × {self.placed.gpus_per_proc}, …"
        if self.works:
            alone = "; on one node, rank and local rank are equal" if self.placed.nnodes == 1 else ""
            return f"{rule}: every rank finds its GPUs{alone}"
        lost = [t for t in self.taken if t.missing]
        have = len(self.placed.nodes[0].devices)
        first = lost[0]
        return (
            f"{rule}: {rank_words(t.rank for t in lost)} cannot start; rank {first.rank} asks for "
            f"{several('GPU', first.gpus)}, and node {first.node} has {several('GPU', range(have))}"
        )

    def describe(self) -> str:
        return f"{describe(self.placed)}\n{self.verdict()}"


def block(local_rank: int, gpus_per_proc: int) -> list[int]:
    """The consecutive device indices of one process on its node."""
    return list(range(local_rank * gpus_per_proc, (local_rank + 1) * gpus_per_proc))


def simulate_layout(nodes: int = 2, gpus: int = 4, per_process: int = 1, by: str = LOCAL) -> DeviceLayout:
    """`nodes` nodes with `gpus` GPUs each, processes of `per_process`. Raises BadInput where that cannot be."""
    placed = planned(nnodes=nodes, gpus_per_node=gpus, gpus_per_proc=per_process)
    taken = []
    for w in placed.workers:
        asked = tuple(block(w.rank if by == GLOBAL else w.local_rank, per_process))
        taken.append(TakenGpus(w.rank, w.node, asked, tuple(i for i in asked if i >= gpus)))
    return DeviceLayout(placed, by, tuple(taken))
