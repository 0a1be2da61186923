"""Axes of a figure: paper measured in inches, and the rows, ticks and legends that figures of recorded data share.

Everything here is called under `rc_context(RC)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text

from nbddp.figures.palette import INK, MUTED

WIDTH = 9.2  # inches of a figure of recorded data
EDGE, LINE = 0.1, 0.17  # inches: left of texts; from a line of small print to the next

# -- paper: x from the left, y from the top, without an axis. What is drawn there has its true size -----


def sheet(width: float, height: float) -> tuple[Figure, Any]:
    """A figure of this size, and its axes, which cover it."""
    figure = Figure(figsize=(width, height))
    return figure, part(figure, (0, 0, 1, 1), width, height)


def part(figure: Figure, place: tuple[float, float, float, float], width: float, height: float) -> Any:
    """Axes of `width` × `height` inches in a part of a figure; place: left, bottom, width, height as its shares."""
    axes = figure.add_axes(place)
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return axes


# -- recorded data -------------------------------------------------------------------------------------


def titled(height: float, title: str, lines: Sequence[str], under: float) -> Figure:
    """A figure with a title and lines of small print, which begin `under` inches below the top."""
    figure = Figure(figsize=(WIDTH, height))
    figure.text(EDGE / WIDTH, 1 - 0.08 / height, title, va="top", size=9.5, weight="bold")
    for i, line in enumerate(lines):
        figure.text(EDGE / WIDTH, 1 - (under + LINE * i) / height, line, va="top", size=8, color=MUTED)
    return figure


def place(figure: Figure, left: float, top: float, width: float, height: float) -> Any:
    """Axes of this size, so many inches from the left and the top of a figure."""
    across, down = figure.get_size_inches()
    return figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))


def rows(axes: Any, at: Sequence[float], names: Sequence[str]) -> None:
    """Name the rows of a chart, whose frame is its lower side alone."""
    axes.set_yticks(at, names)
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def powers_of_two(axes: Any, ticks: Sequence[int], name: Callable[[int], str], most: int, **font: Any) -> None:
    """A logarithmic axis; of the ticks every so many, so that no more than `most` have a name."""
    shown = ticks[:: -(-len(ticks) // most)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [name(t) for t in shown], **font)
    axes.set_xticks([], minor=True)


def key(name: str, fill: str, hatch: str = "", edge: str = INK, width: float = 0.5) -> Patch:
    """A fill's entry in a legend."""
    return Patch(fc=fill, ec=edge, lw=width, hatch=hatch or None, label=name)


def legend_above(axes: Any, keys: Sequence[Patch] | None, left: float, ncols: int, **spacing: float) -> None:
    """A legend in one line above the axes, which begins at `left` of their width. keys: None for those of its lines."""
    axes.legend(handles=keys, ncols=ncols, loc="lower left", bbox_to_anchor=(left, 1.0), **spacing)


class Inside(Text):
    """A label in the middle of `bar`. texts: what it may say, the best first; ink and fill: its colour and its box's,
    which is the bar's own.

    The size of a bar on paper is known only when the figure is laid out. So a label chooses text and size each time
    that it is drawn: the first text that fits, or smaller print, or nothing.
    """

    LARGEST, SMALLEST = 7.0, 5.0  # points
    HIGH = 1.3  # height of a line of print to its size
    PAD = 0.6  # points around the print
    END = 1.0  # points at each end of a bar: its outline, and print that is moved to whole pixels

    def __init__(self, axes: Any, bar: Rectangle, texts: Sequence[str], ink: str, fill: str):
        x, y = bar.get_x() + bar.get_width() / 2, bar.get_y() + bar.get_height() / 2
        super().__init__(x, y, "", color=ink, ha="center", va="center", size=self.LARGEST)
        self.set_bbox({"fc": fill, "ec": "none", "pad": self.PAD})
        self.bar, self.texts = bar, tuple(texts)
        self.set_in_layout(False)  # it is never outside of its bar
        axes.add_artist(self)

    def draw(self, renderer: Any) -> None:
        self.fit(renderer)
        if self.get_text():
            super().draw(renderer)

    def fit(self, renderer: Any) -> None:
        """Take the text and the size that the bar has room for."""
        room = self.bar.get_window_extent(renderer)
        point = renderer.points_to_pixels(1.0)
        size = min(self.LARGEST, (room.height / point - 2 * self.PAD) / self.HIGH)
        self.set_fontsize(max(size, self.SMALLEST))
        self.set_text(next((t for t in self.texts if size >= self.SMALLEST and self._fits(renderer, t, room)), ""))

    def _fits(self, renderer: Any, text: str, room: Any) -> bool:
        self.set_text(text)
        own, point = self.get_window_extent(renderer), renderer.points_to_pixels(1.0)
        across, up = own.width + 2 * (self.PAD + self.END) * point, own.height + 2 * self.PAD * point
        return bool(across <= room.width and up <= room.height)
