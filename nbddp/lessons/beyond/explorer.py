"""Lesson 12: what a rank holds of a model, by the stage of ZeRO."""

from __future__ import annotations

from nbddp.lessons.beyond.figure import zero as barred
from nbddp.lessons.beyond.simulation import PRECISIONS, stages
from nbddp.lessons.explorer import Choice, Explorer


def zero() -> Explorer:
    """Lesson 12: what a rank holds of a model, by the stage of ZeRO."""
    return Explorer(
        lambda **chosen: barred(stages(**chosen)),
        (
            Choice("billion", "parameters in 10⁹", (0.125, 1, 3, 7.5, 13, 70, 175)),
            Choice("ranks", "ranks", (1, 2, 4, 8, 16, 64, 256, 1024)),
            Choice("precision", "precision", tuple(PRECISIONS)),
        ),
        (
            {"billion": 7.5, "ranks": 64, "precision": "mixed"},
            {"billion": 7.5, "ranks": 64, "precision": "float32"},
        ),
    )
