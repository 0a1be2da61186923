"""Lines that not every tab has. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nbddp.capabilities.by_rank.panes import Line, Pane

MOST = 200  # lines that are listed


def differences(panes: Sequence[Pane]) -> list[tuple[str, list[Line]]]:
    """Of each pane its name and the lines that not all panes have, as often as it has them more often than all have."""
    counts = [Counter((line.kind, line.text) for line in _lines(pane)) for pane in panes]
    common = counts[0].copy()
    for count in counts[1:]:
        common &= count
    found, room = list[tuple[str, list[Line]]](), MOST
    for pane in panes:
        rows = _uncommon(pane, common)
        if len(rows) > room:
            rows = [*rows[:room], Line("note", f"… {len(rows) - room:,} more lines differ")]
        room = max(0, room - len(rows))
        found.append((pane.name, rows))
    return [(name, rows) for name, rows in found if rows]


def _lines(pane: Pane) -> list[Line]:
    return [part for part in pane.parts if isinstance(part, Line) and part.file is None]


def _uncommon(pane: Pane, common: Counter[tuple[str, str]]) -> list[Line]:
    left, rows = common.copy(), list[Line]()
    for line in _lines(pane):
        if left[line.kind, line.text] > 0:
            left[line.kind, line.text] -= 1
        else:
            rows.append(line)
    return rows
