"""Lesson 13: the weight of a token in the gradient, by the sizes of micro-batches and the divisor of losses."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l13_mean_of_means.figure import draw_weights
from nbddp.lessons.l13_mean_of_means.simulation import MEANS, RULES, weighed

MOST = 16  # tokens of a micro-batch


weights = Explorer(
    __doc__,
    weighed,
    draw_weights,
    Slider("first", "rank 0, first", 1, MOST, at=(8, 12)),
    Slider("second", "rank 0, second", 1, MOST, at=(8, 4)),
    Slider("other_first", "rank 1, first", 1, MOST, at=(8, 2)),
    Slider("other_second", "rank 1, second", 1, MOST, at=(8, 6)),
    Choice("rule", "loss divided by", RULES, at=(MEANS, MEANS)),
    begins={"first": 12, "second": 4},
)
