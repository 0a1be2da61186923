"""Lesson 08: which gradients share a bucket, and how much of the exchange backward hides, on paper."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.figures.figure import DescribedFigure
from nbddp.lessons.framework import run_check
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l08_buckets_and_overlap import figure, simulation

MOST = 24  # buckets: a layer each


def buckets() -> Explorer:
    """Lesson 08: which gradients share a bucket, and how much of the exchange backward hides, on paper."""
    start = {
        "layers": 8, "width": 1024, "cap_mb": 4, "backward": 20, "ranks": 8, "link": "100 Gb/s InfiniBand",
        "sent": MOST,
    }  # fmt: skip
    return Explorer(
        lambda **chosen: figure.exchange(simulation.exchange(**chosen)),
        (
            Slider("layers", "layers", 1, 24),
            Choice("width", "width of a layer", (512, 1024, 2048)),
            Choice("cap_mb", "bucket_cap_mb", (simulation.DEFAULT, 1, 2, 4, 8, 16, 25, 100)),
            Slider("backward", "backward, ms", 5, 100, 5),
            Choice("ranks", "ranks", (2, 8, 64, 512)),
            Choice("link", "link", tuple(simulation.LINKS)),
            Steps("sent", "buckets exchanged", 0, MOST, to_all=True),
        ),
        ({**start, "layers": 1, "width": 512, "ranks": 2}, start),
    )


def measured_buckets(model: Sequence[tuple[str, int]], cap_mb: float | str = simulation.DEFAULT) -> DescribedFigure:
    """Lesson 08: the median step of the last recording, beside the packer's. model: name and bytes of each
    parameter, as `named_parameters()` has them. Raises BadInput where no exchange is recorded."""
    recording = run_check.pool().timings()
    return figure.beside(simulation.beside(recording, model, cap_mb))
