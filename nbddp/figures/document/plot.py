"""Lines over an axis of numbers: a part of a sheet in which paths stretch with the width, and their strokes do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log

from nbddp.figures.document.colours import dashes
from nbddp.figures.document.sheet import LETTER, PAD, TICK, WIDTHS, Sheet, from_width, num, text

ACROSS = 10_000  # units of a path from the left side to the right one
Point = tuple[float, float]


@dataclass
class Plot:
    """A plot of `height` pixels below `top`. x, y: the least and the largest value of each axis; log_x, log_y: whether
    its values are drawn by their logarithms."""

    sheet: Sheet
    top: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]
    log_x: bool = False
    log_y: bool = False
    paths: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

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
            self.names.append(text(0, y - 3, name(value), "s muted pin halo"))

    def finish(self) -> None:
        """Put the paths into the sheet, and the names of the grid over them."""
        inner = f'<svg x="0" y="{num(self.top)}" width="100%" height="{num(self.height)}" overflow="visible" '
        inner += f'viewBox="0 0 {ACROSS} {num(self.height)}" preserveAspectRatio="none">{"".join(self.paths)}</svg>'
        self.sheet.body += [inner, *self.names]
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
                    sheet.rect(share, share, top, 5, f"tick w{least}"),
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
