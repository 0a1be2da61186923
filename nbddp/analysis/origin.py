"""Where a recording comes from, if that is not the last cell: what is shown must not pass for the last cell's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """cell: the n of the In[n] that recorded, None for a function that `Pool.call` ran. last: that of the last cell,
    which recorded nothing; None where this is not so."""

    cell: int | None
    last: int | None = None


def origin(run: int, cell: int | None, last: tuple[int, int] | None) -> Origin | None:
    """Where run number `run` of cell `cell` stands beside the last cell's (run, cell); None if it is that one."""
    if cell is None:
        return Origin(None)
    return None if last is None or last[0] == run else Origin(cell, last[1])


def whence(found: Origin | None) -> str:
    """` from In[3]`, to be put after what was recorded; nothing if it is the last cell's.

    Only a notebook numbers its cells; in a script all have the same number, which says nothing.
    """
    if found is None:
        return ""
    if found.cell is None:
        return " from a function that Pool.call ran"
    return " from an earlier cell" if found.cell == found.last else f" from In[{found.cell}]"


def none_since(found: Origin | None) -> str:
    """`the last cell, In[5], recorded none`; empty where that is not so."""
    if found is None or found.last is None:
        return ""
    named = "the last cell" if found.last == found.cell else f"the last cell, In[{found.last}],"
    return f"{named} recorded none"


def recorded_from(what: str, found: Origin | None) -> str:
    """`step 3 of Net from In[3]; the last cell, In[5], recorded none`; `what` alone if it is the last cell's."""
    since = none_since(found)
    return f"{what}{whence(found)}" + (f"; {since}" if since else "")
