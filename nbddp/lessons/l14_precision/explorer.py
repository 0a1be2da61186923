"""Lesson 14: the loss scale of each rank, and who skips which step, by where ranks look for inf."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l14_precision.figure import draw_loss_scale
from nbddp.lessons.l14_precision.simulation import ALONE, AVERAGED, STEPS, WHERE, scaled


def loss_scale() -> Explorer:
    """Lesson 14: the loss scale of each rank, and who skips which step, by where ranks look for inf."""
    return Explorer(
        lambda **chosen: draw_loss_scale(scaled(**chosen)),
        (
            Choice("where", "inf is looked for in", WHERE),
            Slider("first", "first scale, power of 2", 10, 20),
            Slider("interval", "growth interval, steps", 2, 8),
            Steps("step", "steps", 0, STEPS),
        ),
        (
            {"where": AVERAGED, "first": 16, "interval": 4, "step": 3},
            {"where": ALONE, "first": 18, "interval": 4, "step": STEPS},
        ),
    )
