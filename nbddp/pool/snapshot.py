"""The state in which a stopped command has left the pool, as text. Pure: compares two snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbddp.launch.topology import rank_words

NEXT = "the next %ddp start or %%ddp cell"


@dataclass(frozen=True)
class PoolSnapshot:
    """What there is of a pool. workers: rank → pid of the living. group_broken: its process group is to be ended."""

    running: bool
    workers: Mapping[int, int]
    world_size: int
    group_broken: bool


def changed(before: PoolSnapshot, now: PoolSnapshot) -> str:
    """`the pool is unchanged`, or what is different: which ranks have lost their variables, and what comes next.

    Workers that were begun beyond the pool's size are none of its ranks: the next cell ends them, or takes them over.
    """
    if not now.running:
        return "the pool has stopped" if before.running else "there is no pool"
    if not now.world_size:
        return f"the pool is incomplete; {NEXT} completes it"
    lost = sorted(r for r, pid in before.workers.items() if now.workers.get(r) != pid)
    kept = sorted(set(before.workers) - set(lost))
    parts = []
    if lost:
        parts.append(f"variables on {rank_words(lost)} are lost")
    if lost and kept:
        parts.append(f"{rank_words(kept)} {'keep their' if len(kept) > 1 else 'keeps its'} variables")
    absent = sorted(set(range(now.world_size)) - set(now.workers))
    if absent:
        parts.append(f"{NEXT} restarts {rank_words(absent)}")
    if now.group_broken and not before.group_broken and not lost:
        parts.append("the process group is closed, and all variables are kept")
    return "; ".join(parts) or "the pool is unchanged"
