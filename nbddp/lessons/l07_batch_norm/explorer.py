"""Lesson 07: means and variances of shards against those of the whole batch."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l07_batch_norm.figure import draw_moments
from nbddp.lessons.l07_batch_norm.simulation import EQUAL, UNEQUAL, sharded


def statistics() -> Explorer:
    """Lesson 07: means and variances of shards against those of the whole batch."""
    return Explorer(
        lambda **chosen: draw_moments(sharded(**chosen)),
        (
            Slider("per_rank", "samples per rank", 2, 32),
            Slider("ranks", "ranks", 1, 4),
            Slider("shift", "shift from rank to rank, in tenths", 0, 40, 5),
            Choice("sizes", "shards", (EQUAL, UNEQUAL)),
        ),
        (
            {"per_rank": 8, "ranks": 1, "shift": 0, "sizes": EQUAL},
            {"per_rank": 8, "ranks": 2, "shift": 20, "sizes": UNEQUAL},
        ),
    )
