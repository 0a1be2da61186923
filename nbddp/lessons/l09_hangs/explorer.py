"""Lesson 09: the calls of every rank of a small program after some moves, and who waits for whom."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l09_hangs import simulation
from nbddp.lessons.l09_hangs.figure import draw_collectives

collectives = Explorer(
    __doc__,
    simulation.log,
    draw_collectives,
    Choice("program", "program", tuple(simulation.PROGRAMS), at=(simulation.ORDERED, simulation.UNEVEN)),
    Slider("ranks", "ranks", 2, 6, at=(4, 4)),
    Steps("moves", "moves", 0, simulation.MOST_MOVES, at=(2, 3), moves=lambda found: found.last),
)
