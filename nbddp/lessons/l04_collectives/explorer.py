"""Lesson 04: what collectives leave on each rank; the ring all-reduce and three broken ones, step by step."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l04_collectives.collectives import BROADCAST, COLLECTIVES, REDUCE_SCATTER, collective
from nbddp.lessons.l04_collectives.figure import draw_ring
from nbddp.lessons.l04_collectives.figure_collectives import draw_before_after
from nbddp.lessons.l04_collectives.simulation import PROGRAMS, RING, SHORT, simulate_ring


def before_after() -> Explorer:
    """Lesson 04: what each rank has before and after a collective."""
    return Explorer(
        lambda **chosen: draw_before_after(collective(**chosen)),
        (
            Choice("name", "collective", COLLECTIVES),
            Slider("ranks", "ranks", 2, 4),
        ),
        (
            {"name": BROADCAST, "ranks": 4},
            {"name": REDUCE_SCATTER, "ranks": 4},
        ),
    )


def ring() -> Explorer:
    """Lesson 04: which rank's part is in which chunk after some steps of the ring, and of three broken ones."""
    return Explorer(
        lambda **chosen: draw_ring(simulate_ring(**chosen)),
        (
            Slider("ranks", "ranks", 2, 5),
            Steps("step", "steps taken", 0, 8),
            Choice("program", "program", PROGRAMS),
        ),
        (
            {"ranks": 4, "step": 0, "program": RING},
            {"ranks": 4, "step": 5, "program": SHORT},
        ),
    )
