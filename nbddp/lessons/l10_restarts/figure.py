"""Lesson 10's figure: steps × attempts. A kept step is filled, a lost one is hatched, the failure is a cross; a bar
at the right of a step is a checkpoint."""

from __future__ import annotations

from typing import Any, TypedDict

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from nbddp.figures.axes import sheet
from nbddp.figures.figure import described
from nbddp.figures.palette import FILLS, FRAME, INK, MUTED, PAPER
from nbddp.lessons.framework.explorer import Explorer, Slider
from nbddp.lessons.l10_restarts.simulation import (
    FAILED,
    KEPT,
    LOST,
    STEPS,
    Attempt,
    RestartedTraining,
    simulate_restarts,
)

CELL, ROW, LEFT, RIGHT, HEAD, FOOT = 0.3, 0.36, 0.85, 1.55, 0.78, 0.42  # inches


@described
def draw_restarts(made: RestartedTraining) -> Figure:
    """The grid; the words are the training's."""
    width = LEFT + made.steps * CELL + RIGHT
    height = HEAD + len(made.attempts) * ROW + FOOT
    figure, axes = sheet(width, height)
    axes.text(0, 0.14, made.verdict().partition(":")[0], size=10, weight="bold", va="center", color=INK)
    axes.text(0, 0.36, made.verdict().partition(": ")[2], size=8, va="center", color=MUTED)
    for step in range(made.steps):
        x = LEFT + (step + 0.5) * CELL
        axes.text(x, HEAD - 0.12, str(step), size=7, ha="center", va="center", color=MUTED)
    axes.text(LEFT - 0.1, HEAD - 0.12, "step", size=7, ha="right", va="center", color=MUTED)
    for k, attempt in enumerate(made.attempts):
        _row(axes, made, k, attempt)
    axes.legend(
        handles=_key(), loc="lower left", bbox_to_anchor=(LEFT / width, 0), ncols=4, frameon=False, fontsize=7,
        borderpad=0, handlelength=1.4, columnspacing=1.6,
    )  # fmt: skip
    return figure


def _row(axes: Any, made: RestartedTraining, k: int, attempt: Attempt) -> None:
    y = HEAD + k * ROW
    middle = y + ROW / 2
    axes.text(LEFT - 0.1, middle, f"attempt {k}", size=8, weight="bold", ha="right", va="center", color=INK)
    for step in range(made.steps):
        x = LEFT + step * CELL
        _cell(axes, attempt.kind(step), x, y)
        if attempt.start <= step < attempt.stop and made.saves(step):
            axes.add_patch(Rectangle((x + CELL - 0.035, y + 0.01), 0.05, ROW - 0.02, facecolor=INK, zorder=3))
    did = attempt.stop - attempt.start
    text = f"{did} done" + (f", {attempt.lost} lost" if attempt.fails else "")
    axes.text(LEFT + made.steps * CELL + 0.12, middle, text, size=7.5, va="center", color=INK)


def _cell(axes: Any, kind: str, x: float, y: float) -> None:
    if kind == FAILED:
        axes.text(x + CELL / 2, y + ROW / 2, "×", size=13, weight="bold", ha="center", va="center", color=INK)
    else:
        axes.add_patch(Rectangle((x + 0.015, y + 0.04), CELL - 0.03, ROW - 0.08, **_look(kind)))


class Look(TypedDict, total=False):
    facecolor: str
    edgecolor: str
    hatch: str
    linewidth: float


def _look(kind: str) -> Look:
    if kind == KEPT:
        return {"facecolor": FILLS[0], "edgecolor": FILLS[0], "linewidth": 0.8}
    if kind == LOST:
        return {"facecolor": PAPER, "edgecolor": FILLS[1], "hatch": "/////", "linewidth": 0.8}
    return {"facecolor": FRAME, "edgecolor": "none", "linewidth": 0.8}


def _key() -> list[Any]:
    return [
        Patch(**_look(KEPT), label="done and kept"),
        Patch(**_look(LOST), label="done and lost"),
        Line2D([], [], linestyle="none", marker="x", markeredgewidth=2, color=INK, label="failure"),
        Line2D([], [], linestyle="none", marker="|", markersize=10, markeredgewidth=3, color=INK, label="checkpoint"),
    ]


# -- the explorer ----------------------------------------------------------------------------------

restarts = Explorer(
    "Lesson 10: a training that fails again and again, and the progress that its checkpoints keep.",
    simulate_restarts,
    draw_restarts,
    Slider("every", "steps per checkpoint", 1, STEPS, at=(5, 8)),
    Slider("life", "steps until a failure", 0, STEPS, at=(STEPS, 7)),
    Slider("max_restarts", "--max-restarts", 0, 7, at=(4, 4)),
    begins={"every": 3, "life": 7},
)
