"""Lesson 10: a training that fails again and again, and what its checkpoints keep of it."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Explorer, Slider
from nbddp.lessons.l10_restarts.figure import draw_restarts
from nbddp.lessons.l10_restarts.simulation import STEPS, simulate_restarts


def restarts() -> Explorer:
    """Lesson 10: a training that fails again and again, and what its checkpoints keep of it."""
    return Explorer(
        lambda **chosen: draw_restarts(simulate_restarts(**chosen)),
        (
            Slider("every", "steps per checkpoint", 1, STEPS),
            Slider("life", "steps until a failure", 0, STEPS),
            Slider("max_restarts", "--max-restarts", 0, 7),
        ),
        (
            {"every": 5, "life": STEPS, "max_restarts": 4},
            {"every": 8, "life": 7, "max_restarts": 4},
        ),
    )
