"""Lesson 15: a rank's part of a model by the stage of ZeRO, and when FSDP gathers and releases layers."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l15_sharding.figure import draw_gathers, draw_zero
from nbddp.lessons.l15_sharding.schedule import FREE, KEEP, schedule_gathers
from nbddp.lessons.l15_sharding.simulation import PRECISIONS, stages

zero = Explorer(
    "Lesson 15: what a rank holds of a model, by the stage of ZeRO.",
    stages,
    draw_zero,
    Choice("billion", "parameters in 10⁹", (0.125, 1, 3, 7.5, 13, 70, 175), at=(7.5, 7.5)),
    Choice("ranks", "ranks", (1, 2, 4, 8, 16, 64, 256, 1024), at=(1, 64)),
    Choice("precision", "precision", tuple(PRECISIONS), at=("mixed", "mixed")),
    begins={"ranks": 8},
)


gathers = Explorer(
    "Lesson 15: one step of FSDP on two ranks, with all-gathers, computation, and the layers held in full.",
    schedule_gathers,
    draw_gathers,
    Slider("layers", "layers", 2, 6, at=(4, 4)),
    Choice("ahead", "gather ahead", (("none", 0), ("1 layer", 1), ("2 layers", 2)), at=(0, 1)),
    Choice("link", "time of a collective", (0.25, 0.5, 1.0, 2.0), at=(1.0, 1.0)),
    Choice("after", "after forward", (FREE, KEEP), at=(FREE, FREE)),
    Choice("slow", "slow rank", (("none", False), ("rank 1", True)), at=(False, False)),
)
