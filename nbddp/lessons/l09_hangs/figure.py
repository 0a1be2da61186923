"""Lesson 09's figure: the calls of every rank, and who waits for whom."""

from __future__ import annotations

from math import cos, pi, sin
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

from nbddp.figures.axes import part
from nbddp.figures.figure import described
from nbddp.figures.palette import FILLS, FRAME, INK, MUTED, PAPER, TINTS
from nbddp.launch.topology import rank_words
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l09_hangs import simulation
from nbddp.lessons.l09_hangs.simulation import AHEAD, DONE, RUNS, WAITS, CallHistory, LoggedCall

NAME, CELL, ROW, HEAD = 0.62, 1.18, 0.46, 0.34  # inches
GRAPH, NODE = 2.3, 0.2  # inches: the side of the graph, the radius of a rank in it
MARKS = {DONE: "✓", RUNS: "still runs", AHEAD: ""}


@described
def draw_collectives(log: CallHistory) -> Figure:
    """The calls of every rank side by side, and beside them the graph of who waits for whom."""
    columns = 1 + max(len(some) for some in log.entries.values())
    table, rows = NAME + columns * CELL, len(log.entries) * ROW
    width, height = table + 0.3 + GRAPH, HEAD + max(rows, GRAPH)
    figure = Figure(figsize=(width, height))
    axes = part(figure, (0, 0, table / width, 1), table, height)
    axes.text(0, 0.12, "what every rank has called", size=8.5, weight="bold", va="center")
    for rank, some in log.entries.items():
        y = HEAD + rank * ROW
        axes.text(0, y + ROW / 2 - 0.03, f"rank {rank}", size=8.5, va="center")
        for i, e in enumerate(some):
            _entry(axes, e, NAME + i * CELL, y, log.waits.get(rank, ()))
        if rank in log.ended:
            axes.text(NAME + len(some) * CELL + 0.06, y + ROW / 2 - 0.03, "end", size=8, va="center", color=MUTED)
    graph = part(figure, (1 - GRAPH / width, 0, GRAPH / width, 1), GRAPH, height)
    _graph(graph, log)
    return figure


def _entry(axes: Any, e: LoggedCall, x: float, y: float, awaited: tuple[int, ...]) -> None:
    """One call: filled when it is done, in a dashed frame while its rank waits, faint before it."""
    fill = {DONE: FILLS[0], WAITS: PAPER, RUNS: TINTS[0], AHEAD: FRAME}[e.state]
    edge, style = (INK, (0, (3, 2))) if e.state == WAITS else (PAPER, "solid")
    ink = {DONE: PAPER, AHEAD: MUTED}.get(e.state, INK)
    axes.add_patch(
        Rectangle((x + 0.03, y), CELL - 0.06, ROW - 0.07, fc=fill, ec=edge, ls=style, lw=1.3 if e.state == WAITS else 0)
    )
    second = f"for {rank_words(awaited)}" if e.state == WAITS else MARKS[e.state]
    middle = x + CELL / 2
    axes.text(middle, y + (0.12 if second else 0.19), e.describe(), size=7, ha="center", va="center", color=ink)
    if second:
        axes.text(middle, y + 0.27, second, size=6.8, ha="center", va="center", color=ink)


def _graph(axes: Any, log: CallHistory) -> None:
    """Ranks on a circle, an arrow from each that waits to those it waits for."""
    axes.text(GRAPH / 2, 0.12, "who waits for whom", size=8.5, weight="bold", ha="center", va="center")
    ranks = list(log.entries)
    middle, radius = (GRAPH / 2, HEAD + GRAPH / 2 - 0.05), GRAPH / 2 - NODE - 0.14
    at = {
        r: (middle[0] + radius * sin(2 * pi * i / len(ranks)), middle[1] - radius * cos(2 * pi * i / len(ranks)))
        for i, r in enumerate(ranks)
    }
    for rank, others in log.waits.items():
        for other in others:
            mutual = rank in log.waits.get(other, ())
            axes.add_patch(FancyArrowPatch(
                at[rank], at[other], arrowstyle="-|>", mutation_scale=10, color=INK, lw=1.0,
                shrinkA=NODE * 72 + 1, shrinkB=NODE * 72 + 1, connectionstyle=f"arc3,rad={0.18 if mutual else 0}",
            ))  # fmt: skip
    for rank, place in at.items():
        _rank(axes, log, rank, place)


def _rank(axes: Any, log: CallHistory, rank: int, place: tuple[float, float]) -> None:
    """A rank of the graph: dashed while it waits, faint at its end, thick where it is in the deadlock."""
    waits, ended = rank in log.waits, rank in log.ended
    fill = PAPER if waits else FRAME if ended else TINTS[0]
    style = (0, (3, 2)) if waits else "solid"
    stuck = log.deadlock is not None and rank in log.deadlock.ranks
    axes.add_patch(Circle(place, NODE, fc=fill, ec=INK, ls=style, lw=1.8 if stuck else 0.8))
    axes.text(*place, "end" if ended else str(rank), size=7 if ended else 8.5, ha="center", va="center",
              color=MUTED if ended else INK)  # fmt: skip
    if ended:
        axes.text(place[0], place[1] + NODE + 0.08, f"rank {rank}", size=6.8, ha="center", va="center", color=MUTED)


# -- the explorer ----------------------------------------------------------------------------------

collectives = Explorer(
    "Lesson 09: the calls of every rank of a small program after some moves, and who waits for whom.",
    simulation.log,
    draw_collectives,
    Choice("program", "program", tuple(simulation.PROGRAMS), at=(simulation.ORDERED, simulation.UNEVEN)),
    Slider("ranks", "ranks", 2, 6, at=(4, 4)),
    Steps("moves", "moves", 0, simulation.MOST_MOVES, at=(2, 3), moves=lambda found: found.last),
)
