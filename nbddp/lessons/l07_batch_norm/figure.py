"""Lesson 07's figure: each rank's samples with their mean and standard deviation, and below them those of the whole."""

from __future__ import annotations

from math import sqrt
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nbddp.figures.axes import sheet
from nbddp.figures.figure import described
from nbddp.figures.palette import FILLS, FRAME, INK, MUTED
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l07_batch_norm.simulation import EQUAL, UNEQUAL, Sharded, sharded, two

LEFT, RIGHT, MIDDLE, ROW, TITLE, AXIS, FOOT = 1.35, 1.75, 4.1, 0.36, 0.34, 0.5, 0.19  # inches
BAND = 0.24  # inches, height of the band of one standard deviation to each side


@described
def draw_moments(chosen: Sharded) -> Figure:
    """The rows; the words are those of the data."""
    rows, said = len(chosen.own) + 2, chosen.verdict().splitlines()
    width, height = LEFT + MIDDLE + RIGHT, TITLE + rows * ROW + AXIS + (len(said) + 0.6) * FOOT
    low, high = _range(chosen)

    def at(value: float) -> float:
        return LEFT + (value - low) / (high - low) * MIDDLE

    figure, axes = sheet(width, height)
    axes.text(0, TITLE / 2 - 0.04, chosen.head(), size=8.5, weight="bold", va="center", color=INK)
    _rows(axes, at, chosen)
    below = TITLE + len(chosen.own) * ROW
    axes.plot([0, width], [below, below], color=MUTED, linewidth=0.6)
    _axis(axes, at, below + 2 * ROW, low, high)
    for i, line in enumerate(said):
        y = height - (len(said) - i - 0.5) * FOOT
        axes.text(0, y, line.replace("-", "−"), size=8, va="center", color=INK)
    return figure


def _rows(axes: Any, at: Any, chosen: Sharded) -> None:
    """A row per rank, one of the whole, and one of what the plain mean of the variances would be."""
    whole = TITLE + (len(chosen.own) + 0.5) * ROW
    _row(axes, at, whole, "whole, merged", chosen.whole.mean, chosen.whole.variance)
    _row(axes, at, whole + ROW, "variances averaged", chosen.whole.mean, chosen.averaged, dashed=True)
    for rank, (shard, m) in enumerate(zip(chosen.shards, chosen.own, strict=True)):
        y, colour = TITLE + (rank + 0.5) * ROW, FILLS[rank % len(FILLS)]
        _row(axes, at, y, f"rank {rank}", m.mean, m.variance)
        _dots(axes, at, y, shard, colour)
        _dots(axes, at, whole, shard, colour)


def _range(chosen: Sharded) -> tuple[float, float]:
    """Where the axis begins and ends, in whole numbers."""
    values = [v for shard in chosen.shards for v in shard]
    values += [m.mean + s * sqrt(m.variance) for m in (*chosen.own, chosen.whole) for s in (-1, 1)]
    low, high = int(min(values) // 1), int(-(-max(values) // 1))
    return low, max(high, low + 1)


def _row(axes: Any, at: Any, y: float, name: str, mean: float, variance: float, dashed: bool = False) -> None:
    """Name, band of one standard deviation to each side of the mean, and the two numbers."""
    left, right = at(mean - sqrt(variance)), at(mean + sqrt(variance))
    line = (0, (3, 2)) if dashed else "solid"
    axes.add_patch(
        Rectangle(
            (left, y - BAND / 2), right - left, BAND, facecolor=FRAME, edgecolor=MUTED, linewidth=0.8, linestyle=line
        )
    )
    axes.plot([at(mean)] * 2, [y - BAND / 2, y + BAND / 2], color=INK, linewidth=1.4)
    axes.text(LEFT - 0.12, y, name, size=8, ha="right", va="center", color=INK)
    said = f"mean {two(mean)} · variance {two(variance)}" if not dashed else f"variance {two(variance)}"
    axes.text(LEFT + MIDDLE + 0.1, y, said.replace("-", "−"), size=7.5, va="center", color=INK)


def _dots(axes: Any, at: Any, y: float, values: tuple[float, ...], colour: str) -> None:
    axes.plot([at(v) for v in values], [y] * len(values), "o", markersize=3.6, color=colour, markeredgewidth=0)


def _axis(axes: Any, at: Any, y: float, low: float, high: float) -> None:
    """Whole numbers, and what the bands are."""
    y += 0.06
    axes.plot([at(low), at(high)], [y, y], color=MUTED, linewidth=0.6)
    step = 1 if high - low <= 12 else 2
    for value in range(int(low), int(high) + 1, step):
        axes.plot([at(value)] * 2, [y, y + 0.05], color=MUTED, linewidth=0.6)
        axes.text(at(value), y + 0.14, str(value).replace("-", "−"), size=7, ha="center", va="center", color=MUTED)
    axes.text(
        at(low), y + 0.34, "dots: samples · line: mean · band: one standard deviation to each side",
        size=7.5, va="center", color=MUTED,
    )  # fmt: skip


# -- the explorer ----------------------------------------------------------------------------------

statistics = Explorer(
    "Lesson 07: means and variances of shards against those of the whole batch.",
    sharded,
    draw_moments,
    Slider("per_rank", "samples per rank", 2, 32, at=(8, 8)),
    Slider("ranks", "ranks", 1, 4, at=(1, 2)),
    Slider("shift", "shift from rank to rank, in tenths", 0, 40, 5, at=(0, 20)),
    Choice("sizes", "shards", (EQUAL, UNEQUAL), at=(EQUAL, UNEQUAL)),
    begins={"ranks": 2},
)
