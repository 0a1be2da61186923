"""What a command that was stopped has left of the pool, in words. Pure: compares two answers of `Pool.footing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbddp.topology import counted, rank_words

NEXT = "the next %ddp start or %%ddp cell"


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """`the pool is as it was`, or what is different."""
    if not now["running"]:
        return "the pool has ended" if before["running"] else "there is no pool"
    if not before["workers"]:
        return f"the pool is not complete; {NEXT} starts what is missing"
    kept = sorted(r for r, pid in before["workers"].items() if now["workers"].get(r) == pid)
    gone = sorted(set(before["workers"]) - set(kept))
    new = sorted(set(now["workers"]) - set(kept))
    parts = []
    if gone:
        have = f"{rank_words(kept)} {'keep their' if len(kept) > 1 else 'keeps its'} names" if kept else ""
        parts += [f"names on {rank_words(gone)} are gone", *([have] if have else [])]
    if new or len(kept) < len(before["workers"]) or now["waiting"]:
        parts.append(f"{counted(len(now['workers']), 'worker')} started so far; {NEXT} completes the pool")
    if now["group_broken"] and not before["group_broken"] and not gone:
        parts.append("the process group has ended, all names are kept")
    return "; ".join(parts) or "the pool is as it was"
