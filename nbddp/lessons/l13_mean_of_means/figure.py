"""Lesson 13's figure: a square for each token, whose area is the token's weight, in a frame of the correct size."""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nbddp.figures.axes import sheet
from nbddp.figures.figure import described
from nbddp.figures.palette import FILLS, INK, MUTED, TINTS
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l13_mean_of_means.simulation import MEANS, RULES, MicroBatch, Weighed, weighed

WIDTH, LEFT, NOTE = 6.5, 1.48, 4.72  # inches: of the sheet, where tokens begin, and where the row's numbers are
TITLE, HEAD, ROW, LINE, FOOT = 0.3, 0.26, 0.34, 0.17, 0.1
SIDE, GAP = 0.13, 0.035  # of a token with the correct weight; between tokens
DASHES = (0, (2, 1.5))
LETTERS = 108  # of a line of text below


@described
def draw_weights(chosen: Weighed) -> Figure:
    """A row for each micro-batch; the words are those of the data."""
    rows = [max(ROW, _side(b) + 2 * GAP) for b in chosen.blocks]
    text = f"Area of a square: weight of the token. Dashed frame: correct weight. {_sentence(chosen.verdict())}"
    below = textwrap.wrap(text, LETTERS)
    height = TITLE + HEAD + sum(rows) + FOOT + LINE * len(below)
    figure, axes = sheet(WIDTH, height)
    axes.text(0, TITLE / 2, chosen.head(), size=8.5, weight="bold", va="center", color=INK)
    for x, said in ((NOTE, "weight of a token"), (WIDTH, "all together")):
        side = "left" if x == NOTE else "right"
        axes.text(x, TITLE + HEAD / 2, said, size=7.5, ha=side, va="center", color=MUTED)
    y = TITLE + HEAD
    for block, row in zip(chosen.blocks, rows, strict=True):
        _row(axes, block, y + row / 2)
        y += row
    for i, line in enumerate(below):
        axes.text(0, y + FOOT + (i + 0.5) * LINE, line, size=7.5, va="center", color=MUTED)
    return figure


def _side(block: MicroBatch) -> float:
    """Inches of a token's square: its area is its weight."""
    return float(SIDE * block.relative**0.5)


def _row(axes: Any, block: MicroBatch, middle: float) -> None:
    axes.text(LEFT - 0.1, middle, block.name, size=8, ha="right", va="center", color=INK)
    side, n = _side(block), block.rank % len(FILLS)
    pitch = max(side, SIDE) + GAP
    for i in range(block.tokens):
        x = LEFT + i * pitch + pitch / 2
        axes.add_patch(_square(x, middle, side, facecolor=TINTS[n], edgecolor=FILLS[n], linewidth=0.9))
        axes.add_patch(_square(x, middle, SIDE, facecolor="none", edgecolor=INK, linewidth=0.8, linestyle=DASHES))
    axes.text(NOTE, middle, f"{block.relative:.2f} × correct weight", size=8, va="center", color=INK)
    axes.text(WIDTH, middle, f"{block.share:.0%}", size=8, ha="right", va="center", color=INK)


def _square(x: float, y: float, side: float, **look: Any) -> Rectangle:
    return Rectangle((x - side / 2, y - side / 2), side, side, **look)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


# -- the explorer ----------------------------------------------------------------------------------

MOST = 16  # tokens of a micro-batch

weights = Explorer(
    "Lesson 13: the weight of a token in the gradient, by the sizes of micro-batches and the divisor of losses.",
    weighed,
    draw_weights,
    Slider("first", "rank 0, first", 1, MOST, at=(8, 12)),
    Slider("second", "rank 0, second", 1, MOST, at=(8, 4)),
    Slider("other_first", "rank 1, first", 1, MOST, at=(8, 2)),
    Slider("other_second", "rank 1, second", 1, MOST, at=(8, 6)),
    Choice("rule", "loss divided by", RULES, at=(MEANS, MEANS)),
    begins={"first": 12, "second": 4},
)
