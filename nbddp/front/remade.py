"""Which cells make the names that a rank has lost with its process."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from nbddp.export.names import bound
from nbddp.front.exporting import Ran


@dataclass(frozen=True)
class Made:
    """What cells of a notebook have made on the ranks: names in the order in which they came, `In[n]` of the cells."""

    names: tuple[str, ...]
    cells: tuple[int, ...]


def made(ran: Sequence[Ran]) -> Made:
    """By all of these cells and pushes. One that only prints has made nothing."""
    names: dict[str, None] = {}
    cells = []
    for one in ran:
        mine = one.pushed if one.pushed is not None else _bound(one.body)
        if mine:
            names |= dict.fromkeys(mine)
            cells.append(one.number)
    return Made(tuple(names), tuple(cells))


def _bound(body: str) -> list[str]:
    """Names that a cell sets, imports among them."""
    lines = ["" if line.startswith(("%", "!")) else line for line in body.splitlines()]
    try:
        nodes = ast.parse("\n".join(lines)).body
    except SyntaxError:  # IPython's own syntax within: that it ran is known, and no more
        return []
    return sorted(bound(nodes))
