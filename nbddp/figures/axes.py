"""Paper measured in inches: x from the left, y from the top, without an axis. What is drawn there has its true size."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure


def sheet(width: float, height: float) -> tuple[Figure, Any]:
    """A figure of this size, and its axes, which cover it. To be called under `rc_context(RC)`."""
    figure = Figure(figsize=(width, height))
    return figure, part(figure, (0, 0, 1, 1), width, height)


def part(figure: Figure, place: tuple[float, float, float, float], width: float, height: float) -> Any:
    """Axes of `width` × `height` inches in a part of a figure; place: left, bottom, width, height as its shares."""
    axes = figure.add_axes(place)
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return axes
