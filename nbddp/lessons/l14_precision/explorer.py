"""Lesson 14: the loss scale of each rank, and who skips which step, by where ranks look for inf."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l14_precision.figure import draw_loss_scale
from nbddp.lessons.l14_precision.simulation import ALONE, AVERAGED, STEPS, WHERE, scaled

loss_scale = Explorer(
    __doc__,
    scaled,
    draw_loss_scale,
    Choice("where", "inf is looked for in", WHERE, at=(AVERAGED, ALONE)),
    Slider("first", "first scale, power of 2", 10, 20, at=(16, 18)),
    Slider("interval", "growth interval, steps", 2, 8, at=(4, 4)),
    Steps("step", "steps", 0, STEPS, at=(3, STEPS)),
    begins={"step": STEPS},
)
