"""Lesson 04: which rank's part is in which chunk after some steps of the ring, and of three broken ones."""

from __future__ import annotations

from nbddp.lessons.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.ring.figure import ring as ring_figure
from nbddp.lessons.ring.simulation import PROGRAMS, RING, SHORT
from nbddp.lessons.ring.simulation import ring as ring_after


def ring() -> Explorer:
    """Lesson 04: which rank's part is in which chunk after some steps of the ring, and of three broken ones."""
    return Explorer(
        lambda **chosen: ring_figure(ring_after(**chosen)),
        (
            Slider("ranks", "ranks", 2, 5),
            Steps("step", "steps taken", 0, 8),
            Choice("program", "program", PROGRAMS),
        ),
        (
            {"ranks": 4, "step": 3, "program": RING},
            {"ranks": 4, "step": 5, "program": SHORT},
        ),
    )
