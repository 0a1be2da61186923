"""Lesson 06: which rank reads which sample in which epoch."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l06_samples.figure import draw_samples
from nbddp.lessons.l06_samples.simulation import DROPPED, PADDED, STRAIGHT, TOLD, UNTOLD, dealt


def samples() -> Explorer:
    """Lesson 06: which rank reads which sample in which epoch."""
    return Explorer(
        lambda **chosen: draw_samples(dealt(**chosen)),
        (
            Slider("samples", "samples", 1, 16),
            Slider("ranks", "ranks", 1, 4),
            Choice("order", "order", (TOLD, UNTOLD, STRAIGHT)),
            Choice("tail", "remainder", (PADDED, DROPPED)),
        ),
        (
            {"samples": 8, "ranks": 4, "order": TOLD, "tail": PADDED},
            {"samples": 10, "ranks": 4, "order": UNTOLD, "tail": DROPPED},
        ),
    )
