"""Lesson 14: clipping by a norm to which every number counts once, whichever rank holds it.

On meshes of replicas and shards. The right norm is that of the whole gradient, which is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose, isfinite, sqrt
from typing import Any

from nbddp.lessons.framework.answer import OK, Exercise, mismatch
from nbddp.lessons.framework.run_check import grouped, on_ranks, pool
from nbddp.lessons.l14_precision.on_rank import Clipped, clipped, end_groups, make_groups
from nbddp.lessons.l14_precision.plan import LIMITS, REPLICATED, SHARDED, layouts, shard
from nbddp.output.screens import NullScreen

CLOSE = 1e-4  # relative: torch adds 1e-6 to the norm
WHOLE = sum(x * x for values in SHARDED for x in values)  # squares of what is sharded
COPIED = sum(x * x for x in REPLICATED)
NORM = sqrt(WHOLE + COPIED)


@dataclass(frozen=True)
class MeshRank:
    """A rank on a mesh, and the squares of what it holds of the sharded gradients."""

    rank: int
    world: int
    shards: int

    @property
    def replicas(self) -> int:
        return self.world // self.shards

    def squares(self, index: int | None = None) -> float:
        own = self.rank % self.shards if index is None else index
        return sum(x * x for values in SHARDED for x in shard(values, self.shards, own))

    @property
    def each(self) -> list[float]:
        """The squares of all shards of a copy."""
        return [self.squares(i) for i in range(self.shards)]


NORMS: tuple[tuple[str, Callable[[MeshRank], float]], ...] = (
    ("that is the square of the norm: the root is missing", lambda p: WHOLE + COPIED),
    (
        "the replicated squares were added before the all_reduce, so they count once per shard: add them after it",
        lambda p: sqrt(WHOLE + p.shards * COPIED),
    ),
    (
        "the sum went over all ranks, so every shard counts once for each replica: all_reduce within shard_group",
        lambda p: sqrt(p.replicas * WHOLE + COPIED),
    ),
    (
        "everything was summed over all ranks, so replicas and replicated gradients count several times",
        lambda p: sqrt(p.replicas * WHOLE + p.world * COPIED),
    ),
    (
        "the root was taken before the sum: add squares over the ranks, and take the root of the whole",
        lambda p: sum(map(sqrt, p.each)) + sqrt(COPIED),
    ),
    (
        "the root was taken before the sum: add squares over the ranks, and take the root of the whole",
        lambda p: sum(sqrt(own + COPIED) for own in p.each),
    ),
    (
        "the root was taken before the sum: add squares over the ranks, and take the root of the whole",
        lambda p: sqrt(sum(map(sqrt, p.each)) ** 2 + COPIED),
    ),
    ("that is the norm of the sharded gradients; the replicated ones belong to it too", lambda p: sqrt(WHOLE)),
    ("that is the norm of the replicated gradients alone", lambda p: sqrt(COPIED)),
    ("that is the largest of the ranks' norms; the squares of all shards add up", lambda p: sqrt(max(p.each) + COPIED)),
    (
        "that is the norm of what this rank holds, so every rank would clip by another factor: all_reduce the squares",
        lambda p: sqrt(p.squares() + COPIED),
    ),
    ("that is the average of the ranks' squares; they add up", lambda p: sqrt(WHOLE / p.shards + COPIED)),
    ("norms of parts do not add up; their squares do", lambda p: sqrt(WHOLE) + sqrt(COPIED)),
)


def judge(mesh: tuple[int, int], limit: float, found: Mapping[int, Clipped]) -> str:
    """The line for what the ranks made of their gradients on one mesh, by rank."""
    replicas, shards = mesh
    untouched = all(f["returned"] is None and _factor(f, r, shards) == [1.0] * 3 for r, f in found.items())
    if untouched and all(f["returned"] is None for f in found.values()):
        return "clip_global_norm returned None and left all gradients: you have not written it yet"
    for rank, did in sorted(found.items()):
        line = _line(MeshRank(rank, replicas * shards, shards), limit, did)
        if line:
            return f"mesh of {replicas} × {shards}, rank {rank}, max_norm {limit:g}: {line}"
    return OK


def _line(place: MeshRank, limit: float, did: Clipped) -> str:
    if did["parameter"]:
        return "a parameter changed; only gradients are clipped"
    factors = _factor(did, place.rank, place.shards)
    if factors is None:
        return "a gradient is missing, or its elements were not all scaled by the same factor"
    norm, right = did["returned"], min(1.0, limit / NORM)
    if type(norm) not in (int, float) or not isfinite(norm):
        return f"return the norm before clipping, not {norm!r}"
    if not isclose(norm, NORM, rel_tol=CLOSE):
        known = (words for words, would in NORMS if isclose(norm, would(place), rel_tol=CLOSE))
        why = next(known, "")
        if not why and isclose(norm, min(NORM, limit), rel_tol=CLOSE):
            why = "that is the norm after clipping"
        return mismatch(f"a norm of {NORM:.3f}", f"{norm:.3f}", why)
    if all(isclose(f, right, rel_tol=CLOSE) for f in factors):
        return ""
    return f"the norm is right; {_scaled(factors, right, limit)}"


def _scaled(factors: Sequence[float], right: float, limit: float) -> str:
    *sharded, copied = factors
    if isclose(copied, right, rel_tol=CLOSE) or all(isclose(f, right, rel_tol=CLOSE) for f in sharded):
        which = "sharded" if isclose(copied, right, rel_tol=CLOSE) else "replicated"
        return f"not all {which} gradients were scaled by {right:.3f}"
    factor = factors[0]
    if isclose(factor, limit / NORM, rel_tol=CLOSE):
        return mismatch(
            "unchanged gradients",
            f"gradients × {factor:.3f}",
            "the norm is below max_norm, and clipping never increases a gradient",
        )
    if isclose(factor, 1.0, rel_tol=CLOSE):
        return mismatch(f"gradients × {right:.3f}", "unchanged gradients")
    return mismatch(f"gradients × {right:.3f}, max_norm / norm", f"gradients × {factor:.3f}")


def _factor(did: Clipped, rank: int, shards: int) -> list[float] | None:
    """By which factor the gradients of each parameter were scaled; None if one is gone or has no common factor. One
    without numbers counts as the others."""
    originals = [*(shard(values, shards, rank % shards) for values in SHARDED), list(REPLICATED)]
    found: list[float | None] = []
    for yours, original in zip(did["gradients"], originals, strict=True):
        if yours is None or len(yours) != len(original):
            return None
        ratios = [y / x for y, x in zip(yours, original, strict=True)]
        if any(not isclose(r, ratios[0], rel_tol=1e-9) for r in ratios):
            return None
        found.append(ratios[0] if ratios else None)
    return [f if f is not None else next(g for g in found if g is not None) for f in found]


def _judge(function: Any) -> str:
    """Every mesh with every limit, each in a run of its own; the first one shows what is printed."""
    with grouped():
        meshes = layouts(pool().world_size)
        try:
            on_ranks(make_groups, screen=NullScreen())
            for i, mesh in enumerate(meshes):
                for limit in LIMITS:
                    screen = NullScreen() if (i, limit) != (0, LIMITS[0]) else None
                    line = judge(mesh, limit, on_ranks(clipped, function, i, limit, screen=screen).by_rank())
                    if line != OK:
                        return line
        finally:
            on_ranks(end_groups, screen=NullScreen())
    return OK


clip_global_norm = Exercise(
    "clip_global_norm",
    _judge,
    verifies="the norm of the whole gradient on every mesh of replicas and shards, clipped and not",
)
