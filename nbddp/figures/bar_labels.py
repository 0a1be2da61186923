"""A label inside a bar, and none where the bar has no room for it.

How large a bar is on paper is known only when the figure is laid out, so a label chooses its text and its size each
time that it is drawn: the first of its texts that fits, smaller print in a low bar, nothing where that is too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.patches import Rectangle
from matplotlib.text import Text

LARGEST, SMALLEST = 7.0, 5.0  # points
LINE = 1.3  # height of a line of print to its size
PAD = 0.6  # points around the print
EDGE = 1.0  # points at each end of a bar: its outline, and print that is moved to whole pixels


class Inside(Text):
    """A label in the middle of `bar`. texts: what it may say, the best first; ink and fill: its colour and its box's,
    which is the bar's own."""

    def __init__(self, axes: Any, bar: Rectangle, texts: Sequence[str], ink: str, fill: str):
        x, y = bar.get_x() + bar.get_width() / 2, bar.get_y() + bar.get_height() / 2
        super().__init__(x, y, "", color=ink, ha="center", va="center", size=LARGEST)
        self.set_bbox({"fc": fill, "ec": "none", "pad": PAD})
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
        size = min(LARGEST, (room.height / point - 2 * PAD) / LINE)
        self.set_fontsize(max(size, SMALLEST))
        self.set_text(next((t for t in self.texts if size >= SMALLEST and self._fits(renderer, t, room)), ""))

    def _fits(self, renderer: Any, text: str, room: Any) -> bool:
        self.set_text(text)
        own, point = self.get_window_extent(renderer), renderer.points_to_pixels(1.0)
        across, up = own.width + 2 * (PAD + EDGE) * point, own.height + 2 * PAD * point
        return bool(across <= room.width and up <= room.height)
