"""A forecast as live drawings: step time on more and more ranks, and how much of the ranks' time it uses. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.analysis.quantities import duration, percent
from nbddp.capabilities.forecast.scale import Forecast, Predicted
from nbddp.figures.document.page import Document
from nbddp.figures.document.sheet import Mark, Plot, Point, Sheet, named_axis, round_steps
from nbddp.figures.document.svg import stroke, swatch
from nbddp.launch.topology import counted

HEIGHT = 220  # pixels of a plot
WEAK, STRONG = 0, 1  # numbers of lines


def forecast_document(some: Forecast, said: Sequence[str]) -> Document:
    """Step time at the left, efficiency at the right. said: what stands above them."""
    keys = [
        (swatch("mint"), "compute"), (swatch("moves"), "exposed communication"), (stroke(3, True), "measured"),
        (stroke(WEAK, True, False), "weak scaling"), (stroke(STRONG, True, False), "strong scaling"),
    ]  # fmt: skip
    if some.told[-1].ranks > some.extrapolated_from:
        keys.append((stroke(WEAK, False, True), f"extrapolated: beyond {counted(some.extrapolated_from, 'rank')}"))
    return Document([_step_time(some), _efficiency(some)], keys, said)


def _plot(some: Forecast, name: str, y: tuple[float, float]) -> Plot:
    sheet = Sheet(f"{name[0].upper()}{name[1:]} by number of ranks", beside=380)
    sheet.text(0, 13, name, "bold pin")
    seen = [*(p.ranks for p in some.told), some.profile.ranks]
    return Plot(sheet, 30, HEIGHT, (min(seen) / 1.2, max(seen) * 1.2), y, log_x=True)


def _step_time(some: Forecast) -> Sheet:
    told, measured = some.told, some.profile.measured
    most = max(measured, *(p.step for p in told))
    plot = _plot(some, f"step time, {some.about} scaling", (0.0, 1.12 * most))
    compute, step = [(p.ranks, p.compute) for p in told], [(p.ranks, p.step) for p in told]
    plot.area([(x, 0.0) for x, _ in compute], compute, "k-mint")
    plot.area(compute, step, "k-moves")
    unit = 1.0 if most >= 1 else 1e3
    plot.grid([v / unit for v in round_steps(most * unit, 5)], duration)
    _line(plot, some, step, WEAK)
    plot.dots([(some.profile.ranks, measured)], "d3")
    _finish(plot, some)
    for p in told:
        _column(plot, some, p, told, some.about, 0)
    here = plot.across(some.profile.ranks)
    y = plot.down(measured)
    words = f"measured on {counted(some.profile.ranks, 'rank')}: {duration(measured)}"
    plot.sheet.mark(plot.sheet.rect(here - 0.012, here + 0.012, y - 8, 16, "hit"),
                    Mark(here - 0.012, here + 0.012, y - 8, y + 8, words, 1))  # fmt: skip
    return plot.sheet


def _efficiency(some: Forecast) -> Sheet:
    plot = _plot(some, "scaling efficiency, against one rank alone", (0.0, 1.12))
    plot.grid([0.2, 0.4, 0.6, 0.8, 1.0], percent)
    for number, told in ((WEAK, some.weak), (STRONG, some.strong)):
        points = [(p.ranks, p.efficiency) for p in told]
        _line(plot, some, points, number)
        plot.dots(points, f"d{number}")
    _finish(plot, some)
    for p in some.told:
        _column(plot, some, p, some.told, some.about, 0)
    return plot.sheet


def _line(plot: Plot, some: Forecast, points: Sequence[Point], number: int) -> None:
    """Solid up to the last measured world size, dashed beyond; both share the point between them."""
    known = sum(x <= some.extrapolated_from for x, _ in points)
    if known > 1:
        plot.line(points[:known], f"l{number} x0")
    if known < len(points):
        plot.line(points[max(0, known - 1) :], f"l{number} x1")


def _finish(plot: Plot, some: Forecast) -> None:
    plot.finish()
    named_axis(plot, [p.ranks for p in some.told], "{:,.0f}".format, f"ranks ({some.ranks_per_node} per node)")
    if some.told[-1].ranks > some.extrapolated_from:
        at = plot.across(some.extrapolated_from)
        plot.sheet.body.append(plot.sheet.rect(at, at, plot.top, plot.height, "tick"))


def _column(plot: Plot, some: Forecast, p: Predicted, told: Sequence[Predicted], about: str, row: int) -> None:
    """What is predicted for a number of ranks, from its half way to the one before to that to the next."""
    places = [plot.across(q.ranks) for q in told]
    i, at = told.index(p), plot.across(p.ranks)
    left = (places[i - 1] + at) / 2 if i else 0.0
    right = (places[i + 1] + at) / 2 if i + 1 < len(told) else 1.0
    other = (some.strong if told is some.weak else some.weak)[i]
    beyond = "\nextrapolated" if p.ranks > some.extrapolated_from else ""
    words = (
        f"{counted(p.ranks, 'rank')} on {counted(p.nodes, 'node')}, {about} scaling: {duration(p.step)}\n"
        f"compute {duration(p.compute)}, exposed communication {duration(p.exposed)}\nefficiency "
        f"{percent(p.efficiency)} ({'weak' if told is some.strong else 'strong'}: {percent(other.efficiency)}){beyond}"
    )
    sheet = plot.sheet
    sheet.mark(sheet.rect(left, right, plot.top, plot.height, "hit"),
               Mark(left, right, plot.top, plot.top + plot.height, words, row))  # fmt: skip
