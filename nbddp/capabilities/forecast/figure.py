"""The figure of a forecast: the parts of a step on more and more ranks, and the efficiency.

Up to the largest world size on which collectives were measured lines are solid; beyond it they are dashed, and
called `extrapolated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nbddp.analysis.quantities import duration, percent, speed
from nbddp.capabilities.forecast.cost import Link, LinkFit
from nbddp.capabilities.forecast.document import forecast_document
from nbddp.capabilities.forecast.scale import Forecast, Predicted
from nbddp.figures.axes import WIDTH, key, powers_of_two
from nbddp.figures.figure import DescribedFigure, remade
from nbddp.figures.palette import FILLS, FRAME, INK, MOVES, MUTED, PAPER, RC
from nbddp.launch.topology import counted
from nbddp.output.table import Table

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
def draw_forecast(some: Forecast, axes: Sequence[Any] | None = None) -> DescribedFigure:
    """The figure of a forecast: step time at the left, efficiency at the right; or in two given axes."""
    said = [_recorded(some), knee(some), "The text below has the fit, the links and what is assumed."]
    document = forecast_document(some, said) if axes is None else None
    with rc_context(RC):
        if axes is None:
            figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
            axes = figure.subplots(1, 2, width_ratios=[1.15, 1])
            figure.suptitle(f"{some.model}: {knee(some)}", x=0.012, ha="left", size=9.5)
        left, right = axes
        _parts(left, some)
        _efficiency(right, some)
    return DescribedFigure(left.figure, sentences(some), [table(some)], document=document)


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
