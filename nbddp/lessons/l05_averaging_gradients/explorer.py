"""Lesson 05: the ranks' lines, loss and distance, by their start and their treatment of gradients."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l05_averaging_gradients.figure import draw_averaging
from nbddp.lessons.l05_averaging_gradients.simulation import MEAN, NOTHING, OWN, SAME, SUM, simulate_averaging

averaging = Explorer(
    __doc__,
    simulate_averaging,
    draw_averaging,
    Slider("ranks", "ranks", 2, 4, at=(4, 4)),
    Slider("steps", "steps", 10, 200, 10, at=(30, 200)),
    Choice("begin", "start", (SAME, OWN), at=(SAME, SAME)),
    Choice("exchange", "gradients", (NOTHING, MEAN, SUM), at=(MEAN, NOTHING)),
)
