"""Lesson 04's figure: chunks on ranks with the parts that are in them, and what the last step sent round the ring."""

from __future__ import annotations

from typing import Any

from matplotlib import rc_context
from matplotlib.patches import Rectangle

from nbddp.figures.axes import sheet
from nbddp.figures.figure import DescribedFigure
from nbddp.figures.palette import FAINT, FILLS, FRAME, INK, MUTED, PAPER, RC
from nbddp.lessons.l04_collectives.simulation import LETTERS, Parts, RingState, complete

COLOURS = (*FILLS, "#54478c")  # one per rank; the letter says it too
SLOT, CELL, BETWEEN = 0.235, 0.4, 0.5  # inches: a part's width, a chunk's height, the room for arrows
LEFT, TOP, FOOT, ARROW = 0.62, 0.72, 0.3, 0.42
PAD, TICK = 0.05, 0.16


def draw_ring(shot: RingState) -> DescribedFigure:
    """A column for each rank and a row for each chunk; the words are the shot's."""
    n = shot.ranks
    wide = n * SLOT + 2 * PAD + TICK
    width = max(LEFT + ARROW + n * wide + (n - 1) * BETWEEN + ARROW + 0.1, 5.2)
    height = TOP + n * CELL + FOOT
    with rc_context(RC):
        figure, axes = sheet(width, height)
        axes.text(0.02, 0.13, f"{shot.program} on {n} ranks", size=9.5, weight="bold", va="center")
        axes.text(0.02, 0.34, shot.heading(), size=8.5, va="center", color=MUTED)
        lefts = [LEFT + ARROW + r * (wide + BETWEEN) for r in range(n)]
        for c in range(n):
            axes.text(0.02, TOP + (c + 0.5) * CELL, f"chunk {c}", size=8, va="center", color=MUTED)
        arrived = {(m.receiver, m.chunk) for m in shot.last.messages} if shot.last else set()
        for r, x in enumerate(lefts):
            axes.text(
                x + wide / 2, TOP - 0.13, f"rank {r}", size=8.5, weight="bold", ha="center", va="center",
                color=COLOURS[r],
            )  # fmt: skip
            for c in range(n):
                _chunk(axes, shot.grid[r][c], x, TOP + c * CELL, wide, (r, c) in arrived)
        _arrows(axes, shot, lefts, wide)
        axes.text(0.02, height - 0.1, shot.verdict(), size=8, va="center", color=INK)
    return DescribedFigure(figure, shot.describe())


def _chunk(axes: Any, parts: Parts, x: float, y: float, wide: float, arrived: bool) -> None:
    """One chunk: a slot for each rank's part, a thick frame if it has just arrived, a tick if it is complete."""
    axes.add_patch(
        Rectangle(
            (x, y + 0.035), wide, CELL - 0.07, facecolor=FRAME if arrived else PAPER,
            edgecolor=INK if arrived else FAINT, linewidth=1.8 if arrived else 0.8,
        )
    )  # fmt: skip
    middle = y + CELL / 2
    for r, count in enumerate(parts):
        left = x + PAD + r * SLOT
        if count:
            axes.add_patch(
                Rectangle((left + 0.015, y + 0.09), SLOT - 0.03, CELL - 0.18, facecolor=COLOURS[r], edgecolor="none")
            )
            text = LETTERS[r] if count == 1 else f"{count}{LETTERS[r]}"
            axes.text(
                left + SLOT / 2, middle, text, size=7.2, weight="bold", ha="center", va="center_baseline", color=PAPER
            )
        else:
            axes.text(left + SLOT / 2, middle, "·", size=8, ha="center", va="center", color=MUTED)
    if complete(parts):
        axes.text(x + wide - 0.03, middle, "✓", size=9, ha="right", va="center_baseline", color=INK)


def _arrows(axes: Any, shot: RingState, lefts: list[float], wide: float) -> None:
    """An arrow per message; the last rank's goes out at the right and comes in at the left."""
    look = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
    for m in shot.last.messages if shot.last else ():
        y, start = TOP + (m.chunk + 0.5) * CELL, lefts[m.sender] + wide + 0.05
        wraps = m.receiver < m.sender
        end = start + ARROW - 0.1 if wraps else lefts[m.receiver] - 0.05
        axes.annotate("", (end, y), (start, y), arrowprops=look)
        if wraps:
            into = lefts[m.receiver] - 0.05
            axes.annotate("", (into, y), (into - ARROW + 0.1, y), arrowprops=look)
            for x, words in ((start + 0.14, f"to {m.receiver}"), (into - 0.2, f"from {m.sender}")):
                axes.text(x, y - 0.09, words, size=6.8, ha="center", va="center", color=MUTED)
