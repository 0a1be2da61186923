"""The timeline of a step: per rank its compute above its communication, on one clock."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from nbddp.analysis.quantities import duration, size
from nbddp.analysis.steps import Recording
from nbddp.analysis.wait_time import CurvePoint
from nbddp.capabilities.timings.analysis import RankView, StepView, analysed
from nbddp.capabilities.timings.document import other_steps, step_document
from nbddp.capabilities.timings.text import folded, heading, of_bucket, of_rank, of_step, sentences, table, when
from nbddp.figures.axes import WIDTH, Inside, key, legend_above, rows
from nbddp.figures.figure import Area, DescribedFigure, remade
from nbddp.figures.palette import BACKWARD, FILLS, FORWARD, INK, MOVES, MUTED, OPTIMIZER, PAPER, RC, WAITS

PHASES = {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER}
LANE = 0.34
BELOW, NOTE = 0.1, 0.18  # of a lane's units: from the lanes to what is said below them, and the height of that
LETTERS = 120  # in a line of the title
CURVES_FROM = 4  # steps
NAME = 0.06  # of the axes' length, beside them: where the name of a rank is
MOST_COLUMNS = 200  # of the curves that say what they are


@remade
def draw_step(view: StepView, others: str = "") -> DescribedFigure:
    """The figure of a step and of the curves. others: the steps that a page may draw in its place (`other_steps`)."""
    named, said = heading(view), sentences(view)
    with rc_context(RC):
        extra = 1.6 if len(view.curves) >= CURVES_FROM else 0.0
        height = _height(view)
        figure = Figure(figsize=(WIDTH, 1.2 + height + extra), layout="constrained")
        grid = figure.add_gridspec(2 if extra else 1, 1, height_ratios=[1 + height, extra] if extra else [1])
        top = figure.add_subplot(grid[0])
        areas = _timeline(top, view)
        top.set_title("\n".join(textwrap.wrap(f"{named}: {said[0]}", LETTERS)), loc="left", size=9, pad=22)
        if extra:
            areas += _curves(figure.add_subplot(grid[1]), view.curves, view.number)
    return DescribedFigure(figure, [named, *said], [table(view)], areas, step_document(view, others))


def draw_timings(recording: Recording, number: int) -> DescribedFigure:
    """`draw_step` of a recording's step. Raises KeyError if a rank does not have it."""
    view = analysed(recording, number)
    return draw_step(view, other_steps(recording, view))


def _height(view: StepView) -> float:
    """Inches for the timelines: less for a lane where there are many, but never less than its number needs."""
    count = sum(1.0 + mine.depth for mine in view.ranks)  # one of them is the room between ranks
    return count * min(0.3, max(0.13, 14 / count))


def _timeline(axes: Any, view: StepView) -> list[Area]:
    """Draw the ranks, and say what each bar is."""
    length = (view.end - view.begin) / 1e6
    y, ticks, areas = 0.0, [], list[Area]()
    axes.set_xlim(0, length * 1.14)
    for mine in view.ranks:
        height, bars = _rank(axes, mine, view.begin, y)
        words = of_rank(mine, len(view.transfers))
        areas += [*bars, Area(axes, -NAME * axes.get_xlim()[1], 0.0, y - height, y, words)]
        hidden = "no exchange" if mine.hidden_share is None else f"{100 * mine.hidden_share:.0f} % hidden"
        axes.text(length * 1.01, y - height / 2, hidden, va="center", size=8, color=INK)
        ticks.append((y - height / 2, f"rank {mine.rank}"))
        y -= height + 0.25
    rows(axes, *zip(*ticks, strict=True))
    axes.set_ylim(y + 0.1, 0.02)
    _legend(axes)
    axes.text(1.0, 1.0, folded(view), transform=axes.transAxes, ha="right", va="bottom", size=8)
    axes.set_xlabel("milliseconds since the first rank began")
    return areas


def _rank(axes: Any, mine: RankView, begin: int, top: float) -> tuple[float, list[Area]]:
    """Draw one rank's lanes under `top`; their height, and each bar's words."""
    areas = []

    def area(start: int, end: int, at: float, words: str) -> None:
        place = start / 1e6, end / 1e6, at - LANE, at - LANE * 0.06
        areas.append(Area(axes, *place, f"{words}\n{when(start, end)}"))

    for name, (start, end) in mine.phases:
        fill = PHASES[name]
        Inside(axes, _bar(axes, start - begin, end - begin, top, fill), (name,), PAPER, fill)
        area(start - begin, end - begin, top, f"rank {mine.rank} · {name}")
    for of in mine.buckets:
        at = top - LANE * (1 + of.lane)
        sent, start, done = (t - begin for t in (of.bucket.sent, of.start, of.bucket.done))
        bars = [
            (_bar(axes, sent, start, at, WAITS, edge=INK), WAITS),
            (_bar(axes, start, done, at, MOVES, edge=INK, hatch="////"), MOVES),
        ]
        bar, fill = max(bars, key=lambda pair: pair[0].get_width())
        Inside(axes, bar, (f"{of.bucket.index} · {size(of.bucket.bytes)}", str(of.bucket.index)), INK, fill)
        area(sent, done, at, of_bucket(mine.rank, of))
    below = top - LANE * mine.depth
    if mine.tail is None:
        return LANE * mine.depth + 0.1, areas
    left, right = ((t - begin) / 1e6 for t in mine.tail)
    axes.plot([left, right], [below - 0.03] * 2, color=INK, lw=2, solid_capstyle="butt")
    exposed = f"exposed {duration(mine.exposed / 1e9)}"
    axes.text(right, below - BELOW, exposed, size=6.5, ha="right", va="top", color=MUTED)
    return LANE * mine.depth + BELOW + NOTE, areas


def _bar(axes: Any, start: int, end: int, top: float, fill: str, edge: str = PAPER, hatch: str = "") -> Rectangle:
    place, width = (start / 1e6, top - LANE), (end - start) / 1e6
    bar = Rectangle(place, width, LANE * 0.94, fc=fill, ec=edge, lw=0.5, hatch=hatch or None)
    axes.add_patch(bar)
    return bar


def _legend(axes: Any) -> None:
    """What each kind of bar is; kinds differ by hatch and lightness too, never by colour alone."""
    kinds = (
        ("forward", FORWARD, ""), ("backward", BACKWARD, ""), ("optimizer", OPTIMIZER, ""),
        ("bucket waits for the slowest rank", WAITS, ""), ("bucket moves", MOVES, "////"),
    )  # fmt: skip
    keys = [key(*kind) for kind in kinds]
    legend_above(axes, keys, -0.01, len(kinds), borderaxespad=0.3, columnspacing=1.2, handlelength=1.6)


def _curves(axes: Any, some: Sequence[CurvePoint], number: int) -> list[Area]:
    """Draw them; a column for each step, or for the longest of several where there are many, says what it was."""
    numbers = [c.number for c in some]
    axes.plot(numbers, [c.duration / 1e6 for c in some], color=FILLS[0], label="step", lw=1.4)
    axes.plot(numbers, [c.exposed / 1e6 for c in some], color=FILLS[1], label="exposed communication", lw=1.4, ls="--")
    axes.plot(numbers, [c.spread / 1e6 for c in some], color=FILLS[2], label="spread between ranks", lw=1.4, ls=":")
    axes.axvline(number, color=MUTED, lw=0.8)
    axes.set_ylim(0, 1.08 * max(c.duration for c in some) / 1e6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("ms")
    legend_above(axes, None, -0.01, 3, borderaxespad=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    each, height = -(-len(some) // MOST_COLUMNS), axes.get_ylim()[1]
    groups = [some[i : i + each] for i in range(0, len(some), each)]
    return [
        Area(axes, g[0].number - 0.5, g[-1].number + 0.5, 0.0, height, of_step(max(g, key=lambda c: c.duration)))
        for g in groups
    ]
