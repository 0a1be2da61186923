"""Lesson 08: which gradients share a bucket, and how much of the exchange backward hides, on paper."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.figures.figure import DescribedFigure
from nbddp.lessons.framework import run_check
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l08_buckets_and_overlap import figure, simulation

MOST = 24  # buckets: a layer each


buckets = Explorer(
    __doc__,
    simulation.exchange,
    figure.exchange,
    Slider("layers", "layers", 1, 24, at=(1, 8)),
    Choice("width", "width of a layer", (512, 1024, 2048), at=(512, 1024)),
    Choice("cap_mb", "bucket_cap_mb", (simulation.DEFAULT, 1, 2, 4, 8, 16, 25, 100), at=(4, 4)),
    Slider("backward", "backward, ms", 5, 100, 5, at=(20, 20)),
    Choice("ranks", "ranks", (2, 8, 64, 512), at=(2, 8)),
    Choice("link", "link", tuple(simulation.LINKS), at=("100 Gb/s InfiniBand", "100 Gb/s InfiniBand")),
    Steps(
        "sent", "buckets exchanged", 0, MOST, to_all=True, at=(MOST, MOST), moves=lambda some: len(some.step.buckets)
    ),
    begins={"layers": 8, "width": 1024, "cap_mb": 8, "ranks": 8},
)


def measured_buckets(model: Sequence[tuple[str, int]], cap_mb: float | str = simulation.DEFAULT) -> DescribedFigure:
    """Lesson 08: the median step of the last recording, beside the packer's. model: name and bytes of each
    parameter, as `named_parameters()` has them. Raises BadInput where no exchange is recorded."""
    recording = run_check.pool().timings()
    return figure.beside(simulation.beside(recording, model, cap_mb))
