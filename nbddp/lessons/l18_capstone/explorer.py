"""Lesson 18: the effect of one mistake on a training, and which lines of the rubric find it."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l18_capstone.figure import draw_training
from nbddp.lessons.l18_capstone.simulation import MISTAKES, NO_OPTIMIZER, NONE, RANKS, STEPS, simulate_training

LONGEST = 2 * STEPS - 1  # steps taken, where all are taken again


training = Explorer(
    __doc__,
    simulate_training,
    draw_training,
    Choice("mistake", "mistake", MISTAKES, at=(NONE, NO_OPTIMIZER)),
    Slider("ranks", "ranks", 1, RANKS, at=(2, 4)),
    Slider("fails", "failure in step (0: none)", 0, STEPS, at=(0, 25)),
    Steps("time", "steps taken", 0, LONGEST, to_all=True, at=(8, LONGEST), moves=lambda found: found.total),
    begins={"time": LONGEST},
)
