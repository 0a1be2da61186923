"""A figure that also says itself in words: PNG for eyes, text for readers of text and for comparison."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nbddp.draw.palette import RC

DPI = 192  # two pixels of a picture to one of the page's: sharp on every screen, and 9 points are 9 points


def width_of(png: bytes) -> int:
    """The width that a PNG of ours gets on a page, in CSS pixels of 1/96 inch."""
    return int.from_bytes(png[16:20], "big") * 96 // DPI


class Shown:
    """A matplotlib figure and its content in words. `str` and `repr` are the words."""

    def __init__(self, figure: Figure, words: str):
        self.figure, self.words = figure, words
        self._drawn = b""

    def __repr__(self) -> str:
        return self.words

    def png(self) -> bytes:
        buffer = io.BytesIO()
        with rc_context(RC):
            FigureCanvasAgg(self.figure)
            self.figure.savefig(buffer, format="png", dpi=DPI, bbox_inches="tight", pad_inches=0.12)
        return buffer.getvalue()

    def draw(self) -> None:
        """Draw now what is shown next, so that to show it takes no time."""
        self._drawn = self.png()

    def save(self, path: str | Path) -> None:
        """Write the picture as PNG."""
        Path(path).write_bytes(self.png())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        data, self._drawn = self._drawn or self.png(), b""
        bundle = {"image/png": base64.b64encode(data).decode(), "text/plain": self.words}
        return bundle, {"image/png": {"alt": self.words, "width": width_of(data)}}
