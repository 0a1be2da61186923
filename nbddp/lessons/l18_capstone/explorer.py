"""Lesson 18: what one mistake does to a training, and which lines of the rubric find it."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l18_capstone.figure import draw_training
from nbddp.lessons.l18_capstone.simulation import MISTAKES, NO_OPTIMIZER, NONE, RANKS, STEPS, simulate_training

LONGEST = 2 * STEPS - 1  # steps taken, where all are taken again


def training() -> Explorer:
    """Lesson 18: what one mistake does to a training, and which lines of the rubric find it."""
    return Explorer(
        lambda **chosen: draw_training(simulate_training(**chosen)),
        (
            Choice("mistake", "mistake", MISTAKES),
            Slider("ranks", "ranks", 1, RANKS),
            Slider("fails", "failure in step (0: none)", 0, STEPS),
            Steps("time", "steps taken", 0, LONGEST, to_all=True),
        ),
        (
            {"mistake": NONE, "ranks": 2, "fails": 0, "time": 8},
            {"mistake": NO_OPTIMIZER, "ranks": 4, "fails": 25, "time": LONGEST},
        ),
    )
