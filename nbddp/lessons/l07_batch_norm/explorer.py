"""Lesson 07: means and variances of shards against those of the whole batch."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l07_batch_norm.figure import draw_moments
from nbddp.lessons.l07_batch_norm.simulation import EQUAL, UNEQUAL, sharded

statistics = Explorer(
    __doc__,
    sharded,
    draw_moments,
    Slider("per_rank", "samples per rank", 2, 32, at=(8, 8)),
    Slider("ranks", "ranks", 1, 4, at=(1, 2)),
    Slider("shift", "shift from rank to rank, in tenths", 0, 40, 5, at=(0, 20)),
    Choice("sizes", "shards", (EQUAL, UNEQUAL), at=(EQUAL, UNEQUAL)),
    begins={"ranks": 2},
)
