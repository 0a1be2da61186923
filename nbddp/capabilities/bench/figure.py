"""Measured collectives as a picture and as live drawings: time and bus bandwidth by size, with their spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil, floor, log10
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from nbddp.analysis.quantities import duration, size, speed
from nbddp.capabilities.bench.result import Measured
from nbddp.figures.axes import WIDTH, powers_of_two
from nbddp.figures.document.page import Document
from nbddp.figures.document.sheet import Mark, Plot, Sheet, look, named_axis, round_steps
from nbddp.figures.document.svg import stroke
from nbddp.figures.figure import DescribedFigure, remade
from nbddp.figures.palette import FILLS, MUTED, RC
from nbddp.figures.table import Table
from nbddp.launch.topology import counted

LINES = ("-", "--", ":", "-.")
MARKS = "osD^vP*Xh"
HEIGHT = 3.6
MOST_TICKS = 9
NAMES_IN_A_LINE = 5  # of the legend
COLUMNS = ("collective", "size", "median", "first quartile", "third quartile", "algorithm", "bus", "wrong")
FORMATS = {
    "size": size, "median": duration, "first quartile": duration, "third quartile": duration, "algorithm": speed,
    "bus": speed,
}  # fmt: skip


class Bench(DescribedFigure):
    """The figure; `table` has the numbers, in bytes, seconds and bytes per second, and `measured` all repetitions."""

    def __init__(
        self,
        figure: Figure,
        text: Sequence[str],
        table: Table,
        measured: Sequence[Measured],
        document: Document | None = None,
    ):
        super().__init__(figure, text, [table], document=document)
        self.table, self.measured = table, list(measured)


@remade
def draw_bench(measured: Sequence[Measured]) -> Bench:
    """Latency and bus bandwidth by size. Raises ValueError without data."""
    if not measured:
        raise ValueError("nothing was measured")
    low, high = min(m.spread[0] for m in measured), max(m.spread[1] for m in measured)
    document = bench_document(measured, round_numbers(low, high), [right_or_wrong(measured)])
    with rc_context(RC):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        left, right = figure.subplots(1, 2)
        figure.suptitle(title(measured), x=0.01, ha="left", size=10, weight="bold")
        names = list(dict.fromkeys(m.collective for m in measured))
        for i, name in enumerate(names):
            own = [m for m in measured if m.collective == name]
            _curve(left, own, i, [(m.median, *m.spread) for m in own])
            factors = [m.bus_bandwidth * m.median / 1e9 for m in own]  # bus bandwidth is this over the time
            speeds = [(f / m.median, f / m.spread[1], f / m.spread[0]) for f, m in zip(factors, own, strict=True)]
            _curve(right, own, i, speeds)
        _finish(left, "time of a call", measured)
        _times(left, measured)
        _finish(right, "bus bandwidth, GB/s", measured)
        right.set_ylim(bottom=0)
        if len(names) > 1:
            figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=NAMES_IN_A_LINE)
        return Bench(figure, sentences(measured), table(measured), measured, document)


def _curve(axes: Any, own: Sequence[Measured], number: int, values: Sequence[tuple[float, float, float]]) -> None:
    """Medians as a line, the middle half of the repetitions as bars."""
    x, y = [m.bytes for m in own], [v[0] for v in values]
    low, high = ([max(0.0, v[0] - v[1]) for v in values], [max(0.0, v[2] - v[0]) for v in values])
    axes.errorbar(
        x, y, yerr=(low, high), color=FILLS[number % len(FILLS)], ls=LINES[number // len(FILLS) % len(LINES)],
        marker=MARKS[number % len(MARKS)], ms=4, lw=1.4, elinewidth=0.9, capsize=2.5, label=own[0].collective,
    )  # fmt: skip


def _times(axes: Any, measured: Sequence[Measured]) -> None:
    """A logarithmic axis of seconds from a round number to a round number, each labelled with its unit."""
    low, high = min(m.spread[0] for m in measured), max(m.spread[1] for m in measured)
    axes.set_yscale("log")
    ticks = round_numbers(low, high)
    if not ticks:
        return
    axes.set_ylim(ticks[0], ticks[-1])
    axes.set_yticks(ticks, [duration(t).replace(".00 ", " ").replace(".0 ", " ") for t in ticks])
    axes.set_yticks([], minor=True)


def round_numbers(low: float, high: float, most: int = 8) -> list[float]:
    """1, 2 and 5 times powers of ten, or if that are more than `most` those powers, every so many; the first is no
    more than `low`, the last no less than `high`. Empty if `low` is no positive number."""
    if not 0 < low <= high:
        return []
    first, last = floor(log10(low)), ceil(log10(high * (1 - 1e-9)))
    every = [float(f"{n}e{power}") for power in range(first, last + 1) for n in (1, 2, 5)]
    begin = max(i for i, value in enumerate(every) if value <= low * (1 + 1e-9))
    end = min(i for i, value in enumerate(every) if value >= high * (1 - 1e-9) and i > begin)
    if end - begin < most:
        return every[begin : end + 1]
    step = -(-(last - first) // (most - 1))
    return [float(f"1e{power}") for power in range(first, last + step, step)]


def _finish(axes: Any, label: str, measured: Sequence[Measured]) -> None:
    powers_of_two(axes, sorted({m.bytes for m in measured}), lambda t: size(t).replace(".0", ""), MOST_TICKS, size=7.5)
    axes.set_xlabel("size of the buffer")
    axes.set_title(label, loc="left", size=9)
    axes.grid(axis="y", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", labelsize=8, colors=MUTED)
    axes.spines[["top", "right"]].set_visible(False)


# -- the same in words and rows --------------------------------------------------------------------


def table(measured: Sequence[Measured]) -> Table:
    """One row per collective and size."""
    rows = [
        (m.collective, m.bytes, m.median, *m.spread, m.algorithm_bandwidth, m.bus_bandwidth, m.wrong) for m in measured
    ]
    return Table(COLUMNS, rows, formats=FORMATS)


def sentences(measured: Sequence[Measured]) -> list[str]:
    """How fast the smallest and the largest were, and whether all results were right."""
    lines = [title(measured)]
    for name in dict.fromkeys(m.collective for m in measured):
        own = [m for m in measured if m.collective == name]
        least, most = min(own, key=lambda m: m.bytes), max(own, key=lambda m: m.bus_bandwidth)
        lines.append(
            f"{name}: {duration(least.median)} for {size(least.bytes)}; bus bandwidth reaches "
            f"{speed(most.bus_bandwidth)} at {size(most.bytes)}"
        )
    return [*lines, right_or_wrong(measured)]


def right_or_wrong(measured: Sequence[Measured]) -> str:
    wrong = [m for m in measured if m.wrong]
    told = ", ".join(f"{m.collective} of {size(m.bytes)} ({counted(m.wrong, 'element')})" for m in wrong)
    return f"WRONG results: {told}" if wrong else "every element of every result was correct"


def title(measured: Sequence[Measured]) -> str:
    """Which collectives, on how many ranks."""
    names = ", ".join(dict.fromkeys(m.collective for m in measured))
    return f"{names} on {counted(measured[0].ranks, 'rank')}"


# -- the live drawing ------------------------------------------------------------------------------

TALL, NEAR = 230, 9  # pixels: of a plot; around a point that has words
Of = Callable[[Measured], tuple[float, float, float]]


def bench_document(measured: Sequence[Measured], ticks: Sequence[float], said: Sequence[str]) -> Document:
    """Time at the left, bandwidth at the right. ticks: round times around all that was measured; said: what the plots
    do not show."""
    names = list(dict.fromkeys(m.collective for m in measured))
    slow, fast = (ticks[0], ticks[-1]) if ticks else (0.0, 1.0)
    times = _plot("time of a call", measured, (slow, fast), bool(ticks))
    times.grid(ticks[1:] if len(ticks) > 1 else ticks, lambda t: duration(t).replace(".00 ", " ").replace(".0 ", " "))
    most = max((_speeds(m)[2] for m in measured), default=1.0)
    speeds = _plot("bus bandwidth", measured, (0.0, 1.08 * most or 1.0))
    speeds.grid([1e9 * v for v in round_steps(most / 1e9, 6)], speed)
    for plot, of in ((times, lambda m: (m.median, *m.spread)), (speeds, _speeds)):
        for i, name in enumerate(names):
            _series(plot, [m for m in measured if m.collective == name], i, of)
        plot.finish()
        _points(plot, measured, names, of)
        sizes = sorted({m.bytes for m in measured})
        named_axis(plot, sizes, lambda b: size(b).replace(".0", ""), "size of the buffer")
    return Document([times.sheet, speeds.sheet], [(stroke(i, True), name) for i, name in enumerate(names)], said)


def _plot(name: str, measured: Sequence[Measured], y: tuple[float, float], log_y: bool = False) -> Plot:
    sheet = Sheet(f"{name[0].upper()}{name[1:]} by size of the buffer", beside=380)
    sheet.text(0, 13, name, "bold pin")
    sizes = [m.bytes for m in measured]
    low, high = min(sizes), max(sizes)
    x = (low / 1.3, high * 1.3)
    return Plot(sheet, 30, TALL, x, y, log_x=True, log_y=log_y)


def _speeds(m: Measured) -> tuple[float, float, float]:
    factor = m.bus_bandwidth * m.median
    values = [factor / t if t > 0 else 0.0 for t in (m.median, m.spread[1], m.spread[0])]
    return values[0], values[1], values[2]


def _series(plot: Plot, own: Sequence[Measured], number: int, of: Of) -> None:
    """Medians as a line with dots, the middle half of the repetitions as strokes."""
    values = [(m.bytes, *of(m)) for m in sorted(own, key=lambda m: m.bytes)]
    colour = number % 4
    plot.line([(x, y) for x, y, _, _ in values], look(number))
    for x, _, low, high in values:
        if high > low:
            plot.line([(x, low), (x, high)], f"l{colour} x0")
    plot.dots([(x, y) for x, y, _, _ in values], f"d{colour}")


def _points(plot: Plot, measured: Sequence[Measured], names: Sequence[str], of: Of) -> None:
    """What each point is."""
    shares = sorted({plot.across(m.bytes) for m in measured})
    half = min((b - a for a, b in pairwise(shares)), default=0.2) / 2
    for m in sorted(measured, key=lambda m: (names.index(m.collective), m.bytes)):
        x, y = plot.across(m.bytes), plot.down(of(m)[0])
        place = max(0.0, x - half), min(1.0, x + half), y - NEAR, y + NEAR
        sheet = plot.sheet
        shapes = sheet.rect(place[0], place[1], y - NEAR, 2 * NEAR, "hit")
        sheet.mark(shapes, Mark(*place, words(m), names.index(m.collective)))


def words(m: Measured) -> str:
    """What was measured of a collective at a size."""
    low, high = m.spread
    wrong = f"\nWRONG: {m.wrong} elements" if m.wrong else ""
    return (
        f"{m.collective} of {size(m.bytes)} on {m.ranks} ranks\nmedian {duration(m.median)}, quartiles "
        f"{duration(low)} and {duration(high)}\nbandwidth: algorithm {speed(m.algorithm_bandwidth)}, bus "
        f"{speed(m.bus_bandwidth)}{wrong}"
    )
