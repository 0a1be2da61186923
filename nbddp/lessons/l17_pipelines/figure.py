"""Lesson 17's figure: the work of each stage over time, and how many micro-batches' activations it holds."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from nbddp.figures.axes import sheet
from nbddp.figures.figure import described
from nbddp.figures.palette import FILLS, FRAME, INK, MUTED, PAPER
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l17_pipelines.simulation import (
    BACKWARD,
    FORWARD,
    GPIPE,
    ONE_F_ONE_B,
    SCHEDULES,
    Done,
    PipelineState,
    simulate_pipeline,
)

LOOKS = {FORWARD: FILLS[0], BACKWARD: FILLS[1]}  # with numbers in PAPER
LEFT, RIGHT, HEAD, ROW, FOOT = 0.62, 1.12, 0.78, 0.4, 0.42  # inches
WIDE, NARROW, ROOM = 0.34, 0.125, 7.2  # of a tick: the most, the least; and for all of them


@described
def draw_pipeline(shot: PipelineState) -> Figure:
    """A row for each stage, from left to right in time; the words are the shot's."""
    ticks = shot.run.ticks
    tick = max(NARROW, min(WIDE, ROOM / ticks))
    width = max(LEFT + ticks * tick + RIGHT, 5.6)
    height = HEAD + shot.stages * ROW + FOOT
    figure, axes = sheet(width, height)
    axes.text(0.02, 0.13, shot.heading(), size=9.5, weight="bold", va="center")
    axes.text(0.02, 0.34, shot.verdict().partition("; ")[0], size=8.5, va="center", color=MUTED)
    end = LEFT + ticks * tick
    axes.text(end + 0.2, HEAD - 0.14, "now · most held", size=7, va="center", color=MUTED)
    for stage in range(shot.stages):
        _row(axes, shot, stage, tick)
    _clock(axes, shot, tick)
    axes.legend(
        handles=_key(), loc="lower left", bbox_to_anchor=(LEFT / width, 0), ncols=3, frameon=False, fontsize=7.5,
        borderpad=0, handlelength=1.4, columnspacing=1.6,
    )  # fmt: skip
    return figure


def _row(axes: Any, shot: PipelineState, stage: int, tick: float) -> None:
    y, end = HEAD + stage * ROW, LEFT + shot.run.ticks * tick
    middle = y + ROW / 2
    axes.text(LEFT - 0.1, middle, f"stage {stage}", size=8, weight="bold", ha="right", va="center", color=INK)
    axes.add_patch(Rectangle((LEFT, y + 0.04), shot.time * tick, ROW - 0.08, facecolor=FRAME, edgecolor="none"))
    for done in shot.run.done[stage]:
        if done.start < shot.time:
            _block(axes, done, min(done.stop, shot.time), y, tick)
    axes.text(
        end + 0.2, middle, f"{shot.run.held(stage, shot.time)} · {shot.most(stage)}", size=8, va="center", color=INK
    )


def _block(axes: Any, done: Done, stop: int, y: float, tick: float) -> None:
    """A step, as far as it has come."""
    x, wide = LEFT + done.start * tick, (stop - done.start) * tick
    axes.add_patch(
        Rectangle((x, y + 0.04), wide, ROW - 0.08, facecolor=LOOKS[done.step[0]], edgecolor=PAPER, linewidth=0.8)
    )
    axes.text(x + wide / 2, y + ROW / 2, str(done.step[1]), size=6.8, ha="center", va="center", color=PAPER)


def _clock(axes: Any, shot: PipelineState, tick: float) -> None:
    """A line at the time that is looked at, and the ticks that are multiples of a round number."""
    x, foot = LEFT + shot.time * tick, HEAD + shot.stages * ROW
    axes.plot([x, x], [HEAD - 0.06, foot + 0.02], color=INK, linewidth=1.2, solid_capstyle="butt")
    every = next(n for n in (1, 2, 5, 10, 20) if n * tick >= 0.3)
    for t in range(0, shot.run.ticks + 1, every):
        axes.text(LEFT + t * tick, HEAD - 0.14, str(t), size=6.8, ha="center", va="center", color=MUTED)
    axes.text(LEFT - 0.12, HEAD - 0.14, "tick", size=7, ha="right", va="center", color=MUTED)


def _key() -> list[Any]:
    return [
        Patch(facecolor=LOOKS[FORWARD], label="forward (1 tick)"),
        Patch(facecolor=LOOKS[BACKWARD], label="backward (2 ticks)"),
        Patch(facecolor=FRAME, edgecolor=MUTED, linewidth=0.6, label="idle: the bubble"),
    ]


# -- the explorer ----------------------------------------------------------------------------------

STAGES, MICRO_BATCHES = 6, 16  # the most
LONGEST = 3 * (STAGES + MICRO_BATCHES - 1)  # ticks

pipeline = Explorer(
    "Lesson 17: the work of each stage of a pipeline over time, under two schedules.",
    simulate_pipeline,
    draw_pipeline,
    Slider("stages", "stages", 1, STAGES, at=(2, 4)),
    Slider("micro_batches", "micro-batches", 1, MICRO_BATCHES, at=(2, 8)),
    Choice("schedule", "schedule", tuple(SCHEDULES), at=(GPIPE, ONE_F_ONE_B)),
    Steps("time", "ticks", 0, LONGEST, at=(3, LONGEST), moves=lambda found: found.run.ticks),
    begins={"stages": 3, "micro_batches": 4, "time": LONGEST},
)
