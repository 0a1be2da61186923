"""Lesson 14's figure: the loss scale of each rank as a line over the steps, and below who skipped which step."""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nbddp.figures.axes import sheet
from nbddp.figures.figure import described
from nbddp.figures.palette import FAINT, FILLS, FRAME, INK, MUTED, PAPER, TINTS
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l14_precision.simulation import ALONE, AVERAGED, RANKS, STEPS, WHERE, Scaled, scaled

WIDTH, LEFT, CELL, ROW = 6.5, 0.72, 0.24, 0.24  # inches: of the sheet, where the first step begins, of a step
TITLE, LINES, HEAD, LINE, FOOT = 0.3, 1.25, 0.24, 0.17, 0.1
APART = 0.022  # inches between lines that would cover each other
LETTERS = 108  # of a line of text below
KEY = "Coloured: step taken. inf: its own overflow. Dash: skipped because another rank found inf."


@described
def draw_loss_scale(chosen: Scaled) -> Figure:
    """Lines and grid; the words are those of the data."""
    below = textwrap.wrap(f"{KEY} {_sentence(chosen.verdict())}", LETTERS)
    grid = TITLE + LINES + HEAD
    height = grid + RANKS * ROW + FOOT + LINE * len(below)
    figure, axes = sheet(WIDTH, height)
    axes.text(0, TITLE / 2, chosen.head(), size=8.5, weight="bold", va="center", color=INK)
    _lines(axes, chosen)
    for number in range(1, STEPS + 1):
        x = LEFT + (number - 0.5) * CELL
        if number == 1 or number % 4 == 0:
            axes.text(x, grid - HEAD / 2, str(number), size=7.5, ha="center", va="center", color=MUTED)
    axes.text(LEFT - 0.1, grid - HEAD / 2, "step", size=7.5, ha="right", va="center", color=MUTED)
    for rank in range(RANKS):
        _row(axes, chosen, rank, grid + rank * ROW)
    for i, line in enumerate(below):
        axes.text(0, height + (i - len(below) + 0.5) * LINE, line, size=7.5, va="center", color=MUTED)
    return figure


def _lines(axes: Any, chosen: Scaled) -> None:
    """A line for each rank: the scale of every step, and the one after the last."""
    values = [scale for s in chosen.steps for scale in s.scales] + list(chosen.scales)
    low, high = min(values) - 1, max(values) + 1

    def height(scale: float) -> float:
        return TITLE + (high - scale) / (high - low) * LINES

    for scale in sorted({min(values), max(values)}):
        axes.plot([LEFT, LEFT + STEPS * CELL], [height(scale)] * 2, color=FAINT, lw=0.6, zorder=0)
        label = f"$2^{{{scale}}}$"
        axes.text(LEFT - 0.1, height(scale), label, size=8, ha="right", va="center", color=INK)
    for rank in range(RANKS):
        own = [s.scales[rank] for s in chosen.steps] + [chosen.scales[rank]]
        x = [LEFT + i * CELL for i in range(len(own) + 1)]
        y = [height(s) + (rank - 1.5) * APART for s in [*own, own[-1]]]
        axes.step(x[: len(own)], y[: len(own)], where="post", color=FILLS[rank], lw=1.3, solid_capstyle="butt")
    axes.text(0, TITLE, "loss scale", size=7.5, va="center", color=MUTED)


def _row(axes: Any, chosen: Scaled, rank: int, y: float) -> None:
    axes.text(LEFT - 0.1, y + ROW / 2, f"rank {rank}", size=8, ha="right", va="center", color=FILLS[rank])
    for i in range(STEPS):
        what = None
        if i < len(chosen.steps):
            what = chosen.steps[i].overflowed[rank], chosen.steps[i].skipped[rank]
        _cell(axes, LEFT + i * CELL, y, rank, what)


def _cell(axes: Any, x: float, y: float, rank: int, what: tuple[bool, bool] | None) -> None:
    """what: whether the rank's gradients overflowed, and whether it skipped the step; None: not taken yet."""
    gap = 0.015
    fill, text, ink = FRAME, "", INK
    if what == (False, False):
        fill = TINTS[rank]
    elif what is not None:
        fill, text, ink = (FILLS[rank], "inf", PAPER) if what[0] else (PAPER, "–", INK)
    edge = FILLS[rank] if what is not None else FRAME
    place, size = (x + gap, y + gap), (CELL - 2 * gap, ROW - 2 * gap)
    axes.add_patch(Rectangle(place, *size, facecolor=fill, edgecolor=edge, linewidth=0.6))
    axes.text(x + CELL / 2, y + ROW / 2, text, size=6.6, ha="center", va="center", color=ink)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


# -- the explorer ----------------------------------------------------------------------------------

loss_scale = Explorer(
    "Lesson 14: the loss scale of each rank, and who skips which step, by where ranks look for inf.",
    scaled,
    draw_loss_scale,
    Choice("where", "inf is looked for in", WHERE, at=(AVERAGED, ALONE)),
    Slider("first", "first scale, power of 2", 10, 20, at=(16, 18)),
    Slider("interval", "growth interval, steps", 2, 8, at=(4, 4)),
    Steps("step", "steps", 0, STEPS, at=(3, STEPS)),
    begins={"step": STEPS},
)
