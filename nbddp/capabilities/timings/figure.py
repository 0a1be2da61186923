"""The timeline of a step: per rank what it computed, over what it communicated, on one clock."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from nbddp.analysis.overlap import communication, exposed, hidden_share, lanes
from nbddp.analysis.quantities import duration, size
from nbddp.analysis.row_limit import drawn, note
from nbddp.analysis.steps import Bucket, Recording, Step
from nbddp.analysis.wait_time import CurvePoint, curves, transfers
from nbddp.capabilities.timings.text import COLUMNS, heading, rows, told
from nbddp.figures.bar_labels import Inside
from nbddp.figures.figure import Area, DescribedFigure, remade
from nbddp.figures.palette import FILLS, INK, MUTED, PAPER, RC
from nbddp.output.table import Table

FORWARD, BACKWARD, OPTIMIZER, MOVES, WAITS = FILLS[0], FILLS[2], FILLS[3], "#f0c9a0", "#fbeede"
LANE, WIDTH = 0.34, 9.2
BELOW, NOTE = 0.1, 0.18  # of a lane's units: from the lanes to what is said below them, and the height of that
LETTERS = 120  # in a line of the title
CURVES_FROM = 4  # steps
NAME = 0.06  # of the axes' length, beside them: where the name of a rank is
MOST_NAMES = 4  # of a bucket's parameters, where the pointer rests
MOST_COLUMNS = 200  # of the curves that say what they are


def table(recording: Recording, number: int) -> Table:
    """One row per bucket of a step."""
    return Table(COLUMNS, rows(transfers(recording.step(number)), len(recording.ranks)))


def draw_timings(recording: Recording, number: int, axes: Any = None) -> DescribedFigure:
    """The figure of step `number`; with `axes` only its timeline is drawn, into them.

    Raises KeyError if a rank does not have the step.
    """
    step = recording.step(number)
    named, said = heading(recording, number), told(recording, number)
    buckets = table(recording, number)
    ranks = drawn(step, said.ranks)
    few = note(len(step), len(ranks))
    words = "\n".join([named, *said.lines, *([few] if few else []), "", repr(buckets)])
    if axes is not None:
        with rc_context(RC):
            _timeline(axes, step, ranks)
        return DescribedFigure(axes.figure, words, buckets)
    some = curves(recording)
    return _drawn(step, ranks, some if len(some) >= CURVES_FROM else [], f"{named}: {said.lines[0]}", words, buckets)


@remade
def _drawn(
    step: Mapping[int, Step], ranks: Sequence[int], some: Sequence[CurvePoint], title: str, words: str, buckets: Table
) -> DescribedFigure:
    """One step and the curves, which are much less than the recording."""
    number = next(iter(step.values())).number
    with rc_context(RC):
        extra = 1.6 if some else 0.0
        height = _height([step[r] for r in ranks])
        figure = Figure(figsize=(WIDTH, 1.2 + height + extra), layout="constrained")
        grid = figure.add_gridspec(2 if extra else 1, 1, height_ratios=[1 + height, extra] if extra else [1])
        top = figure.add_subplot(grid[0])
        areas = _timeline(top, step, ranks)
        top.set_title("\n".join(textwrap.wrap(title, LETTERS)), loc="left", size=9, pad=22)
        if extra:
            areas += _curves(figure.add_subplot(grid[1]), some, number)
    return DescribedFigure(figure, words, buckets, areas)


def _lanes(step: Step) -> list[int]:
    """The communication lane of each bucket."""
    return lanes([(b.sent, b.done) for b in step.buckets])


def _height(shown: Sequence[Step]) -> float:
    """Inches for the timelines of these ranks: less for a lane where there are many, but never less than its number
    needs."""
    count = sum(2.0 + max(_lanes(s), default=-1) + 1 for s in shown)  # one of them is the room between ranks
    return count * min(0.3, max(0.13, 14 / count))


def _timeline(axes: Any, step: Mapping[int, Step], ranks: Sequence[int]) -> list[Area]:
    """Draw it for these of its ranks, and say what each of its bars is."""
    begin = min(s.start for s in step.values())
    end = max(s.end for s in step.values())
    y, ticks, areas = 0.0, [], list[Area]()
    moved = transfers(step)
    starts, late = {t.index: t.start for t in moved}, {t.index: t.slowest for t in moved}
    axes.set_xlim(0, (end - begin) / 1e6 * 1.14)
    for rank in ranks:
        height = _rank(axes, step[rank], starts, begin, y)
        areas += _areas(axes, step[rank], rank, begin, y, starts, late)
        areas.append(_rank_area(axes, step[rank], rank, y, height, late))
        share = hidden_share(step[rank])
        hidden = "no exchange" if share is None else f"{100 * share:.0f} % hidden"
        axes.text((end - begin) / 1e6 * 1.01, y - height / 2, hidden, va="center", size=8, color=INK)
        ticks.append((y - height / 2, f"rank {rank}"))
        y -= height + 0.25
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    axes.set_ylim(y + 0.1, 0.02)
    _legend(axes)
    axes.text(1.0, 1.0, note(len(step), len(ranks)), transform=axes.transAxes, ha="right", va="bottom", size=8)
    axes.set_xlabel("milliseconds since the first rank began")
    axes.tick_params(left=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return areas


def _areas(
    axes: Any, mine: Step, rank: int, begin: int, top: float, starts: Mapping[int, int], late: Mapping[int, int]
) -> list[Area]:
    """The bars of a rank whose lanes are drawn under `top`, each with its words. late: bucket → the rank that was last
    to send it."""
    phases = [("forward", *mine.forward), ("backward", *mine.backward[:2])]
    if mine.optimizer:
        phases.append(("optimizer", *mine.optimizer))
    found = [_area(axes, start - begin, end - begin, top, f"rank {rank} · {name}") for name, start, end in phases]
    for bucket, lane in zip(mine.buckets, _lanes(mine), strict=True):
        start = _start(bucket, starts)
        waits = f"waits {duration((start - bucket.sent) / 1e9)}"
        if late.get(bucket.index, rank) != rank:
            waits += f" for rank {late[bucket.index]}"
        words = f"rank {rank} · bucket {bucket.index} · {size(bucket.bytes)}{_parameters(bucket)}\n"
        words += f"{waits}, moves {duration((bucket.done - start) / 1e9)}"
        found.append(_area(axes, bucket.sent - begin, bucket.done - begin, top - LANE * (1 + lane), words))
    return found


def _rank_area(axes: Any, mine: Step, rank: int, top: float, height: float, late: Mapping[int, int]) -> Area:
    """The rank's name, which says what all its bars together are."""
    last = sum(slowest == rank for slowest in late.values())
    words = f"rank {rank} · step {mine.number}: {duration(mine.duration / 1e9)}"
    words += f", {duration(exposed(mine) / 1e9)} of it exposed communication"
    if len(late):
        words += f"\nlast to send {last} of {len(late)} buckets"
    return Area(axes, -NAME * axes.get_xlim()[1], 0.0, top - height, top, words)


def _area(axes: Any, start: int, end: int, top: float, words: str) -> Area:
    when = f"{duration((end - start) / 1e9)}, from {start / 1e6:.2f} ms to {end / 1e6:.2f} ms"
    return Area(axes, start / 1e6, end / 1e6, top - LANE, top - LANE * 0.06, f"{words}\n{when}")


def _parameters(bucket: Bucket) -> str:
    """` · 0.weight, 0.bias and 3 more`; empty where they are not known."""
    more = len(bucket.names) - MOST_NAMES
    named = ", ".join(bucket.names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    return f" · {named}" if named else ""


def _start(bucket: Bucket, starts: Mapping[int, int]) -> int:
    """When a bucket begins to move."""
    return min(max(starts.get(bucket.index, bucket.sent), bucket.sent), bucket.done)


def _rank(axes: Any, step: Step, starts: Mapping[int, int], begin: int, top: float) -> float:
    """Draw one rank's lanes under `top`; their height. starts: bucket → when its last rank had sent it."""
    spans = [("forward", step.forward, FORWARD), ("backward", step.backward[:2], BACKWARD)]
    if step.optimizer:
        spans.append(("optimizer", step.optimizer, OPTIMIZER))
    for name, (start, end), fill in spans:
        Inside(axes, _bar(axes, start - begin, end - begin, top, fill), (name,), PAPER, fill)
    placed = _lanes(step)
    for bucket, lane in zip(step.buckets, placed, strict=True):
        at = top - LANE * (1 + lane)
        start = _start(bucket, starts)
        bars = [
            (_bar(axes, bucket.sent - begin, start - begin, at, WAITS, edge=INK), WAITS),
            (_bar(axes, start - begin, bucket.done - begin, at, MOVES, edge=INK, hatch="////"), MOVES),
        ]
        bar, fill = max(bars, key=lambda pair: pair[0].get_width())
        Inside(axes, bar, (f"{bucket.index} · {size(bucket.bytes)}", str(bucket.index)), INK, fill)
    depth = 1 + (max(placed) + 1 if placed else 0)
    if exposed(step) > 0:
        start = max(step.backward[1], communication(step)[0][0]) - begin
        end = communication(step)[-1][1] - begin
        axes.plot([start / 1e6, end / 1e6], [top - LANE * depth - 0.03] * 2, color=INK, lw=2, solid_capstyle="butt")
        note = f"exposed {duration(exposed(step) / 1e9)}"
        axes.text(end / 1e6, top - LANE * depth - BELOW, note, size=6.5, ha="right", va="top", color=MUTED)
        return LANE * depth + BELOW + NOTE
    return LANE * depth + 0.1


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
    handles = [Patch(fc=fill, ec=INK, lw=0.5, hatch=hatch or None, label=name) for name, fill, hatch in kinds]
    axes.legend(handles=handles, ncols=5, frameon=False, fontsize=7.5, loc="lower left", bbox_to_anchor=(-0.01, 1.0),
                borderaxespad=0.3, columnspacing=1.2, handlelength=1.6)  # fmt: skip


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
    axes.legend(ncols=3, frameon=False, fontsize=7.5, loc="lower left", bbox_to_anchor=(-0.01, 1.0), borderaxespad=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    each, height = -(-len(some) // MOST_COLUMNS), axes.get_ylim()[1]
    groups = [some[i : i + each] for i in range(0, len(some), each)]
    return [
        Area(
            axes,
            group[0].number - 0.5,
            group[-1].number + 0.5,
            0.0,
            height,
            _said(max(group, key=lambda c: c.duration)),
        )
        for group in groups
    ]


def _said(curve: CurvePoint) -> str:
    exposed_for = duration(curve.exposed / 1e9)
    return (
        f"step {curve.number}: {duration(curve.duration / 1e9)}, exposed communication {exposed_for}, "
        f"spread between ranks {duration(curve.spread / 1e9)}\n%ddp timings --step {curve.number} draws it"
    )
