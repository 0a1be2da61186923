"""Lesson 06's figure: a row per epoch, a column per sample, and in each cell the rank that reads the sample."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nbddp.figures.axes import sheet
from nbddp.figures.figure import described
from nbddp.figures.palette import FILLS, FRAME, INK, MUTED, PAPER
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l06_samples.simulation import DROPPED, PADDED, STRAIGHT, TOLD, UNTOLD, Dealt, dealt

LEFT, CELL, ROW, HEAD, TITLE, NOTE, FOOT = 0.72, 0.44, 0.36, 0.26, 0.34, 0.95, 0.3  # inches
LEAST = 5.6  # inches of width, for the line below


@described
def draw_samples(chosen: Dealt) -> Figure:
    """The grid; the words are those of the data."""
    grid = chosen.samples * CELL
    width = max(LEFT + grid + NOTE, LEAST)
    height = TITLE + HEAD + len(chosen.epochs) * ROW + FOOT
    figure, axes = sheet(width, height)
    axes.text(0, TITLE / 2 - 0.04, chosen.summary(), size=8.5, weight="bold", va="center", color=INK)
    axes.text(LEFT - 0.1, TITLE + HEAD / 2, "sample", size=7.5, ha="right", va="center", color=MUTED)
    for s in range(chosen.samples):
        middle = LEFT + (s + 0.5) * CELL
        axes.text(middle, TITLE + HEAD / 2, str(s), size=7.5, ha="center", va="center", color=MUTED)
    for epoch in range(len(chosen.epochs)):
        _row(axes, chosen, epoch, TITLE + HEAD + epoch * ROW)
    _legend(axes, chosen, height - FOOT / 2 + 0.04)
    return figure


def _row(axes: Any, chosen: Dealt, epoch: int, y: float) -> None:
    axes.text(LEFT - 0.1, y + ROW / 2, f"epoch {epoch}", size=8, ha="right", va="center", color=INK)
    for s in range(chosen.samples):
        _cell(axes, chosen.readers(epoch, s), LEFT + s * CELL, y)
    if chosen.as_before(epoch):
        x = LEFT + chosen.samples * CELL + 0.1
        axes.text(x, y + ROW / 2, f"= epoch {epoch - 1}", size=7.5, va="center", color=MUTED)


def _cell(axes: Any, readers: list[int], x: float, y: float) -> None:
    """A part for each rank that reads the sample, with its number; a dashed frame if none does."""
    gap = 0.03
    if not readers:
        axes.add_patch(
            Rectangle(
                (x + gap, y + gap), CELL - 2 * gap, ROW - 2 * gap,
                facecolor=FRAME, edgecolor=INK, linestyle=(0, (3, 2)), linewidth=0.8,
            )
        )  # fmt: skip
        axes.text(x + CELL / 2, y + ROW / 2, "none", size=6.8, ha="center", va="center", color=MUTED)
        return
    part = (CELL - 2 * gap) / len(readers)
    for i, rank in enumerate(readers):
        left = x + gap + i * part
        fill = FILLS[rank % len(FILLS)]
        axes.add_patch(Rectangle((left, y + gap), part, ROW - 2 * gap, facecolor=fill, edgecolor=PAPER, linewidth=0.8))
        axes.text(
            left + part / 2, y + ROW / 2, str(rank), size=8, weight="bold", ha="center", va="center", color=PAPER
        )  # fmt: skip


def _legend(axes: Any, chosen: Dealt, y: float) -> None:
    said = "in a cell: the rank that reads the sample"
    numbers = [len(chosen.readers(e, s)) for e in range(len(chosen.epochs)) for s in range(chosen.samples)]
    if max(numbers) > 1:
        said += "; more than one: it is read more than once"
    elif min(numbers) == 0:
        said += ", or none"
    axes.text(LEFT + 0.03, y, said, size=7.5, va="center", color=MUTED)


# -- the explorer ----------------------------------------------------------------------------------

samples = Explorer(
    "Lesson 06: which rank reads which sample in which epoch.",
    dealt,
    draw_samples,
    Slider("samples", "samples", 1, 16, at=(8, 10)),
    Slider("ranks", "ranks", 1, 4, at=(4, 4)),
    Choice("order", "order", (TOLD, UNTOLD, STRAIGHT), at=(TOLD, UNTOLD)),
    Choice("tail", "remainder", (PADDED, DROPPED), at=(PADDED, DROPPED)),
)
