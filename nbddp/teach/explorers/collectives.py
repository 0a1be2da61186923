"""Lesson 09: what every rank of a small program has called after some moves, and who waits for whom."""

from __future__ import annotations

from nbddp.draw.collectives import collectives as collectives_figure
from nbddp.teach import collectives as calls
from nbddp.teach.explorer import Choice, Explorer, Slider, Steps


def collectives() -> Explorer:
    """Lesson 09: what every rank of a small program has called after some moves, and who waits for whom."""
    return Explorer(
        lambda **chosen: collectives_figure(calls.log(**chosen)),
        (
            Choice("program", "program", tuple(calls.PROGRAMS)),
            Slider("ranks", "ranks", 2, 6),
            Steps("moves", "moves", 0, 12),
        ),
        ({"program": calls.UNEVEN, "ranks": 4, "moves": 3}, {"program": calls.SLOW, "ranks": 4, "moves": 2}),
    )
