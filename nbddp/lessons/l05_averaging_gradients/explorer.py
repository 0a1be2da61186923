"""Lesson 05: the ranks' lines, their loss and their distance, by how they start and what they do with gradients."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l05_averaging_gradients.figure import draw_averaging
from nbddp.lessons.l05_averaging_gradients.simulation import MEAN, NOTHING, OWN, SAME, SUM, simulate_averaging


def averaging() -> Explorer:
    """Lesson 05: the ranks' lines, their loss and their distance, by how they start and what they do with gradients."""
    return Explorer(
        lambda **chosen: draw_averaging(simulate_averaging(**chosen)),
        (
            Slider("ranks", "ranks", 2, 4),
            Slider("steps", "steps", 10, 200, 10),
            Choice("begin", "start", (SAME, OWN)),
            Choice("exchange", "gradients", (NOTHING, MEAN, SUM)),
        ),
        (
            {"ranks": 4, "steps": 30, "begin": SAME, "exchange": MEAN},
            {"ranks": 4, "steps": 200, "begin": SAME, "exchange": NOTHING},
        ),
    )
