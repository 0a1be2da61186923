"""Lesson 10: a training that fails again and again, and the progress that its checkpoints keep."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Explorer, Slider
from nbddp.lessons.l10_restarts.figure import draw_restarts
from nbddp.lessons.l10_restarts.simulation import STEPS, simulate_restarts

restarts = Explorer(
    __doc__,
    simulate_restarts,
    draw_restarts,
    Slider("every", "steps per checkpoint", 1, STEPS, at=(5, 8)),
    Slider("life", "steps until a failure", 0, STEPS, at=(STEPS, 7)),
    Slider("max_restarts", "--max-restarts", 0, 7, at=(4, 4)),
    begins={"every": 3, "life": 7},
)
