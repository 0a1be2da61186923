"""Lesson 01's figure: a lane per rank over time, and beside it the lines as a terminal shows them."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nbddp.figures.axes import sheet
from nbddp.figures.figure import described
from nbddp.figures.palette import FILLS, FRAME, INK, MUTED, PAPER
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l01_one_program.simulation import AFTER, NOBODY, Printing, printing

LANE, HEAD, FOOT = 0.46, 0.6, 0.3  # inches
LEFT, UNIT, TERMINAL = 0.75, 1.35, 1.7  # of the lanes; of one unit of time; width of the terminal
ROW = 0.185


@described
def prints(made: Printing) -> Figure:
    """The lanes and the terminal; the words are the printing's."""
    end = max(line.at for line in made.lines) + 0.45
    right = LEFT + end * UNIT
    width = right + 0.3 + TERMINAL
    height = HEAD + max(made.ranks * LANE + FOOT, len(made.lines) * ROW + 0.34)
    figure, axes = sheet(width, height)
    axes.text(0.03, 0.17, made.heading(), size=10.5, weight="bold", va="center", color=INK)
    for rank in range(made.ranks):
        _lane(axes, made, rank, HEAD + rank * LANE)
    bottom = HEAD + made.ranks * LANE
    if made.barrier:
        x = LEFT + max(made.worked) * UNIT + 0.06
        axes.plot([x, x], [HEAD - 0.1, bottom], color=INK, lw=1.4, linestyle=(0, (4, 2)))
        axes.text(x, HEAD - 0.2, "barrier", size=7.5, ha="center", va="center", color=INK)
    axes.annotate("", (right, bottom + 0.08), (LEFT, bottom + 0.08), arrowprops={"arrowstyle": "->", "color": MUTED})
    axes.text(right, bottom + 0.2, "time", size=7.5, ha="right", va="center", color=MUTED)
    _terminal(axes, made, right + 0.3)
    return figure


def _lane(axes: Any, made: Printing, rank: int, y: float) -> None:
    """One rank: its work as a bar, its waiting as a dashed line, its two prints as marks with their text."""
    fill, middle = FILLS[rank % len(FILLS)], y + LANE / 2
    first, last = (LEFT + line.at * UNIT for line in made.of(rank))
    worked = LEFT + made.worked[rank] * UNIT
    axes.text(LEFT - 0.17, middle, f"rank {rank}", size=8.5, weight="bold", ha="right", va="center", color=INK)
    axes.add_patch(Rectangle((first, y + 0.07), worked - first, LANE - 0.14, facecolor=fill, edgecolor=PAPER))
    axes.text((first + worked) / 2 + 0.1, middle, "works", size=7.5, ha="center", va="center", color=PAPER)
    if made.barrier:
        axes.plot([worked, last], [middle, middle], color=fill, lw=1.2, linestyle=(0, (2, 2)))
    axes.plot([first], [middle], marker=">", ms=6, color=PAPER, markeredgecolor=INK, zorder=3)
    axes.plot([last], [middle], marker="s", ms=6, color=PAPER, markeredgecolor=INK, zorder=3)
    axes.text(last + 0.1, middle, AFTER, size=7.5, va="center", color=INK)


def _terminal(axes: Any, made: Printing, x: float) -> None:
    top = HEAD - 0.1
    high = len(made.lines) * ROW + 0.34
    axes.add_patch(Rectangle((x, top), TERMINAL - 0.08, high, facecolor=FRAME, edgecolor=MUTED, linewidth=0.8))
    axes.text(x + 0.1, top + 0.14, "the terminal", size=7.5, va="center", color=MUTED)
    for i, line in enumerate(made.lines):
        mark = "s" if line.text == AFTER else ">"
        y = top + 0.34 + i * ROW
        axes.plot([x + 0.17], [y], marker=mark, ms=4.5, color=FILLS[line.rank % len(FILLS)])
        axes.text(
            x + 0.3, y, f"rank {line.rank}: {line.text}", size=7.5, va="center", color=INK, family="DejaVu Sans Mono"
        )


# -- the explorer ----------------------------------------------------------------------------------

order = Explorer(
    "Lesson 01: two prints on every rank, and the order in which a terminal may show them.",
    printing,
    prints,
    Slider("ranks", "ranks", 2, 4, at=(2, 4)),
    Choice("slow", "slow rank", (("none", NOBODY), ("0", 0), ("1", 1), ("2", 2), ("3", 3)), at=(NOBODY, 1)),
    Choice("barrier", "barrier after the work", (("no", False), ("yes", True)), at=(True, False)),
)
