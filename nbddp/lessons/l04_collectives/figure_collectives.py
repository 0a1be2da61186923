"""Lesson 04's picture of collectives: a row for each rank, with its values before and after."""

from __future__ import annotations

from typing import Any

from matplotlib import rc_context
from matplotlib.patches import Rectangle

from nbddp.figures.axes import sheet
from nbddp.figures.figure import DescribedFigure
from nbddp.figures.palette import FAINT, INK, MUTED, PAPER, RC
from nbddp.lessons.l04_collectives.collectives import LEAVES, BeforeAfter, Row, TensorPiece
from nbddp.lessons.l04_collectives.figure import COLOURS

SYMBOL, ROW, GAP, PAD = 0.32, 0.42, 0.1, 0.04  # inches: a letter's width, a row's height, between cells, in a cell
LEFT, ARROW, TOP = 0.62, 0.6, 0.86
LEAST = 5.4  # inches of width, for the heading


def draw_before_after(exchange: BeforeAfter) -> DescribedFigure:
    """The two sides with an arrow between; the words are the exchange's."""
    sides = [max(map(_width, side)) for side in (exchange.before, exchange.after)]
    across = LEFT + sides[0] + ARROW + sides[1]
    with rc_context(RC):
        figure, axes = sheet(max(across + 0.1, LEAST), TOP + exchange.ranks * ROW + 0.06)
        axes.text(0.02, 0.13, f"{exchange.name} on {exchange.ranks} ranks", size=9.5, weight="bold", va="center")
        axes.text(0.02, 0.34, f"after it, {LEAVES[exchange.name]}", size=8.5, va="center", color=MUTED)
        right = LEFT + sides[0] + ARROW
        for x, words in ((LEFT, "before"), (right, "after")):
            axes.text(x, TOP - 0.14, words, size=8, va="center", color=MUTED)
        for r in range(exchange.ranks):
            y = TOP + (r + 0.5) * ROW
            axes.text(0.02, y, f"rank {r}", size=8.5, weight="bold", va="center", color=COLOURS[r])
            _row(axes, exchange.before[r], LEFT, y)
            _row(axes, exchange.after[r], right, y)
        middle = TOP + exchange.ranks * ROW / 2
        look = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11}
        axes.annotate("", (right - 0.14, middle), (right - ARROW + 0.14, middle), arrowprops=look)
    return DescribedFigure(figure, exchange.describe())


def _width(row: Row) -> float:
    return sum(len(cell.ranks) * SYMBOL + 2 * PAD + GAP for cell in row)


def _row(axes: Any, row: Row, x: float, y: float) -> None:
    """The cells of one rank; a dash for nothing."""
    if not row:
        axes.text(x + 0.06, y, "–", size=9, va="center", color=MUTED)
    for cell in row:
        _cell(axes, cell, x, y)
        x += _width((cell,))


def _cell(axes: Any, cell: TensorPiece, x: float, y: float) -> None:
    """One tensor or piece in a frame; the letters of a sum are side by side in it."""
    wide, tall = len(cell.ranks) * SYMBOL + 2 * PAD, ROW - 0.1
    axes.add_patch(Rectangle((x, y - tall / 2), wide, tall, facecolor=PAPER, edgecolor=FAINT, linewidth=0.8))
    for i, (rank, symbol) in enumerate(zip(cell.ranks, cell.symbols(), strict=True)):
        left = x + PAD + i * SYMBOL
        axes.add_patch(
            Rectangle((left + 0.01, y - tall / 2 + PAD), SYMBOL - 0.02, tall - 2 * PAD, facecolor=COLOURS[rank], lw=0)
        )
        middle = left + SYMBOL / 2
        axes.text(middle, y, symbol, size=8, weight="bold", ha="center", va="center_baseline", color=PAPER)
