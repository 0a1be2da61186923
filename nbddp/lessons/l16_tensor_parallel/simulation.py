"""Lesson 16's explorer: ranks on a mesh of data × tensor, and which links the groups of each side use.

Rank r is at (r // inner, r % inner), where `inner` is the side whose ranks follow one another. Ranks are placed on
nodes in order. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from nbddp.errors import BadInput
from nbddp.launch.topology import counted

TENSOR, DATA = "tensor", "data"
WITHIN, BETWEEN, NONE = "within a node", "between nodes", "no exchange"
SHARDS = "ABCDEFGH"


@dataclass(frozen=True)
class Mesh:
    """nodes × gpus ranks; tensor: ranks that share a layer; inner: TENSOR or DATA, whose ranks follow one another."""

    nodes: int
    gpus: int
    tensor: int
    inner: str = TENSOR

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    @property
    def data(self) -> int:
        return self.ranks // self.tensor

    def place(self, rank: int) -> tuple[int, int]:
        """(data, tensor) coordinates."""
        if self.inner == TENSOR:
            return divmod(rank, self.tensor)
        return rank % self.data, rank // self.data

    def group(self, rank: int, side: str) -> list[int]:
        """The ranks that exchange with `rank` along a side, itself included: those with the same other coordinate."""
        same = 0 if side == TENSOR else 1
        return [r for r in range(self.ranks) if self.place(r)[same] == self.place(rank)[same]]

    def groups(self, side: str) -> list[list[int]]:
        """All groups of a side, by their first rank."""
        return [g for r in range(self.ranks) if (g := self.group(r, side))[0] == r]

    def link(self, side: str) -> str:
        """Which links the groups of a side use."""
        some = self.groups(side)[0]
        if len(some) == 1:
            return NONE
        crosses = any(r // self.gpus != group[0] // self.gpus for group in self.groups(side) for r in group)
        return BETWEEN if crosses else WITHIN

    def head(self) -> str:
        shape = f"mesh {self.data} × {self.tensor}: data × tensor"
        return (
            f"{shape}, on {counted(self.nodes, 'node')} of {counted(self.gpus, 'GPU')}; {self.inner} ranks side by side"
        )

    def lines(self) -> list[str]:
        """A line per side: its groups, what they exchange, and over which links."""
        told = {
            TENSOR: ("same samples, other shards", "activations, in every layer"),
            DATA: ("same shard, other samples", "gradients, once per step"),
        }
        found = []
        for side, (what, moves) in told.items():
            groups = [_listed(g) for g in self.groups(side)]
            shown = " · ".join(groups[:4]) + (" · …" if len(groups) > 4 else "")
            found.append(f"{side} groups ({what}): {shown}: {moves}: {self.link(side)}")
        return found

    def verdict(self) -> str:
        if self.link(TENSOR) == BETWEEN:
            return "activations wait for the slow links: use fewer tensor ranks, or place them side by side"
        if self.tensor == 1:
            return "no tensor parallelism: plain data parallelism"
        return "activations stay on the fast links"

    def describe(self) -> str:
        rows = [f"rank {r} (data {d}, tensor {t}): samples {d}, shard {SHARDS[t]}" for r, (d, t) in self._places()]
        return "\n".join([self.head(), *self.lines(), *rows, self.verdict()])

    def _places(self) -> list[tuple[int, tuple[int, int]]]:
        return [(r, self.place(r)) for r in range(self.ranks)]


def _listed(group: list[int]) -> str:
    """`0, 2`, `0–7`, `0, 4, …, 28`."""
    if len(group) <= 4:
        return ", ".join(map(str, group))
    if group[1] == group[0] + 1:
        return f"{group[0]}–{group[-1]}"
    return f"{group[0]}, {group[1]}, …, {group[-1]}"


def build_mesh(nodes: int = 2, gpus: int = 2, tensor: int = 1, inner: str = TENSOR) -> Mesh:
    """Raises BadInput where the ranks do not divide into groups of `tensor`."""
    if nodes * gpus % tensor:
        raise BadInput(f"{nodes * gpus} ranks cannot be divided into groups of {tensor}")
    return Mesh(nodes, gpus, tensor, inner)
