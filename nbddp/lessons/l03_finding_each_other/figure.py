"""Lesson 03's figure: processes on the left, the stores they look for on the right, with a place for each rank."""

from __future__ import annotations

from functools import partial
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from nbddp.figures.axes import sheet
from nbddp.figures.figure import described
from nbddp.figures.palette import FILLS, FRAME, INK, MUTED, PAPER
from nbddp.lessons.framework.explorer import Choice, Explorer, Steps
from nbddp.lessons.l03_finding_each_other.simulation import (
    FAULTS,
    MEETS,
    NOTHING,
    OWN,
    REFUSED,
    SEEKS,
    ProcessPlace,
    RendezvousState,
    arrival,
)

WIDE, ROW, HEAD = 7.6, 0.62, 0.42  # inches
BOX, STORE, STORE_AT = 1.35, 2.5, 5.0  # widths of a process and a store, and where the stores begin
PLACE, STORE_HEIGHT = 0.4, 1.0


@described
def arrivals(found: RendezvousState) -> Figure:
    """Who has arrived, who waits, and which store each looks at; the words are the meeting's."""
    stores = found.stores()
    height = HEAD + max(found.expected * ROW, len(stores) * (STORE_HEIGHT + 0.15)) + 0.1
    figure, axes = sheet(WIDE, height)
    head = found.verdict().split(": ")[0]
    axes.text(0.05, 0.17, head, size=10.5, weight="bold", va="center", color=INK)
    middles = {}
    free = height - HEAD - len(stores) * STORE_HEIGHT
    for i, at in enumerate(stores):
        top = HEAD + free / (len(stores) + 1) * (i + 1) + i * STORE_HEIGHT
        middles[at] = top + STORE_HEIGHT / 2
        _store(axes, at, top, [p for p in found.places if p.process.looks_at == at])
    for i in range(found.expected):
        y = HEAD + i * ROW
        if i < len(found.places):
            _process(axes, found.places[i], y, middles[found.places[i].process.looks_at])
        else:
            _box(axes, 0.05, y, BOX, ROW - 0.14, FRAME, MUTED, dashed=True)
            axes.text(0.05 + BOX / 2, y + 0.24, "not started", size=7.5, ha="center", va="center", color=MUTED)
    return figure


def _box(
    axes: Any, x: float, y: float, width: float, height: float, fill: str, edge: str, dashed: bool = False
) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=fill,
            edgecolor=edge,
            linewidth=0.9,
            linestyle=(0, (4, 2.5)) if dashed else "solid",
        )
    )


def _process(axes: Any, place: ProcessPlace, y: float, store: float) -> None:
    """One process, its state, and a line to the store that it looks at: broken where it gets nowhere."""
    p, middle = place.process, y + (ROW - 0.14) / 2
    fill = FILLS[p.node % len(FILLS)]
    _box(axes, 0.05, y, BOX, ROW - 0.14, fill, PAPER)
    write = partial(axes.text, 0.05 + BOX / 2, ha="center", va="center", color=PAPER)
    write(middle - 0.085, f"rank {p.rank}", size=8.5, weight="bold")
    write(middle + 0.1, f"node{p.node}, local rank {p.local_rank}", size=6.8)
    lost = place.state in (SEEKS, REFUSED)
    axes.text(BOX + 0.18, middle - 0.08, place.state, size=8, weight="bold", va="center", color=INK)
    axes.text(BOX + 0.18, middle + 0.09, place.why, size=7, va="center", color=MUTED)
    axes.plot(
        [3.65, STORE_AT - 0.06], [middle, store], color=fill, lw=1.3, linestyle=(0, (3, 2.5)) if lost else "solid"
    )


def _store(axes: Any, at: tuple[str, str], top: float, places: list[ProcessPlace]) -> None:
    """The store at one address, with a place per rank; dashed where nobody hosts it."""
    hosted = not all(p.state == SEEKS for p in places)
    _box(axes, STORE_AT, top, STORE, STORE_HEIGHT, FRAME, INK if hosted else MUTED, dashed=not hosted)
    title = f"store at {at[0]}:{at[1]}"
    axes.text(STORE_AT + 0.1, top + 0.17, title, size=8.5, weight="bold", va="center", color=INK)
    if not hosted:
        axes.text(STORE_AT + 0.1, top + 0.5, "no process hosts it", size=8, va="center", color=MUTED)
        return
    size = max(p.process.world_size for p in places)
    taken = {p.process.rank: p for p in places if p.state != REFUSED}
    axes.text(STORE_AT + 0.1, top + 0.36, _told(size, taken, places), size=7, va="center", color=MUTED)
    step = min(PLACE + 0.06, (STORE - 0.16) / size)
    for rank in range(size):
        x, there = STORE_AT + 0.1 + rank * step, rank in taken
        fill = FILLS[taken[rank].process.node % len(FILLS)] if there else PAPER
        _box(axes, x, top + 0.53, step - 0.06, 0.34, fill, PAPER if there else MUTED, dashed=not there)
        colour = PAPER if there else MUTED
        axes.text(x + (step - 0.06) / 2, top + 0.7, str(rank), size=8, ha="center", va="center", color=colour)


def _told(size: int, taken: dict[int, ProcessPlace], places: list[ProcessPlace]) -> str:
    if all(p.state == MEETS for p in places):
        return f"all {size} ranks are here"
    return f"{len(taken)} of {size} ranks are here"


# -- the explorer ----------------------------------------------------------------------------------

arrived = Explorer(
    "Lesson 03: four processes on two nodes look for each other; who has arrived, and who waits for whom.",
    arrival,
    arrivals,
    Steps("arrived", "processes started", 1, 4, at=(4, 4)),
    Choice("last_first", "who starts first", (("node 0", False), ("the last node", True)), at=(False, False)),
    Choice("fault", "mistake", FAULTS, at=(NOTHING, OWN)),
)
