"""Lesson 17: what each stage of a pipeline does over time, under two schedules."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l17_pipelines.figure import draw_pipeline
from nbddp.lessons.l17_pipelines.simulation import GPIPE, ONE_F_ONE_B, SCHEDULES, simulate_pipeline

STAGES, MICRO_BATCHES = 6, 16  # the most
LONGEST = 3 * (STAGES + MICRO_BATCHES - 1)  # ticks


def pipeline() -> Explorer:
    """Lesson 17: what each stage of a pipeline does over time, under two schedules."""
    return Explorer(
        lambda **chosen: draw_pipeline(simulate_pipeline(**chosen)),
        (
            Slider("stages", "stages", 1, STAGES),
            Slider("micro_batches", "micro-batches", 1, MICRO_BATCHES),
            Choice("schedule", "schedule", tuple(SCHEDULES)),
            Steps("time", "ticks", 0, LONGEST),
        ),
        (
            {"stages": 2, "micro_batches": 2, "schedule": GPIPE, "time": 3},
            {"stages": 4, "micro_batches": 8, "schedule": ONE_F_ONE_B, "time": LONGEST},
        ),
    )
