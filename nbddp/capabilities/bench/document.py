"""What a benchmark of collectives measured, as live drawings: time and bus bandwidth by size. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from nbddp.analysis.quantities import duration, size, speed
from nbddp.capabilities.bench.result import Measured
from nbddp.figures.document.page import Document
from nbddp.figures.document.sheet import Mark, Plot, Sheet, look, named_axis, round_steps
from nbddp.figures.document.svg import stroke

HEIGHT, NEAR = 230, 9  # pixels: of a plot; around a point that has words
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
    return Plot(sheet, 30, HEIGHT, x, y, log_x=True, log_y=log_y)


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
