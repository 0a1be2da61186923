"""A figure that also says itself in words: a picture over its words on a page, PNG, and text for consoles."""

from __future__ import annotations

import base64
import functools
import io
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from matplotlib import get_data_path, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from nbddp.figures.document.page import Document
from nbddp.figures.document.page import page as document_page
from nbddp.figures.html import Spot, page
from nbddp.figures.palette import MUTED, PAPER, RC
from nbddp.figures.table import Table
from nbddp.protocol.messages import Metadata, MimeBundle

DPI = 192  # two pixels of a picture to one of the page's: sharp on every screen, and 9 points are 9 points
PAD = 0.12  # inches around a picture
COLOURS = 128  # in a PNG: a third of the bytes of all colours, and no difference can be seen
CAPTION = 8.5  # points
RULE = "#d0d0d0"  # between one still and the next


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


class DescribedFigure:
    """A matplotlib figure and its content in words: `text`, and tables below it. `str` and `repr` are both. areas:
    parts of the figure whose words a page shows where the pointer rests. document: the same as a live drawing, which
    pages show in place of the picture, until somebody takes the figure and may change it.

    A notebook keeps what its cells have returned (`Out`), and a figure takes megabytes. So one that can be made again
    (`remade`) is let go once its picture has been taken, and made again if somebody asks for it.
    """

    def __init__(
        self,
        figure: Figure,
        text: str | Sequence[str],
        tables: Sequence[Table] = (),
        areas: Sequence[Area] = (),
        document: Document | None = None,
    ):
        self._text, self._tables = text if isinstance(text, str) else "\n".join(text), tuple(tables)
        self.words = _words(self._text, self._tables)
        self._figure: Figure | None = figure
        self._areas, self._document = tuple(areas), document
        self._lent = False  # the figure, to somebody who may change it
        self._taken: tuple[bytes, list[Spot]] | None = None
        self._html = b""  # of what was taken, packed
        self._again = b""
        self._captions: list[str] = []

    @property
    def figure(self) -> Figure:
        self._lent, self._taken = True, None
        return self._whole()[0]

    @property
    def areas(self) -> tuple[Area, ...]:
        self._lent = True
        return self._whole()[1]

    def _whole(self) -> tuple[Figure, tuple[Area, ...]]:
        if self._figure is None:
            draw, args, named = pickle.loads(zlib.decompress(self._again))
            made = draw(*args, **named)
            self._figure, self._areas = made._whole()
            self._document = made._document
        return self._figure, self._areas

    def __repr__(self) -> str:
        return self.words

    def png(self) -> bytes:
        return self._picture()[0]

    def spots(self) -> list[Spot]:
        """Where the areas are in the picture."""
        return self._picture()[1]

    def caption(self, line: str) -> None:
        """Have a line below the picture, and below the text."""
        self._text = f"{self._text}\n{line}"
        self.words = _words(self._text, self._tables)
        self._captions, self._taken = [*self._captions, line], None

    def draw(self) -> None:
        """Draw now what is shown next, so that to show it takes no time."""
        self._picture()

    def _picture(self) -> tuple[bytes, list[Spot]]:
        if self._taken is not None:
            return self._taken
        figure, areas = self._whole()
        taken = _captioned(_png(figure), _spots(figure, areas), "\n".join(self._captions))
        self._html = zlib.compress(self._page(*taken).encode())
        if self._lent:
            return taken
        self._taken = taken
        if self._again:
            figure.clear()  # its parts refer to each other, and would wait for the collector of garbage
            self._figure, self._areas, self._document = None, (), None
        return taken

    def _page(self, png: bytes, spots: Sequence[Spot]) -> str:
        if self._document is None or self._lent:
            return page(png, width_of(png), self._text, self._tables, spots)
        return document_page(self._document, self._text, self._tables, self._captions)

    def save(self, path: str | Path) -> None:
        """Write the picture as PNG."""
        Path(path).write_bytes(self.png())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[MimeBundle, Metadata]:
        data, _ = self._picture()
        width = width_of(data)
        bundle = {
            "text/html": zlib.decompress(self._html).decode(),
            "image/png": base64.b64encode(data).decode(),
            "text/plain": self.words,
        }
        return bundle, {"image/png": {"alt": self.words, "width": width}}


def _words(text: str, tables: Sequence[Table]) -> str:
    return "\n".join([text, *(line for t in tables for line in ("", repr(t)))])


def _captioned(png: bytes, spots: list[Spot], caption: str) -> tuple[bytes, list[Spot]]:
    """The picture with a line below it, and where the areas are then."""
    if not caption:
        return png, spots
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    font, height, margin = _lettering()
    lines = _wrapped(caption, font, picture.width - 2 * margin)
    whole = Image.new("RGB", (picture.width, picture.height + len(lines) * height + margin), PAPER)
    whole.paste(picture, (0, 0))
    ImageDraw.Draw(whole).multiline_text((margin, picture.height), "\n".join(lines), font=font, fill=MUTED)
    packed, share = io.BytesIO(), picture.height / whole.height
    whole.quantize(COLOURS).save(packed, "PNG")
    return packed.getvalue(), [replace(s, top=s.top * share, height=s.height * share) for s in spots]


def _lettering() -> tuple[ImageFont.FreeTypeFont, int, int]:
    """The font of captions, the height of a line, and the margin, in pixels."""
    file = Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    font = ImageFont.truetype(str(file), round(CAPTION * DPI / 72))
    return font, round(CAPTION * 1.4 * DPI / 72), round(PAD * DPI)


def _wrapped(text: str, font: ImageFont.FreeTypeFont, width: float) -> list[str]:
    """Lines of at most this width, in pixels; a word that is wider has its own."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with rc_context(RC):
        FigureCanvasAgg(figure)
        figure.savefig(buffer, format="png", dpi=DPI, bbox_inches="tight", pad_inches=PAD)
    packed = io.BytesIO()
    Image.open(buffer).convert("RGB").quantize(COLOURS).save(packed, "PNG")
    return packed.getvalue()


def _spots(figure: Figure, areas: Sequence[Area]) -> list[Spot]:
    """Where these are in the picture; to be asked when that has been drawn."""
    if not areas:
        return []
    with rc_context(RC):
        canvas = FigureCanvasAgg(figure)
        whole = figure.get_tightbbox(canvas.get_renderer()).padded(PAD)
    found = []
    for area in areas:
        corners = area.axes.transData.transform([(area.left, area.top), (area.right, area.bottom)])
        (left, top), (right, bottom) = corners / figure.dpi
        place = (left - whole.x0) / whole.width, (whole.y1 - top) / whole.height
        size = (right - left) / whole.width, (top - bottom) / whole.height
        found.append(Spot(*place, *size, area.words))
    return found


Drawn = TypeVar("Drawn", bound=DescribedFigure)
Given = ParamSpec("Given")


def remade(draw: Callable[Given, Drawn]) -> Callable[Given, Drawn]:
    """For a function of a module that draws data: what it returns keeps the data, packed, in place of the figure. Not
    where it draws into axes of somebody's."""

    @functools.wraps(draw)
    def drawn(*args: Given.args, **named: Given.kwargs) -> Drawn:
        made = draw(*args, **named)
        if named.get("axes") is None and not any(isinstance(a, Axes) for a in args):
            made._again = zlib.compress(pickle.dumps((drawn, args, named)), 1)
        return made

    return drawn


class Describable(Protocol):
    def describe(self) -> str: ...


Data = TypeVar("Data", bound=Describable)


def described(draw: Callable[[Data], Figure]) -> Callable[[Data], DescribedFigure]:
    """For a function that draws what describes itself: it draws under our settings, and the words are the data's."""

    @functools.wraps(draw)
    def drawn(some: Data) -> DescribedFigure:
        with rc_context(RC):
            return DescribedFigure(draw(some), some.describe())

    return drawn


# -- several as one still picture ------------------------------------------------------------------


def stills(figures: Sequence[DescribedFigure], captions: Sequence[str]) -> bytes:
    """PNG of the figures from top to bottom, each under its caption."""
    font, line, margin = _lettering()
    pictures = [Image.open(io.BytesIO(f.png())).convert("RGB") for f in figures]
    widths = [*(p.width for p in pictures), *(round(font.getlength(c)) + 2 * margin for c in captions)]
    height = sum(p.height + line + margin for p in pictures)
    whole = Image.new("RGB", (max(widths), height), PAPER)
    pen = ImageDraw.Draw(whole)
    y = 0
    for picture, caption in zip(pictures, captions, strict=True):
        if y:
            pen.line((margin, y, whole.width - margin, y), fill=RULE, width=2)
        pen.text((margin, y + margin), caption, font=font, fill=MUTED)
        y += line + margin
        whole.paste(picture, (0, y))
        y += picture.height
    buffer = io.BytesIO()
    whole.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
