"""A drawing: its parts as SVG, and the text of those that have some.

Across, places are shares of the width; down, they are pixels. So a drawing is as wide as the page, and its text keeps
its size. A label shows itself from the width on at which it fits. Each kind of part has a colour for a light and for a
dark page; text has 4.5:1 on its fill. A `Plot` has lines over an axis of numbers: its paths stretch with the width, and
their strokes do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from math import floor, log, log10

from nbddp.figures.palette import BACKWARD, FILLS, FORWARD, INK, MOVES, MUTED, OPTIMIZER, TINTS, WAITS

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
    """A part with words. left, right: shares of the width; top, bottom: pixels. row: for the arrow keys; cells: each
    the n of an In[n] and a line that it belongs to. scene: of its document, which it shows; the last line of its words
    tells how to see it without a script."""

    left: float
    right: float
    top: float
    bottom: float
    words: str
    row: int = 0
    cells: Sequence[tuple[int, int]] = ()
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

    def tick(self, at: float, top: float, height: float, width: float = 1, look: str = "") -> str:
        """An upright mark of some pixels as SVG. A rectangle without a width would not be drawn."""
        place = f'x="{pct(at)}" y="{num(top)}" width="{num(width)}" height="{num(height)}"'
        return f'<rect class="{f"tick {look}".strip()}" {place} transform="translate({num(-width / 2)})"/>'

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
        sheet.body.append(sheet.tick(share, top, 5, look=f"w{least}"))
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


# -- colours -----------------------------------------------------------------------------------------

WHITE, NIGHT = "#ffffff", "#10161c"  # inks on strong fills: on a light page, on a dark one
BRIGHT, PALE = "#e8e8e8", "#b4b4b4"  # inks on a dark page: text, small print


@dataclass(frozen=True)
class Colour:
    """On a light page, and on a dark one."""

    light: str
    dark: str

    def css(self, name: str) -> str:
        """A declaration; browsers without `light-dark()` take the first."""
        return f"{name}:{self.light};{name}:light-dark({self.light},{self.dark})"


@dataclass(frozen=True)
class Fill:
    """A kind of bar. ink: of its label; edge: its outline; hatched: a strip of lines along its lower edge, so that
    kinds differ without colours. A label never lies on the strip."""

    fill: Colour
    ink: Colour
    edge: Colour | None = None
    hatched: bool = False


INKS = {"ink": Colour(INK, BRIGHT), "muted": Colour(MUTED, PALE)}
GRID = Colour("#d8d8d8", "#454545")
FRAME = Colour("#767676", "#8c8c8c")  # 3:1 on both pages
STRONG, SOFT = Colour(WHITE, NIGHT), INKS["ink"]
LIT = ("#86b6e3", "#e9a35c", "#74c483", "#dd8fc0")  # FILLS on a dark page
SHADE = ("#22384d", "#4d361f", "#21422a", "#4a2a40")  # TINTS on a dark page
SERIES = tuple(Colour(fill, lit) for fill, lit in zip(FILLS, LIT, strict=True))
AREAS = tuple(Colour(tint, shade) for tint, shade in zip(TINTS, SHADE, strict=True))


def _strong(light: str) -> Fill:
    return Fill(Colour(light, LIT[FILLS.index(light)]), STRONG)


def dashes(number: int) -> int:
    """Of the line with this number, which of the dashes."""
    return (number + number // len(FILLS)) % len(FILLS)


KINDS: dict[str, Fill] = {
    "forward": _strong(FORWARD),
    "backward": _strong(BACKWARD),
    "optimizer": _strong(OPTIMIZER),
    "waits": Fill(Colour(WAITS, "#3d3226"), SOFT, FRAME),
    "moves": Fill(Colour(MOVES, "#70481b"), SOFT, FRAME, hatched=True),
    "lost": Fill(Colour("#ffffff00", "#ffffff00"), SOFT, FRAME, hatched=True),
    "blue": _strong(FILLS[0]),
    "brown": _strong(FILLS[1]),
    "green": _strong(FILLS[2]),
    "purple": _strong(FILLS[3]),
    "tint": Fill(AREAS[0], SOFT, FRAME),
    "tan": Fill(AREAS[1], SOFT, FRAME),
    "mint": Fill(AREAS[2], SOFT, FRAME),
    "paper": Fill(Colour("#ffffff", "#14181c"), SOFT, FRAME),
    "none": Fill(Colour("#ffffff00", "#ffffff00"), SOFT, FRAME),
}


# -- plots -------------------------------------------------------------------------------------------

ACROSS = 10_000  # units of a path from the left side to the right one
Point = tuple[float, float]


@dataclass
class Plot:
    """A plot of `height` pixels below `top`. x, y: the least and the largest value of each axis; log_x, log_y: whether
    its values are drawn by their logarithms. names: of its grid, each with its height; filled: whether areas lie behind
    them."""

    sheet: Sheet
    top: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]
    log_x: bool = False
    log_y: bool = False
    paths: list[str] = field(default_factory=list)
    names: list[tuple[float, str]] = field(default_factory=list)
    filled: bool = False

    def across(self, value: float) -> float:
        """As a share of the width."""
        return _share(value, *self.x, self.log_x)

    def down(self, value: float) -> float:
        """In pixels of the sheet."""
        return self.top + self.height * (1 - _share(value, *self.y, self.log_y))

    def line(self, points: Sequence[Point], look: str) -> None:
        self.paths.append(f'<path class="line {look}" d="{self._path(points)}"/>')

    def area(self, lower: Sequence[Point], upper: Sequence[Point], look: str) -> None:
        """Between two lines."""
        self.filled = True
        around = [*upper, *reversed(lower)]
        self.paths.append(f'<path class="{look}" d="{self._path(around)}Z"/>')

    def dots(self, points: Sequence[Point], look: str) -> None:
        drawn = "".join(f"{self._path([point])}h.1" for point in points)
        self.paths.append(f'<path class="dot {look}" d="{drawn}"/>')

    def _path(self, points: Sequence[Point]) -> str:
        places = (f"{num(ACROSS * self.across(x))} {num(self.down(y) - self.top)}" for x, y in points)
        return "M" + "L".join(places)

    def grid(self, values: Sequence[float], name: Callable[[float], str]) -> None:
        """Lines at these values, which their names stand on."""
        for value in values:
            y = self.down(value)
            self.sheet.body.append(self.sheet.rect(0, 1, y, 1, "grid"))
            self.names.append((y - 3, name(value)))

    def finish(self) -> None:
        """Put the paths into the sheet, and the names of the grid over them."""
        inner = f'<svg x="0" y="{num(self.top)}" width="100%" height="{num(self.height)}" overflow="visible" '
        inner += f'viewBox="0 0 {ACROSS} {num(self.height)}" preserveAspectRatio="none">{"".join(self.paths)}</svg>'
        look = "s pin halo" if self.filled else "s muted pin halo"  # muted text is too faint on an area
        self.sheet.body += [inner, *(text(0, y, name, look) for y, name in self.names)]
        self.sheet.height = max(self.sheet.height, self.top + self.height)


def look(number: int) -> str:
    """The classes of a line: of sixteen, no two have colour and dashes in common."""
    return f"l{number % 4} x{dashes(number)}"


def _share(value: float, low: float, high: float, logarithmic: bool) -> float:
    if logarithmic:
        value, low, high = log(value), log(low), log(high)
    return (value - low) / (high - low) if high > low else 0.5


def named_axis(plot: Plot, values: Sequence[float], name: Callable[[float], str], unit: str) -> None:
    """An axis with names at these values below a plot: those that have room at a width."""
    sheet, top = plot.sheet, plot.top + plot.height
    sheet.body.append(sheet.rect(0, 1, top, 1, "rule"))
    shown: list[float] = []
    for every in (8, 4, 2, 1):
        for value in values[::every]:
            if value in shown:
                continue
            shown.append(value)
            share, gap = plot.across(value), _gap(plot, values, every)
            least = from_width(max(TICK * 0.8, len(name(value)) * LETTER + PAD) / gap) if gap else WIDTHS[0]
            side = "b" if share < 0.05 else "e" if share > 0.95 else "c"
            if least:
                look = f"s muted {side} w{least}"
                sheet.body += [
                    sheet.tick(share, top, 5, look=f"w{least}"),
                    text(share, top + 17, name(value), look),
                ]
    sheet.text(0, top + 32, unit, "s muted pin")
    sheet.height = top + 38


def _gap(plot: Plot, values: Sequence[float], every: int) -> float:
    some = [plot.across(v) for v in values[::every]]
    return min((b - a for a, b in pairwise(some)), default=0.0)


def round_steps(high: float, most: int = 4) -> list[float]:
    """Round numbers from above 0 to `high`, at most `most`."""
    if high <= 0:
        return []
    step = 10.0 ** len(str(int(high)))
    found: list[float] = []
    while step > high / 1e6:
        for by in (1.0, 0.5, 0.2):
            values = [float(f"{i * by * step:.12g}") for i in range(1, int(high / (by * step) + 1e-9) + 1)]
            if len(values) > most:
                return found
            found = values or found
        step /= 10
    return found
