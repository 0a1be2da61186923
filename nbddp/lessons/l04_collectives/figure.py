"""Lesson 04's figure: chunks on ranks with the parts that are in them, and what the last step sent round the ring."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nbddp.figures.axes import sheet
from nbddp.figures.figure import described
from nbddp.figures.palette import FAINT, FILLS, FRAME, INK, MUTED, PAPER
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l04_collectives.collectives import (
    BROADCAST,
    COLLECTIVES,
    LEAVES,
    REDUCE_SCATTER,
    BeforeAfter,
    Row,
    TensorPiece,
    collective,
)
from nbddp.lessons.l04_collectives.simulation import (
    LETTERS,
    PROGRAMS,
    RING,
    SHORT,
    Parts,
    RingState,
    complete,
    simulate_ring,
)

COLOURS = (*FILLS, "#54478c")  # one per rank; the letter says it too
SLOT, CELL, BETWEEN = 0.235, 0.4, 0.5  # inches: a part's width, a chunk's height, the room for arrows
LEFT, TOP, FOOT, ARROW = 0.62, 0.72, 0.3, 0.42
PAD, TICK = 0.05, 0.16


@described
def draw_ring(shot: RingState) -> Figure:
    """A column for each rank and a row for each chunk; the words are the shot's."""
    n = shot.ranks
    wide = n * SLOT + 2 * PAD + TICK
    width = max(LEFT + ARROW + n * wide + (n - 1) * BETWEEN + ARROW + 0.1, 5.2)
    height = TOP + n * CELL + FOOT
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
    return figure


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


# -- before and after a collective -----------------------------------------------------------------

SYMBOL, ROW, GAP, EDGE = 0.32, 0.42, 0.1, 0.04  # inches: a letter's width, a row's height, between cells, in a cell
ACROSS, HEAD = 0.6, 0.86  # the room for the arrow, the heading
LEAST = 5.4  # inches of width, for the heading


@described
def draw_before_after(exchange: BeforeAfter) -> Figure:
    """The two sides with an arrow between; the words are the exchange's."""
    sides = [max(map(_width, side)) for side in (exchange.before, exchange.after)]
    across = LEFT + sides[0] + ACROSS + sides[1]
    figure, axes = sheet(max(across + 0.1, LEAST), HEAD + exchange.ranks * ROW + 0.06)
    axes.text(0.02, 0.13, f"{exchange.name} on {exchange.ranks} ranks", size=9.5, weight="bold", va="center")
    axes.text(0.02, 0.34, f"after it, {LEAVES[exchange.name]}", size=8.5, va="center", color=MUTED)
    right = LEFT + sides[0] + ACROSS
    for x, words in ((LEFT, "before"), (right, "after")):
        axes.text(x, HEAD - 0.14, words, size=8, va="center", color=MUTED)
    for r in range(exchange.ranks):
        y = HEAD + (r + 0.5) * ROW
        axes.text(0.02, y, f"rank {r}", size=8.5, weight="bold", va="center", color=COLOURS[r])
        _row(axes, exchange.before[r], LEFT, y)
        _row(axes, exchange.after[r], right, y)
    middle = HEAD + exchange.ranks * ROW / 2
    look = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11}
    axes.annotate("", (right - 0.14, middle), (right - ACROSS + 0.14, middle), arrowprops=look)
    return figure


def _width(row: Row) -> float:
    return sum(len(cell.ranks) * SYMBOL + 2 * EDGE + GAP for cell in row)


def _row(axes: Any, row: Row, x: float, y: float) -> None:
    """The cells of one rank; a dash for nothing."""
    if not row:
        axes.text(x + 0.06, y, "–", size=9, va="center", color=MUTED)
    for cell in row:
        _cell(axes, cell, x, y)
        x += _width((cell,))


def _cell(axes: Any, cell: TensorPiece, x: float, y: float) -> None:
    """One tensor or piece in a frame; the letters of a sum are side by side in it."""
    wide, tall = len(cell.ranks) * SYMBOL + 2 * EDGE, ROW - 0.1
    axes.add_patch(Rectangle((x, y - tall / 2), wide, tall, facecolor=PAPER, edgecolor=FAINT, linewidth=0.8))
    for i, (rank, symbol) in enumerate(zip(cell.ranks, cell.symbols(), strict=True)):
        left = x + EDGE + i * SYMBOL
        axes.add_patch(
            Rectangle((left + 0.01, y - tall / 2 + EDGE), SYMBOL - 0.02, tall - 2 * EDGE, facecolor=COLOURS[rank], lw=0)
        )
        middle = left + SYMBOL / 2
        axes.text(middle, y, symbol, size=8, weight="bold", ha="center", va="center_baseline", color=PAPER)


# -- the explorer ----------------------------------------------------------------------------------

before_after = Explorer(
    "Lesson 04: what each rank has before and after a collective.",
    collective,
    draw_before_after,
    Choice("name", "collective", COLLECTIVES, at=(BROADCAST, REDUCE_SCATTER)),
    Slider("ranks", "ranks", 2, 4, at=(4, 4)),
)

ring = Explorer(
    "Lesson 04: which rank's part is in which chunk after some steps of the ring, and of three broken ones.",
    simulate_ring,
    draw_ring,
    Slider("ranks", "ranks", 2, 5, at=(4, 4)),
    Steps("step", "steps taken", 0, 8, at=(0, 5), moves=lambda found: len(found.steps)),
    Choice("program", "program", PROGRAMS, at=(RING, SHORT)),
    begins={"step": 1},
)
