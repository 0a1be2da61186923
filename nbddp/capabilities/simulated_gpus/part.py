"""Simulated GPUs in one pool: they replace the machines' own GPUs in its plan, and are marked as simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nbddp.capabilities.simulated_gpus import probe
from nbddp.capabilities.simulated_gpus.cards import Card, cards_of, link_matrix, words
from nbddp.capabilities.simulated_gpus.options import NONE
from nbddp.compat.extra.versions import versions
from nbddp.errors import BadInput
from nbddp.launch.machine import Device, Node
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import Topology

if TYPE_CHECKING:
    from nbddp.pool.state import PoolState

COUNTED = "Simulated GPUs: memory is counted by the rules of torch's allocator; a GPU may take some MiB more or less."
HIDDEN = "--device cpu hides the simulated GPUs from every process"
TIMED = "Simulated GPUs: the CPU computes in their place, so the times are not a GPU's."
# command or option → what is said under its figure, where that is not TIMED
UNDER = {"topology": "", "memory": COUNTED, "compare": "Simulated GPUs: the CPU computes in their place."}
UNTOLD = "the GPUs are simulated: the CPU computes in their place, and times are not a GPU's"


class SimulatedGpusPart:
    """What `--simulate-gpus` has a pool do."""

    def __init__(self, pool: PoolState):
        self._pool = pool

    def machines(self, spec: LaunchSpec, hosts: Sequence[Node]) -> Sequence[Node]:
        """The nodes with simulated GPUs in place of those that they have."""
        if spec.simulate_gpus in (None, NONE):
            return hosts
        cards = cards_of(str(spec.simulate_gpus))
        return [_with_cards(host, cards) for host in hosts]

    def planned(self, spec: LaunchSpec, topology: Topology) -> list[str]:
        """What they are, where the pool does not have them yet. Raises BadInput where they cannot be had."""
        placed = self._pool.group.topology
        if spec.simulate_gpus in (None, NONE) or (
            # workers from which they are hidden have them too
            placed is not None
            and self._pool.spec.simulate_gpus == spec.simulate_gpus
            and placed.simulates_gpus == topology.simulates_gpus
        ):
            return []
        asked = f"--simulate-gpus {spec.simulate_gpus}"
        if not self._pool.group.can_respawn:
            raise BadInput(f"{asked} needs processes that nbddp starts, and a cluster has its own; remove --cluster")
        if why := probe.unusable():
            raise BadInput(f"{asked}: {why}; remove the option to run on the CPU")
        self._refuse_other_torch(asked)
        return [_words(spec, topology) if topology.simulates_gpus else HIDDEN]

    def _refuse_other_torch(self, asked: str) -> None:
        """Raises BadInput for a host with another torch than has been tried here."""
        for node in self._pool.group.added:
            if why := _other_torch(node.name, node.agent.hello.versions):
                raise BadInput(f"{asked}: {why}")

    def turned_away(self, there: Mapping[str, str]) -> str:
        """Why a host with these versions cannot join a pool that runs; or empty."""
        simulates = self._pool.spec.simulate_gpus not in (None, NONE)
        return _other_torch("it", there) if simulates else ""

    def _shows(self) -> bool:
        """Whether workers see simulated GPUs."""
        placed = self._pool.group.topology
        return placed is not None and placed.simulates_gpus

    def figure_notes(self, name: str) -> str:
        """Under a figure of what was measured."""
        return UNDER.get(name, TIMED) if self._shows() else ""

    def holds(self) -> list[str]:
        """The lines of `status` below its table."""
        return [_words(self._pool.spec, self._pool.group.placed())] if self._shows() else []


def _other_torch(who: str, there: Mapping[str, str]) -> str:
    """That a host has another torch than has been tried here; or empty."""
    here, other = versions().get("torch", ""), there.get("torch", "")
    if other == here:
        return ""
    return (
        f"this machine's torch {here} can simulate GPUs, but {who} has {other or 'none'}, which has not been tested; "
        f"install torch {here} there"
    )


def _words(spec: LaunchSpec, placed: Topology) -> str:
    """`4 simulated GPUs per node (T4, 16 GB; …)`."""
    said = words(cards_of(str(spec.simulate_gpus)))
    return said.replace(" (", " per node (", 1) if placed.nnodes > 1 else said


def _with_cards(node: Node, cards: Sequence[Card]) -> Node:
    devices = tuple(
        Device(i, str(i), name=card.name, memory=card.memory, uuid=f"node {node.index}, GPU {i}", simulated=True)
        for i, card in enumerate(cards)
    )
    return replace(node, devices=devices, links=link_matrix(cards) if len(cards) > 1 else (), untold=(UNTOLD,))
