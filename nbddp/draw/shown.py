"""A figure that also says itself in words: a picture over its words on a page, PNG, and text for consoles."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from nbddp.base.table import Table
from nbddp.draw.page import Spot, page
from nbddp.draw.palette import RC

DPI = 192  # two pixels of a picture to one of the page's: sharp on every screen, and 9 points are 9 points
PAD = 0.12  # inches around a picture
COLOURS = 128  # in a PNG: a third of the bytes of all colours, and no difference can be seen


def width_of(png: bytes) -> int:
    """The width that a PNG of ours gets on a page, in CSS pixels of 1/96 inch."""
    return int.from_bytes(png[16:20], "big") * 96 // DPI


@dataclass(frozen=True)
class Area:
    """A part of some axes, in their data's coordinates, that has words of its own."""

    axes: Any
    left: float
    right: float
    bottom: float
    top: float
    words: str


class Shown:
    """A matplotlib figure and its content in words, which may end with tables. `str` and `repr` are the words. areas:
    parts of the figure whose words a page shows where the pointer rests."""

    def __init__(
        self,
        figure: Figure,
        words: str,
        table: Table | Sequence[Table] | None = None,
        areas: Sequence[Area] = (),
    ):
        self.figure, self.words, self.areas = figure, words, tuple(areas)
        self._tables = [] if table is None else [table] if isinstance(table, Table) else list(table)
        self._drawn = b""

    def __repr__(self) -> str:
        return self.words

    def png(self) -> bytes:
        buffer = io.BytesIO()
        with rc_context(RC):
            FigureCanvasAgg(self.figure)
            self.figure.savefig(buffer, format="png", dpi=DPI, bbox_inches="tight", pad_inches=PAD)
        packed = io.BytesIO()
        Image.open(buffer).convert("RGB").quantize(COLOURS).save(packed, "PNG")
        return packed.getvalue()

    def spots(self) -> list[Spot]:
        """Where the areas are in the picture; to be asked when that has been drawn."""
        if not self.areas:
            return []
        with rc_context(RC):
            canvas = FigureCanvasAgg(self.figure)
            whole = self.figure.get_tightbbox(canvas.get_renderer()).padded(PAD)
        found = []
        for area in self.areas:
            corners = area.axes.transData.transform([(area.left, area.top), (area.right, area.bottom)])
            (left, top), (right, bottom) = corners / self.figure.dpi
            place = (left - whole.x0) / whole.width, (whole.y1 - top) / whole.height
            size = (right - left) / whole.width, (top - bottom) / whole.height
            found.append(Spot(*place, *size, area.words))
        return found

    def draw(self) -> None:
        """Draw now what is shown next, so that to show it takes no time."""
        self._drawn = self.png()

    def save(self, path: str | Path) -> None:
        """Write the picture as PNG."""
        Path(path).write_bytes(self.png())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        data, self._drawn = self._drawn or self.png(), b""
        width = width_of(data)
        bundle = {
            "text/html": page(data, width, self.words, self._tables, self.spots()),
            "image/png": base64.b64encode(data).decode(),
            "text/plain": self.words,
        }
        return bundle, {"image/png": {"alt": self.words, "width": width}}
