"""Lesson 06: which rank reads which sample in which epoch."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l06_samples.figure import draw_samples
from nbddp.lessons.l06_samples.simulation import DROPPED, PADDED, STRAIGHT, TOLD, UNTOLD, dealt

samples = Explorer(
    __doc__,
    dealt,
    draw_samples,
    Slider("samples", "samples", 1, 16, at=(8, 10)),
    Slider("ranks", "ranks", 1, 4, at=(4, 4)),
    Choice("order", "order", (TOLD, UNTOLD, STRAIGHT), at=(TOLD, UNTOLD)),
    Choice("tail", "remainder", (PADDED, DROPPED), at=(PADDED, DROPPED)),
)
