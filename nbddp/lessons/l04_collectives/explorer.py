"""Lesson 04: the result of collectives on each rank; the ring all-reduce and three broken ones, step by step."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l04_collectives.collectives import BROADCAST, COLLECTIVES, REDUCE_SCATTER, collective
from nbddp.lessons.l04_collectives.figure import draw_ring
from nbddp.lessons.l04_collectives.figure_collectives import draw_before_after
from nbddp.lessons.l04_collectives.simulation import PROGRAMS, RING, SHORT, simulate_ring

before_after = Explorer(
    "Lesson 04: what each rank has before and after a collective.",
    collective,
    draw_before_after,
    Choice("name", "collective", COLLECTIVES, at=(BROADCAST, REDUCE_SCATTER)),
    Slider("ranks", "ranks", 2, 4, at=(4, 4)),
)


ring = Explorer(
    "Lesson 04: which rank's part is in which chunk after some steps of the ring, and of three broken ones.",
    simulate_ring,
    draw_ring,
    Slider("ranks", "ranks", 2, 5, at=(4, 4)),
    Steps("step", "steps taken", 0, 8, at=(0, 5), moves=lambda found: len(found.steps)),
    Choice("program", "program", PROGRAMS, at=(RING, SHORT)),
    begins={"step": 1},
)
