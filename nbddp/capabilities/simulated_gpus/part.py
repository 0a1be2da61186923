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
from nbddp.launch.topology import Topology

if TYPE_CHECKING:
    from nbddp.pool.state import PoolState

DRAWN_SO = ("topology",)  # their figures say it by themselves
FIGURE_NOTE = "Simulated GPUs: the CPU computes in their place, so the times are not a GPU's."
UNTOLD = "the GPUs are simulated: the CPU computes in their place, and times are not a GPU's"


class SimulatedGpusPart:
    """What `--simulate-gpus` has a pool do. `_told`: the cards of the line before, of which is not told again."""

    def __init__(self, pool: PoolState):
        self._pool = pool
        self._told: str | None = None

    def machines(self, spec: LaunchSpec, hosts: Sequence[Node]) -> Sequence[Node]:
        """The nodes with simulated GPUs in place of those that they have."""
        if not spec.simulate_gpus:
            return hosts
        cards = cards_of(str(spec.simulate_gpus))
        return [_with_cards(host, cards) for host in hosts]

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

    def figure_notes(self, name: str) -> str:
        """Under a figure of what was measured."""
        return "" if name in DRAWN_SO or not self._told else FIGURE_NOTE

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
