"""What each rank has in use over a step, as a live drawing: a curve per rank over the step's phases. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from nbddp.analysis.quantities import duration, size
from nbddp.capabilities.memory.history import RankAllocations
from nbddp.capabilities.memory.parts import unit
from nbddp.capabilities.memory.timeline import Allocations, heading, shown_ranks, signed
from nbddp.figures.document.page import Document
from nbddp.figures.document.sheet import Mark, Plot, Point, Sheet, axis, head, round_steps
from nbddp.figures.document.svg import stroke, swatch

HEAD, CURVE, STRIP, BETWEEN = 17, 64, 18, 10  # pixels: a rank's line, its curve, its phases, between ranks
COLUMNS = 40  # of a curve that say what was in use
MOST_PHASES = 60  # more cannot be distinguished
PHASES = ("forward", "backward", "optimizer")
CELL = re.compile(r"In\[(\d+)\]")


def allocations_document(found: Allocations) -> Document:
    """A row for each rank that is shown."""
    ranks = shown_ranks(found)
    sheet, top = Sheet(heading(found), zoom=True), 4.0
    length = max(r.length for r in ranks) / 1e6
    limits = _range(ranks)
    for i, rank in enumerate(ranks):
        top = _rank(sheet, rank, (length, *limits), top, 3 * i)
    began = "cell" if found.step is None else "step"
    axis(sheet, top, 0.0, length, f"ms since the {began} began on the rank")
    names = [p.name for r in ranks if len(r.phases) <= MOST_PHASES for p in r.phases]
    keys = [(stroke(0), "in use, sampled" if found.sampled else "allocated")]
    return Document([sheet], [*keys, *((swatch(name), name) for name in PHASES if name in names)])


def _range(ranks: Sequence[RankAllocations]) -> tuple[float, float]:
    """Bytes: from zero, or from just below all curves where these would be flat lines far above it."""
    levels = [level for r in ranks for _, level in r.window.points]
    low, high = min(levels), max(*levels, 1)
    room = 0.2 * max(high - low, 0.02 * abs(high))
    return (0.0 if 0 <= low < 0.8 * high else low - room), high + room


def _rank(sheet: Sheet, rank: RankAllocations, limits: tuple[float, float, float], top: float, row: int) -> float:
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
            place = phase.start / 1e6 / length, phase.end / 1e6 / length, end, end + STRIP
            sheet.bar(Mark(*place, said, row + 2), phase.name, (phase.name,))
    return end + STRIP + BETWEEN


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
