"""Lesson 09: what every rank of a small program has called after some moves, and who waits for whom."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l09_hangs import simulation
from nbddp.lessons.l09_hangs.figure import draw_collectives


def collectives() -> Explorer:
    """Lesson 09: what every rank of a small program has called after some moves, and who waits for whom."""
    return Explorer(
        lambda **chosen: draw_collectives(simulation.log(**chosen)),
        (
            Choice("program", "program", tuple(simulation.PROGRAMS)),
            Slider("ranks", "ranks", 2, 6),
            Steps("moves", "moves", 0, 12),
        ),
        (
            {"program": simulation.ORDERED, "ranks": 4, "moves": 2},
            {"program": simulation.UNEVEN, "ranks": 4, "moves": 3},
        ),
    )
