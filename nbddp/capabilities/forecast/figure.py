"""A forecast as a picture and as live drawings: the parts of a step on more and more ranks, and the efficiency.

Up to the largest world size on which collectives were measured lines are solid; beyond it they are dashed, and
called `extrapolated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nbddp.analysis.quantities import duration, percent, speed
from nbddp.capabilities.forecast.cost import Link, LinkFit
from nbddp.capabilities.forecast.scale import Forecast, Predicted
from nbddp.figures.axes import WIDTH, key, powers_of_two
from nbddp.figures.document.page import Document
from nbddp.figures.document.sheet import Mark, Plot, Point, Sheet, named_axis, round_steps
from nbddp.figures.document.svg import stroke, swatch
from nbddp.figures.figure import DescribedFigure, remade
from nbddp.figures.palette import FILLS, FRAME, INK, MOVES, MUTED, PAPER, RC
from nbddp.figures.table import Table
from nbddp.launch.topology import counted

COMPUTE = "#c9dccd"
WEAK, STRONG = FILLS[0], FILLS[1]
HEIGHT = 3.5
SOLID, WEAK_DASHES, STRONG_DASHES = "-", (0, (5, 2)), (0, (1.2, 1.6))
MOST_TICKS = 8
LONG = 1.0  # seconds: a step from here on is drawn in seconds
COLUMNS = (
    "nodes", "ranks", "weak: step", "exposed", "efficiency", "strong: step", "exposed", "efficiency", "known by",
)  # fmt: skip


@remade
def draw_forecast(some: Forecast) -> DescribedFigure:
    """The figure of a forecast: step time at the left, efficiency at the right."""
    said = [_recorded(some), knee(some), "The text below has the fit, the links and what is assumed."]
    with rc_context(RC):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
        figure.suptitle(f"{some.model}: {knee(some)}", x=0.012, ha="left", size=9.5)
        _parts(left, some)
        _efficiency(right, some)
    return DescribedFigure(figure, sentences(some), [table(some)], document=forecast_document(some, said))


def _parts(axes: Any, some: Forecast) -> None:
    """Compute and exposed communication, one over the other."""
    told = some.told
    unit, per = ("s", 1.0) if max(p.step for p in told) >= LONG else ("ms", 1e3)
    ranks = [p.ranks for p in told]
    compute, step = ([per * t for t in ts] for ts in ([p.compute for p in told], [p.step for p in told]))
    axes.fill_between(ranks, 0, compute, fc=COMPUTE, lw=0)
    axes.fill_between(ranks, compute, step, fc=MOVES, ec=MUTED, hatch="////", lw=0)
    _line(axes, some, ranks, compute, INK, 0.9, WEAK_DASHES)
    _line(axes, some, ranks, step, INK, 1.6, WEAK_DASHES)
    what = some.profile
    axes.plot([what.ranks], [per * what.measured], "D", ms=6.5, mfc=PAPER, mec=INK, mew=1.4, clip_on=False, zorder=5)
    axes.set_ylim(0, 1.42 * max(*step, per * what.measured))
    axes.set_ylabel(f"step time, {unit}")
    batch = "each rank keeps its batch" if some.about == "weak" else "all ranks share one batch"
    axes.set_title(f"{some.about} scaling: {batch}", loc="left", size=9)
    handles = [
        key("exposed communication", MOVES, "////", MUTED),
        key("compute", COMPUTE, edge=MUTED),
        Line2D(
            [], [], marker="D", ls="", ms=6, mfc=PAPER, mec=INK, mew=1.3, label=f"measured {duration(what.measured)}"
        ),
    ]
    axes.legend(handles=handles, loc="upper right", ncols=2, columnspacing=1.2)
    _ranks(axes, some)


def _efficiency(axes: Any, some: Forecast) -> None:
    kinds = (
        (some.weak, WEAK, WEAK_DASHES, "o", "weak"), (some.strong, STRONG, STRONG_DASHES, "s", "strong"),
    )  # fmt: skip
    for told, colour, dashes, marker, _ in kinds:
        ranks, values = [p.ranks for p in told], [100 * p.efficiency for p in told]
        _line(axes, some, ranks, values, colour, 1.8, dashes, marker=marker, ms=3.6)
    _names(axes, [(some.weak, WEAK, "weak"), (some.strong, STRONG, "strong")])
    axes.set_ylim(0, 136)
    axes.set_yticks(range(0, 101, 20), [f"{v} %" for v in range(0, 101, 20)])
    axes.set_title("scaling efficiency, against one rank alone", loc="left", size=9)
    axes.grid(axis="y", color=FRAME, lw=1)
    axes.set_axisbelow(True)
    on = ", extrapolated" if some.weak[-1].ranks > some.extrapolated_from else ""
    lines = [
        Line2D([], [], color=WEAK, ls=WEAK_DASHES if on else SOLID, marker="o", ms=3.6, lw=1.8, label=f"weak{on}"),
        Line2D(
            [], [], color=STRONG, ls=STRONG_DASHES if on else SOLID, marker="s", ms=3.6, lw=1.8, label=f"strong{on}"
        ),
    ]
    axes.legend(handles=lines, loc="upper right", ncols=2, handlelength=3)
    _ranks(axes, some)


def _line(axes: Any, some: Forecast, x: list[int], y: list[float], colour: str, width: float, dashes: Any,
          **more: Any) -> None:  # fmt: skip
    """Solid up to the last measured world size, dashed beyond; both share the point between them."""
    known = sum(r <= some.extrapolated_from for r in x)
    axes.plot(x[:known], y[:known], color=colour, lw=width, ls=SOLID, **more)
    if known < len(x):
        axes.plot(x[max(0, known - 1) :], y[max(0, known - 1) :], color=colour, lw=width, ls=dashes, **more)


def _names(axes: Any, lines: Sequence[tuple[Sequence[Predicted], str, str]]) -> None:
    """Say at each line's end which it is and where it ends, the lower ones at least a line of text apart."""
    floor = 3.0  # percent; above the axis
    for told, colour, name in sorted(lines, key=lambda line: line[0][-1].efficiency):
        last = told[-1]
        at = max(100 * last.efficiency, floor)
        axes.annotate(f"{name} {percent(last.efficiency)}", (last.ranks, at), (7, 0), color=colour,
                      textcoords="offset points", va="center", size=7.5, annotation_clip=False)  # fmt: skip
        floor = at + 8


def _ranks(axes: Any, some: Forecast) -> None:
    """The axis of ranks, each step a doubling, and where the measured ends."""
    seen = [*(p.ranks for p in some.told), some.profile.ranks]
    first, last = min(seen), max(seen)
    axes.set_xlim(first / 1.12, last * 1.12)
    powers_of_two(axes, [p.ranks for p in some.told], "{:,}".format, MOST_TICKS)
    axes.set_xlabel(f"ranks ({some.ranks_per_node} per node)")
    if some.told[-1].ranks > some.extrapolated_from:
        axes.axvline(some.extrapolated_from, ymax=0.84, color=MUTED, lw=0.8)
        axes.annotate("extrapolated →", (some.extrapolated_from, 0.795), (4, 0), xycoords=("data", "axes fraction"),
                      textcoords="offset points", size=7.5, color=INK, va="center")  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)


# -- the same in words and rows --------------------------------------------------------------------


def link(some: Link) -> str:
    """`latency 52.0 µs, bandwidth 1.20 GB/s`."""
    return f"latency {duration(some.latency)}, bandwidth {speed(some.bandwidth)}"


def table(some: Forecast) -> Table:
    """One row per number of nodes."""
    pairs = zip(some.whole_nodes(some.weak), some.whole_nodes(some.strong), strict=True)
    return Table(COLUMNS, [
        (
            weak.nodes, weak.ranks, duration(weak.step), duration(weak.exposed), percent(weak.efficiency),
            duration(strong.step), duration(strong.exposed), percent(strong.efficiency),
            "extrapolated" if weak.ranks > some.extrapolated_from else "fitted",
        )
        for weak, strong in pairs
    ])  # fmt: skip


def sentences(some: Forecast) -> list[str]:
    """What the forecast rests on and what it finds; the assumptions last."""
    return [
        f"forecast from step {some.number} of {some.model}",
        _recorded(some),
        _fitted(some),
        *(f"  {_fit(f)}" for f in some.fits),
        _choice(some),
        f"link within a node: {link(some.intra)}",
        f"link between nodes: {link(some.inter)}",
        knee(some),
        _beyond(some),
        "",
        "Assumed:",
        *some.assumed,
    ]


def _recorded(some: Forecast) -> str:
    what = some.profile
    off = round(100 * (some.here.step / what.measured - 1))
    error = f"{abs(off)} % {'more' if off > 0 else 'less'}" if off else "the same"
    return (
        f"recorded on {counted(what.ranks, 'rank')}: {duration(what.measured)}; the model predicts "
        f"{duration(some.here.step)}, {error}"
    )


def _fitted(some: Forecast) -> str:
    said = f"fitted to {counted(some.chosen.points, 'measured all-reduce')} on {_worlds(some.chosen.ranks)} ranks"
    if some.left_out:
        said += f"; those on {_worlds(some.left_out)} ranks do not fit them and are ignored"
    return f"{said}:"


def _worlds(ranks: Sequence[int]) -> str:
    """`2, 4 and 8`."""
    *first, last = map(str, ranks)
    return f"{', '.join(first)} and {last}" if first else last


def _fit(fit: LinkFit) -> str:
    return f"{fit.algorithm}: {link(fit.link)} (error {percent(fit.error)}, at most {percent(fit.worst)})"


def _choice(some: Forecast) -> str:
    if some.decided:
        return f"forecast with {some.algorithm}, {some.why}"
    return (
        f"forecast with {some.algorithm}; the measurements fit several algorithms. Measure on a second number of "
        "ranks, or choose an algorithm with --algorithm"
    )


def knee(some: Forecast) -> str:
    """From how many nodes on waiting for the network is most of the step."""
    found, nodes = some.knee(), some.whole_nodes(some.told)
    most = "more than half of the step is exposed communication"
    if found is None:
        end = f"up to {counted(nodes[-1].nodes, 'node')}"
        return f"{end} no more than half of the step is exposed communication ({some.about} scaling)"
    if found is nodes[0]:
        return f"already on 1 node {most} ({some.about} scaling)"
    before = nodes[nodes.index(found) - 1].nodes
    return f"beyond {counted(before, 'node')} {most} ({some.about} scaling)"


def _beyond(some: Forecast) -> str:
    return f"everything beyond {counted(some.extrapolated_from, 'rank')} is extrapolated"


# -- the live drawing ------------------------------------------------------------------------------

TALL = 220  # pixels of a plot
WEAK_LINE, STRONG_LINE = 0, 1  # numbers of lines


def forecast_document(some: Forecast, said: Sequence[str]) -> Document:
    """Step time at the left, efficiency at the right. said: what stands above them."""
    keys = [
        (swatch("mint"), "compute"), (swatch("moves"), "exposed communication"), (stroke(3, True), "measured"),
        (stroke(WEAK_LINE, True, False), "weak scaling"), (stroke(STRONG_LINE, True, False), "strong scaling"),
    ]  # fmt: skip
    if some.told[-1].ranks > some.extrapolated_from:
        keys.append((stroke(WEAK_LINE, False, True), f"extrapolated: beyond {counted(some.extrapolated_from, 'rank')}"))
    return Document([_step_sheet(some), _efficiency_sheet(some)], keys, said)


def _plot(some: Forecast, name: str, y: tuple[float, float]) -> Plot:
    sheet = Sheet(f"{name[0].upper()}{name[1:]} by number of ranks", beside=380)
    sheet.text(0, 13, name, "bold pin")
    seen = [*(p.ranks for p in some.told), some.profile.ranks]
    return Plot(sheet, 30, TALL, (min(seen) / 1.2, max(seen) * 1.2), y, log_x=True)


def _step_sheet(some: Forecast) -> Sheet:
    told, measured = some.told, some.profile.measured
    most = max(measured, *(p.step for p in told))
    plot = _plot(some, f"step time, {some.about} scaling", (0.0, 1.12 * most))
    compute, step = [(p.ranks, p.compute) for p in told], [(p.ranks, p.step) for p in told]
    plot.area([(x, 0.0) for x, _ in compute], compute, "k-mint")
    plot.area(compute, step, "k-moves")
    unit = 1.0 if most >= 1 else 1e3
    plot.grid([v / unit for v in round_steps(most * unit, 5)], duration)
    _plot_line(plot, some, step, WEAK_LINE)
    plot.dots([(some.profile.ranks, measured)], "d3")
    _finish_plot(plot, some)
    _columns(plot, some)
    here = plot.across(some.profile.ranks)
    y = plot.down(measured)
    words = f"measured on {counted(some.profile.ranks, 'rank')}: {duration(measured)}"
    plot.sheet.mark(plot.sheet.rect(here - 0.012, here + 0.012, y - 8, 16, "hit"),
                    Mark(here - 0.012, here + 0.012, y - 8, y + 8, words, 1))  # fmt: skip
    return plot.sheet


def _efficiency_sheet(some: Forecast) -> Sheet:
    plot = _plot(some, "scaling efficiency, against one rank alone", (0.0, 1.12))
    plot.grid([0.2, 0.4, 0.6, 0.8, 1.0], percent)
    for number, told in ((WEAK_LINE, some.weak), (STRONG_LINE, some.strong)):
        points = [(p.ranks, p.efficiency) for p in told]
        _plot_line(plot, some, points, number)
        plot.dots(points, f"d{number}")
    _finish_plot(plot, some)
    _columns(plot, some)
    return plot.sheet


def _plot_line(plot: Plot, some: Forecast, points: Sequence[Point], number: int) -> None:
    """Solid up to the last measured world size, dashed beyond; both share the point between them."""
    known = sum(x <= some.extrapolated_from for x, _ in points)
    if known > 1:
        plot.line(points[:known], f"l{number} x0")
    if known < len(points):
        plot.line(points[max(0, known - 1) :], f"l{number} x1")


def _finish_plot(plot: Plot, some: Forecast) -> None:
    plot.finish()
    named_axis(plot, [p.ranks for p in some.told], "{:,.0f}".format, f"ranks ({some.ranks_per_node} per node)")
    if some.told[-1].ranks > some.extrapolated_from:
        at = plot.across(some.extrapolated_from)
        plot.sheet.body.append(plot.sheet.rect(at, at, plot.top, plot.height, "tick"))


def _columns(plot: Plot, some: Forecast) -> None:
    """What is predicted for each number of ranks, from half way to the one before to half way to the next."""
    about, other, others = ("weak", "strong", some.strong) if some.told is some.weak else ("strong", "weak", some.weak)
    places = [plot.across(p.ranks) for p in some.told]
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(places)), 1.0]
    for p, its, (left, right) in zip(some.told, others, pairwise(edges), strict=True):
        beyond = "\nextrapolated" if p.ranks > some.extrapolated_from else ""
        words = (
            f"{counted(p.ranks, 'rank')} on {counted(p.nodes, 'node')}, {about} scaling: {duration(p.step)}\n"
            f"compute {duration(p.compute)}, exposed communication {duration(p.exposed)}\nefficiency "
            f"{percent(p.efficiency)} ({other}: {percent(its.efficiency)}){beyond}"
        )
        shapes = plot.sheet.rect(left, right, plot.top, plot.height, "hit")
        plot.sheet.mark(shapes, Mark(left, right, plot.top, plot.top + plot.height, words, 0))
