"""Which modules of the user's own are not what their files are now, as a note below a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from nbddp.protocol.outcome import Outcome


class StaleModulesPart:
    """In the notebook: says what the ranks have found (`on_rank`)."""

    def __init__(self, pool: Any):
        pass

    def remarks(self, run: Any, said: Sequence[Outcome]) -> list[str]:
        found = {module for outcome in said for module in map(tuple, outcome.parts.get("stale_modules", ()))}
        return [note] if (note := modules_note(found)) else []


def modules_note(found: Collection[tuple[str, str]]) -> str:
    """Which modules are not what their files are now; empty if all are."""
    changed, moved = (sorted(name for name, how in found if how == kind) for kind in ("changed", "moved"))
    parts = [f"{', '.join(changed)} changed on disk"] * bool(changed)
    parts += [f"{', '.join(moved)} would now be imported from another folder"] * bool(moved)
    if not parts:
        return ""
    it = "it" if len(found) == 1 else "them"
    anew = f"reload {it} with importlib.reload in a %%ddp cell, or with --fresh"
    return f"{' and '.join(parts)} since the ranks imported {it}; {anew}"
