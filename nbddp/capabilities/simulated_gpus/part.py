"""Simulated GPUs in one pool: its plan has them in place of the machines' own, and it says what they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nbddp.capabilities.simulated_gpus import probe
from nbddp.capabilities.simulated_gpus.cards import Card, cards_of, link_matrix, words
from nbddp.errors import BadInput
from nbddp.launch.machine import Device, Node
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import Topology, simulate

if TYPE_CHECKING:
    from nbddp.pool.state import PoolState

UNTOLD = "the GPUs are simulated: the CPU computes in their place, and times are not a GPU's"


class SimulatedGpusPart:
    """What `--simulate-gpus` has a pool do. `_told`: the cards of the line before, of which is not told again."""

    def __init__(self, pool: PoolState):
        self._pool = pool
        self._told: str | None = None

    def machines(self, spec: LaunchSpec, hosts: Sequence[Node], nnodes: int) -> Sequence[Node]:
        """The nodes with simulated GPUs in place of those that they have."""
        if not spec.simulate_gpus:
            return hosts
        cards = cards_of(str(spec.simulate_gpus))
        bare = [replace(host, devices=(), links=(), untold=()) for host in hosts]
        nodes = simulate(bare[0], nnodes) if len(bare) == 1 and nnodes > 1 else bare
        return [_with_cards(node, cards) for node in nodes]

    def planned(self, spec: LaunchSpec, topology: Topology) -> list[str]:
        """What they are, where the last line did not say so. Raises BadInput where they cannot be had."""
        before, self._told = self._told, spec.simulate_gpus if topology.simulates_gpus else None
        if not topology.simulates_gpus or before == spec.simulate_gpus:
            return []
        asked = f"--simulate-gpus {spec.simulate_gpus}"
        if not self._pool.group.can_respawn:
            raise BadInput(f"{asked} needs processes that nbddp starts, and a cluster has its own; leave out --cluster")
        if why := probe.unusable():
            raise BadInput(f"{asked}: {why}; leave it out to run on the CPU")
        return [words(cards_of(str(spec.simulate_gpus)))]

    def stopped(self) -> None:
        self._told = None

    def holds(self) -> list[str]:
        """What `status` says besides its table."""
        placed, spec = self._pool.group.topology, self._pool.spec
        if placed is None or not placed.simulates_gpus:
            return []
        each = " per node" * (placed.nnodes > 1)
        said = words(cards_of(str(spec.simulate_gpus)))
        return [said.replace(" (", f"{each} (", 1)]


def _with_cards(node: Node, cards: Sequence[Card]) -> Node:
    devices = tuple(
        Device(i, str(i), name=card.name, memory=card.memory, simulated=True) for i, card in enumerate(cards)
    )
    return replace(node, devices=devices, links=link_matrix(cards) if len(cards) > 1 else (), untold=(UNTOLD,))
