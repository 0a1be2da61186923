"""Lesson 13: what a token counts in the gradient, by the sizes of micro-batches and by what losses are divided."""

from __future__ import annotations

from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l13_mean_of_means.figure import draw_weights
from nbddp.lessons.l13_mean_of_means.simulation import MEANS, RULES, weighed

MOST = 16  # tokens of a micro-batch


def weights() -> Explorer:
    """Lesson 13: what a token counts in the gradient, by the sizes of micro-batches and by what losses are divided."""
    return Explorer(
        lambda **chosen: draw_weights(weighed(**chosen)),
        (
            Slider("first", "rank 0, first", 1, MOST),
            Slider("second", "rank 0, second", 1, MOST),
            Slider("other_first", "rank 1, first", 1, MOST),
            Slider("other_second", "rank 1, second", 1, MOST),
            Choice("rule", "loss divided by", RULES),
        ),
        (
            {"first": 8, "second": 8, "other_first": 8, "other_second": 8, "rule": MEANS},
            {"first": 12, "second": 4, "other_first": 2, "other_second": 6, "rule": MEANS},
        ),
    )
