"""The memory of each rank over a step: a curve per rank on one scale, its peak marked, over the step's phases. It is
drawn as a picture and as a live drawing.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from nbddp.analysis.quantities import duration, size
from nbddp.capabilities.memory.history import RankAllocations
from nbddp.capabilities.memory.parts import unit
from nbddp.capabilities.memory.timeline import (
    Allocations,
    heading,
    sentences,
    shown_ranks,
    signed,
    table,
)
from nbddp.figures.axes import LINE, WIDTH, key, place, titled
from nbddp.figures.document.page import Document
from nbddp.figures.document.sheet import Mark, Plot, Point, Sheet, axis, head, round_steps
from nbddp.figures.document.svg import stroke, swatch
from nbddp.figures.figure import DescribedFigure, remade
from nbddp.figures.palette import BACKWARD, FILLS, FORWARD, INK, OPTIMIZER, PAPER, RC, TINTS

LEFT, RIGHT, BOTTOM, LEGEND, BETWEEN = 0.95, 0.3, 0.5, 0.34, 0.12  # inches, as all below
LETTERS = 135  # in a line under the title
STRIP = 0.12  # of the phases, under a curve
MOST_PHASES = 60  # more cannot be distinguished
PHASES = {  # fill, hatch and its colour
    "forward": (FORWARD, "", FORWARD),
    "backward": (BACKWARD, "\\\\\\", "#5f9a68"),
    "optimizer": (OPTIMIZER, "xxx", "#b6779f"),
}


@remade
def draw_allocations(found: Allocations) -> DescribedFigure:
    """The figure: a row per rank, at most 16, those with the highest and the lowest peak among them."""
    with rc_context(RC):
        text = [heading(found), *sentences(found)]
        return DescribedFigure(_figure(found), text, [table(found)], document=allocations_document(found))


def _figure(found: Allocations) -> Figure:
    ranks = shown_ranks(found)
    texts = [line for text in sentences(found) for line in textwrap.wrap(text, LETTERS)]
    row = 1.0 if len(ranks) <= 4 else 0.62
    head = 0.38 + LINE * len(texts) + LEGEND
    height = head + len(ranks) * (row + BETWEEN) + BOTTOM
    figure = titled(height, heading(found), texts, 0.32)
    name, scale = unit(max(r.window.peak for r in ranks))
    length = max(r.length for r in ranks) / 1e6
    for i, rank in enumerate(ranks):
        axes = place(figure, LEFT, head + i * (row + BETWEEN), WIDTH - LEFT - RIGHT, row)
        axes.set_xlim(0, length)
        _rank(axes, rank, scale, name, _range(ranks, scale), row)
        if i < len(ranks) - 1:
            axes.set_xticklabels([])
    axes.set_xlabel(f"milliseconds since the {'cell' if found.step is None else 'step'} began on the rank")
    _legend(figure, head, height, found)
    return figure


def _range(ranks: Sequence[RankAllocations], scale: float) -> tuple[float, float]:
    """From zero, or from just below all curves where these would be flat lines far above it."""
    levels = [level / scale for r in ranks for _, level in r.window.points]
    low, high = min(levels), max(max(levels), 1e-9)
    room = 0.32 * max(high - low, 0.02 * abs(high), 1e-9)  # above: the peak's label
    return (0.0 if 0 <= low < 0.8 * high else low - room / 2), high + room


def _rank(axes: Any, rank: RankAllocations, scale: float, name: str, limits: tuple[float, float], row: float) -> None:
    low, high = limits
    strip = STRIP / row * (high - low)
    axes.set_ylim(low - strip, high)
    times = [t / 1e6 for t, _ in rank.window.points]
    levels = [level / scale for _, level in rank.window.points]
    line = {"drawstyle": "steps-post"} if not rank.window.samples else {}
    step = {"step": "post"} if not rank.window.samples else {}
    axes.fill_between(times, low, levels, color=TINTS[0], lw=0, **step)
    axes.plot(times, levels, color=FILLS[0], lw=1.2, **line)
    _phases(axes, rank, low, strip)
    at, peak = rank.window.at / 1e6, rank.window.peak / scale
    axes.plot([at], [peak], "o", color=INK, ms=4, clip_on=False, zorder=5)
    right = at > 0.85 * axes.get_xlim()[1]
    axes.annotate(f"peak {size(rank.window.peak)}", (at, peak), xytext=(-6 if right else 6, 3), color=INK, size=7.5,
                  textcoords="offset points", ha="right" if right else "left", va="bottom")  # fmt: skip
    axes.yaxis.set_major_locator(MaxNLocator(3 if row > 0.8 else 2))
    axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= high])
    axes.tick_params(labelsize=7.5)
    axes.set_ylabel(f"rank {rank.rank}\n{name}", rotation=0, ha="right", va="center", size=8, labelpad=6)
    axes.spines[["top", "right"]].set_visible(False)


def _phases(axes: Any, rank: RankAllocations, low: float, strip: float) -> None:
    """Under the curve; none where there are too many to distinguish."""
    some = [p for p in rank.phases if p.name in PHASES]
    for phase in some if len(some) <= MOST_PHASES else ():
        fill, hatch, lines = PHASES[phase.name]
        corner, width = (phase.start / 1e6, low - strip), (phase.end - phase.start) / 1e6
        axes.add_patch(Rectangle(corner, width, strip * 0.85, fc=fill, ec=lines, hatch=hatch or None, lw=0))
        axes.add_patch(Rectangle(corner, width, strip * 0.85, fc="none", ec=PAPER, lw=0.5))


def _legend(figure: Any, head: float, height: float, found: Allocations) -> None:
    """Phases differ by hatch too, never by colour alone."""
    there = {p.name for r in shown_ranks(found) if len(r.phases) <= MOST_PHASES for p in r.phases}
    use = key("allocated" if not found.sampled else "in use, sampled", TINTS[0], edge=FILLS[0], width=1)
    keys = [use, *(key(name, *look, width=0) for name, look in PHASES.items() if name in there)]
    figure.legend(
        handles=keys, ncols=len(keys), loc="lower left", borderpad=0,
        bbox_to_anchor=(LEFT / WIDTH, 1 - (head - 0.08) / height), borderaxespad=0, columnspacing=1.3, handlelength=1.8,
    )  # fmt: skip


# -- the live drawing ------------------------------------------------------------------------------

HEAD, CURVE, PHASE, GAP = 17, 64, 18, 10  # pixels: a rank's line, its curve, its phases, between ranks
COLUMNS = 40  # of a curve that say what was in use
CELL = re.compile(r"In\[(\d+)\]")


def allocations_document(found: Allocations) -> Document:
    """A row for each rank that is shown."""
    ranks = shown_ranks(found)
    sheet, top = Sheet(heading(found), zoom=True), 4.0
    length = max(r.length for r in ranks) / 1e6
    limits = _limits(ranks)
    for i, rank in enumerate(ranks):
        top = _row(sheet, rank, (length, *limits), top, 3 * i)
    began = "cell" if found.step is None else "step"
    axis(sheet, top, 0.0, length, f"ms since the {began} began on the rank")
    names = [p.name for r in ranks if len(r.phases) <= MOST_PHASES for p in r.phases]
    keys = [(stroke(0), "in use, sampled" if found.sampled else "allocated")]
    return Document([sheet], [*keys, *((swatch(name), name) for name in PHASES if name in names)])


def _limits(ranks: Sequence[RankAllocations]) -> tuple[float, float]:
    """Bytes: from zero, or from just below all curves where these would be flat lines far above it."""
    levels = [level for r in ranks for _, level in r.window.points]
    low, high = min(levels), max(*levels, 1)
    room = 0.2 * max(high - low, 0.02 * abs(high))
    return (0.0 if 0 <= low < 0.8 * high else low - room), high + room


def _row(sheet: Sheet, rank: RankAllocations, limits: tuple[float, float, float], top: float, row: int) -> float:
    """Draw it; where the next one begins."""
    length, low, high = limits
    peak = f"peak {size(rank.window.peak)}" + (f" {rank.phase()}" if rank.phase() else "")
    words = f"rank {rank.rank}: {peak}, at {duration(rank.window.at / 1e9)}"
    head(sheet, f"rank {rank.rank}", peak, top, words, row)
    plot = Plot(sheet, top + HEAD, CURVE, (0.0, length), (low, high))
    points = _drawn(rank)
    plot.area([(points[0][0], low), (points[-1][0], low)], points, "a0")
    plot.line(points, "l0 x0")
    _grid(plot, low, high)
    plot.dots([(rank.window.at / 1e6, rank.window.peak)], "d3")
    plot.finish()
    _columns(plot, rank, row + 1)
    end = top + HEAD + CURVE
    for phase in rank.phases if len(rank.phases) <= MOST_PHASES else ():
        if phase.name in PHASES:
            said = f"rank {rank.rank} · {phase.name}\n{duration((phase.end - phase.start) / 1e9)}"
            place = phase.start / 1e6 / length, phase.end / 1e6 / length, end, end + PHASE
            sheet.bar(Mark(*place, said, row + 2), phase.name, (phase.name,))
    return end + PHASE + GAP


def _drawn(rank: RankAllocations) -> list[Point]:
    """The curve: of all allocations with steps, of samples from one to the next."""
    points = [(t / 1e6, float(level)) for t, level in rank.window.points]
    if rank.window.samples:
        return points
    steps = [p for (_, before), (at, level) in pairwise(points) for p in ((at, before), (at, level))]
    return [points[0], *steps]


def _grid(plot: Plot, low: float, high: float) -> None:
    _, scale = unit(high)
    values = [v * scale for v in round_steps(high / scale, 8) if low < v * scale < high]
    plot.grid(values[:: max(1, -(-len(values) // 2))], lambda value: size(value))


def _columns(plot: Plot, rank: RankAllocations, row: int) -> None:
    """Of each part of the time, the most that was in use; the one with the peak says which lines hold it."""
    points = rank.window.points
    each = max(1, -(-len(points) // COLUMNS))
    groups = [points[i : i + each] for i in range(0, len(points), each)]
    ends = [*(g[0][0] for g in groups[1:]), max(rank.length, points[-1][0])]
    for group, end in zip(groups, ends, strict=True):
        at, level = max(group, key=lambda point: point[1])
        words, cell = f"rank {rank.rank} · {size(level)} in use at {duration(at / 1e9)}", None
        if group[0][0] <= rank.window.at <= end and level == rank.window.peak:
            more, cell = _holders(rank)
            words += f", the peak{more}"
        left, right = plot.across(group[0][0] / 1e6), min(1.0, plot.across(end / 1e6))
        sheet = plot.sheet
        shapes = sheet.rect(left, right, plot.top, plot.height, "hit")
        sheet.mark(shapes, Mark(left, right, plot.top, plot.top + plot.height, words, row, [cell] if cell else ()))


def _holders(rank: RankAllocations) -> tuple[str, tuple[int, int] | None]:
    """The lines that hold the most at the peak, and the first that is a cell's."""
    own = [(place, held) for place, held in rank.window.lines if place and place[0] and held > 0][:3]
    said = "".join(f"\n{place[0].removeprefix('Cell ')} line {place[1]}: {signed(held)}" for place, held in own)
    cells = [(int(m[1]), place[1]) for place, _ in own if (m := CELL.search(place[0]))]
    return said, cells[0] if cells else None
