"""A drawing: its parts as SVG, and the words of those that have some.

Across, places are shares of the width; down, they are pixels. So a drawing is as wide as the page, and its text keeps
its size. A label shows itself from the width on at which it fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from math import floor, log10

LETTER, TEXT, SMALL = 6.1, 12, 11  # pixels: of a letter of small print at most, of text, of small print
PAD = 8  # pixels that a label needs besides
WIDTHS = (
    200,
    250,
    300,
    350,
    400,
    480,
    560,
    640,
    720,
    800,
    900,
    1000,
    1150,
    1300,
    1500,
    1800,
    2200,
    3000,
    4400,
    7000,
    12000,
)
TICK = 74  # pixels from one label of an axis to the next, at least
MOST_TICKS = 240


@dataclass(frozen=True)
class Mark:
    """A part with words. left, right: shares of the width; top, bottom: pixels. row: for the arrow keys; cell: the n of
    an In[n] and a line that it belongs to. scene: of its document, which it shows; the last line of its words tells how
    to see it without a script."""

    left: float
    right: float
    top: float
    bottom: float
    words: str
    row: int = 0
    cell: tuple[int, int] | None = None
    scene: int | None = None


@dataclass
class Sheet:
    """What is drawn. zoom: whether it can be stretched in time; width: its natural width in pixels, 0 for that of the
    page; beside: the least width at which another sheet may be beside it; name: what it shows."""

    name: str
    zoom: bool = False
    width: int = 0
    beside: int = 0
    height: float = 0.0
    body: list[str] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def rect(self, left: float, right: float, top: float, height: float, look: str) -> str:
        """A rectangle as SVG, which is not drawn by that."""
        place = f'x="{pct(left)}" y="{num(top)}" width="{pct(max(0.0, right - left))}" height="{num(height)}"'
        return f'<rect class="{look}" {place}/>'

    def text(self, x: float, y: float, words: str, look: str = "", more: str = "") -> None:
        """A text whose baseline is at `y`."""
        self.body.append(text(x, y, words, look, more))

    def mark(self, shapes: str, mark: Mark) -> None:
        """Draw shapes that belong together and have words."""
        self.body.append(f'<g class="m" data-i="{len(self.marks)}">{shapes}</g>')
        self.marks.append(mark)
        self.height = max(self.height, mark.bottom)

    def bar(self, mark: Mark, kind: str, labels: Sequence[str] = (), hatched: bool = False) -> None:
        """A bar of a kind, with the first of the labels that it has room for."""
        high = mark.bottom - mark.top
        shapes = self.rect(mark.left, mark.right, mark.top, high, f"k-{kind}")
        if hatched:
            shapes += self.rect(mark.left, mark.right, mark.bottom - STRIP, STRIP, "hatch")
        room = high - STRIP if hatched else high
        shapes += fitted((mark.left + mark.right) / 2, mark.top + room / 2 + 4, mark.right - mark.left, labels, kind)
        self.mark(shapes, mark)

    def two(self, mark: Mark, middle: float, kinds: tuple[str, str], labels: Sequence[str]) -> None:
        """A bar of two kinds, the second from `middle` on and hatched; the label is in the longer one."""
        high = mark.bottom - mark.top
        shapes = self.rect(mark.left, middle, mark.top, high, f"k-{kinds[0]}")
        shapes += self.rect(middle, mark.right, mark.top, high, f"k-{kinds[1]}")
        shapes += self.rect(middle, mark.right, mark.bottom - STRIP, STRIP, "hatch")
        second = mark.right - middle >= middle - mark.left
        left, right, kind = (middle, mark.right, kinds[1]) if second else (mark.left, middle, kinds[0])
        y = mark.top + (high - STRIP) / 2 + 4
        whole = self.rect(mark.left, mark.right, mark.top, high, "hit")
        self.mark(whole + shapes + fitted((left + right) / 2, y, right - left, labels, kind), mark)


STRIP = 5  # pixels of a bar that are hatched


def num(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def pct(share: float) -> str:
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"


def text(x: float, y: float, words: str, look: str = "", more: str = "") -> str:
    classes = f' class="{look}"' if look else ""
    return f'<text x="{pct(x)}" y="{num(y)}"{classes}{more}>{escape(words, quote=False)}</text>'


def head(sheet: Sheet, name: str, more: str, top: float, words: str, row: int) -> None:
    """The line over a row, with its name and what it says of all its bars together; it stays in view."""
    shown = f'<tspan class="s muted" dx="8">{escape(more, quote=False)}</tspan>' if more else ""
    sheet.mark(
        sheet.rect(0, 1, top, 15, "hit")
        + f'<text x="0" y="{num(top + 12)}" class="pin"><tspan class="bold">{escape(name, quote=False)}</tspan>'
        + f"{shown}</text>",
        Mark(0.0, 1.0, top, top + 15, words, row),
    )


def fitted(x: float, y: float, share: float, labels: Sequence[str], kind: str) -> str:
    """Labels in a bar that takes this share of the width: each shows itself where no better one fits."""
    found, until = "", 0
    for words in labels:
        least = from_width((len(words) * LETTER + PAD) / share if share > 0 else float("inf"))
        if least and (not until or least < until):
            below = f" u{until}" if until else ""
            found += text(x, y, words, f"t-{kind} s c w{least}{below}")
            until = least
    return found


def from_width(least: float) -> int:
    """The first of WIDTHS that is enough; 0 if none is."""
    return next((w for w in WIDTHS if w >= least), 0)


# -- axes --------------------------------------------------------------------------------------------


def axis(sheet: Sheet, top: float, low: float, high: float, unit: str) -> None:
    """An axis of numbers below `top`: the wider the sheet, the more of them have a name."""
    sheet.body.append(sheet.rect(0, 1, top, 1, "rule"))
    for value, least in ticks(low, high):
        share = (value - low) / (high - low)
        sheet.body.append(sheet.rect(share, share, top, 5, f"tick w{least}"))
        side = "b" if share < 0.01 else "e" if share > 0.99 else "c"
        sheet.body.append(text(share, top + 17, f"{value:g}", f"s muted {side} w{least}"))
    sheet.text(0, top + 32, unit, "s muted pin")
    sheet.height = top + 38


def ticks(low: float, high: float) -> list[tuple[float, int]]:
    """Round numbers of an axis, each with the least width at which it is shown."""
    span = high - low
    if span <= 0:
        return [(low, WIDTHS[0])]
    found: dict[float, int] = {}
    step = 10.0 ** (floor(log10(span)) + 1)
    while True:
        for by in (1.0, 0.5):  # each a part of the one before, so that those of a width are evenly spaced
            every = step * by
            least = from_width(TICK * span / every)
            if not least or span / every > MOST_TICKS:
                return sorted(found.items()) or [(low, WIDTHS[0])]
            first, last = -(-low // every), (high + every * 1e-9) // every
            for i in range(int(first), int(last) + 1):
                found.setdefault(float(f"{i * every:.12g}"), least)
        step /= 10
