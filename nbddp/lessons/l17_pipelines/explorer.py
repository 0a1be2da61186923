"""Lesson 17: the work of each stage of a pipeline over time, under two schedules."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l17_pipelines.figure import draw_pipeline
from nbddp.lessons.l17_pipelines.simulation import GPIPE, ONE_F_ONE_B, SCHEDULES, simulate_pipeline

STAGES, MICRO_BATCHES = 6, 16  # the most
LONGEST = 3 * (STAGES + MICRO_BATCHES - 1)  # ticks


pipeline = Explorer(
    __doc__,
    simulate_pipeline,
    draw_pipeline,
    Slider("stages", "stages", 1, STAGES, at=(2, 4)),
    Slider("micro_batches", "micro-batches", 1, MICRO_BATCHES, at=(2, 8)),
    Choice("schedule", "schedule", tuple(SCHEDULES), at=(GPIPE, ONE_F_ONE_B)),
    Steps("time", "ticks", 0, LONGEST, at=(3, LONGEST), moves=lambda found: found.run.ticks),
    begins={"stages": 3, "micro_batches": 4, "time": LONGEST},
)
