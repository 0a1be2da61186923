"""Which cells make the names that a rank has lost with its process."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from nbddp.capabilities.export.names import bound
from nbddp.notebook.history import Ran


@dataclass(frozen=True)
class Made:
    """What cells have made on the ranks: names in the order in which they came, `In[n]` of the cells in the notebook's
    order."""

    names: tuple[str, ...]
    cells: tuple[int, ...]


def made(ran: Sequence[Ran]) -> Made:
    """By all of these cells and pushes. One that only prints has made nothing. One that failed counts if no other makes
    some name of it."""
    names: dict[str, None] = {}
    cells = []
    makes = [(one, set(one.pushed) if one.pushed is not None else _bound(one.body)) for one in ran]
    whole = set().union(*(mine for one, mine in makes if one.ok))
    for one, mine in makes:
        if mine and (one.ok or mine - whole):
            names |= dict.fromkeys(sorted(mine))
            cells.append(one.number)
    return Made(tuple(names), tuple(cells))


def _bound(body: str) -> set[str]:
    """Names that a cell sets, imports among them."""
    lines = ["" if line.startswith(("%", "!")) else line for line in body.splitlines()]
    try:
        nodes = ast.parse("\n".join(lines)).body
    except SyntaxError:  # IPython's own syntax within: that it ran is known, and no more
        return set()
    return bound(nodes)
