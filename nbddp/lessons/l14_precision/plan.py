"""The inputs of lesson 14's checks: parameters, gradients, and which rank finds an inf in which step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

RATE, MOMENTUM = 0.25, 0.5  # of the SGD in `step_together`
ALL, FIRST, MIDDLE, LAST, NOBODY = "all", "first", "middle", "last", "nobody"
STEPS = (  # scale, who finds something, in which parameter, and what
    (1024.0, NOBODY, 0, 0.0),
    (1024.0, LAST, 1, float("inf")),
    (512.0, NOBODY, 0, 0.0),
    (512.0, FIRST, 0, float("nan")),
    (8.0, ALL, 0, float("inf")),
    (1.0, MIDDLE, 1, float("-inf")),
    (2.0, NOBODY, 0, 0.0),
)
SHARDED, REPLICATED = ((1.0, 1.5, -2.0, 2.0, 3.0, -4.0, 5.0), (-1.0, 6.0)), (2.0, -3.0, 0.5)
LIMITS = (1.0, 4.0, 100.0)  # max_norm; the last is above the norm


def finders(who: str, world: int) -> list[int]:
    """The ranks that find something."""
    return {ALL: list(range(world)), FIRST: [0], MIDDLE: [world // 2], LAST: [world - 1], NOBODY: []}[who]


def parameters_of(rank: int) -> tuple[list[float], list[float]]:
    """A rank's shards of two parameters."""
    return [1.0 + rank, 2.0, -3.0], [0.5, -0.25 * (rank + 1)]


def gradients_of(rank: int, step: int) -> tuple[list[float], list[float]]:
    """Their unscaled gradients in a step; none is 0."""
    return [1.0, -2.0 - rank, 3.0 + step], [-1.5 * (rank + 1), 2.0]


def layouts(world: int) -> list[tuple[int, int]]:
    """All meshes (replicas, shards) of so many ranks, those with both first."""
    found = [(world // shards, shards) for shards in range(1, world + 1) if world % shards == 0]
    return sorted(found, key=lambda mesh: (min(mesh) == 1, mesh))


def groups(world: int, shards: int) -> list[list[int]]:
    """The ranks that hold one copy together, for each copy."""
    return [list(range(first, first + shards)) for first in range(0, world, shards)]


def shard(values: Sequence[float], shards: int, index: int) -> list[float]:
    """The part of rank `index` of a group, as torch.tensor_split cuts; it may be empty."""
    each, more = divmod(len(values), shards)
    begin = index * each + min(index, more)
    return list(values[begin : begin + each + (index < more)])
