"""Lesson 15's figures: a rank's memory as a bar for each stage of ZeRO, and FSDP's step on two ranks over time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nbddp.analysis.quantities import amount
from nbddp.capabilities.memory.figure import STYLES
from nbddp.figures.axes import sheet
from nbddp.figures.figure import described
from nbddp.figures.palette import FAINT, FILLS, INK, MUTED, PAPER, TINTS
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l15_sharding.schedule import COMPUTE, FREE, GATHER, KEEP, ShardedStep, WorkSpan, schedule_gathers
from nbddp.lessons.l15_sharding.simulation import MEMORY, NAMES, PARTS, PRECISIONS, MemoryShare, Stages, stages

WIDTH, HEIGHT = 9.2, 2.75
BAR = 0.62  # of a row
NARROW = 0.008  # of the axis: a part below this gets no edge, which would cover it
LETTER = 0.0095  # of the axis that a letter of a label takes


@described
def draw_zero(some: Stages) -> Figure:
    """The four bars; the words are the model's own."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(some.head(), x=0.012, ha="left", size=9.5)
    most = max(of.total for of in some.shares)
    unit, scale = ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)
    top = 1.16 * most / scale
    for row, of in enumerate(some.shares):
        _bar(axes, row, of, scale, top)
    if MEMORY / scale < top:
        axes.axvline(MEMORY / scale, color=INK, lw=1, ls=(0, (4, 2)), zorder=0)
        axes.annotate(f"a GPU of {MEMORY / 1e9:.0f} GB", (MEMORY / scale, 0.5), (4, 0), size=7.5, va="center",
                      textcoords="offset points")  # fmt: skip
    axes.set(xlim=(0, top), ylim=(3.5, -0.5))
    axes.set_yticks(range(len(some.shares)), list(NAMES.values()))
    axes.tick_params(left=False)
    axes.set_xlabel(f"{unit} per rank, without activations")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _legend(axes)
    return figure


def _bar(axes: Any, row: int, of: MemoryShare, scale: float, top: float) -> None:
    left = 0.0
    for name, count in zip(PARTS, of.parts, strict=True):
        fill, hatch, lines, ink = STYLES[name]
        width, text, place = count / scale, amount(count), (left, row - BAR / 2)
        axes.add_patch(Rectangle(place, width, BAR, fc=fill, ec=lines, hatch=hatch or None, lw=0))
        edge = 0.8 if width > NARROW * top else 0.0
        axes.add_patch(Rectangle(place, width, BAR, fc="none", ec=PAPER, lw=edge))
        if len(text) * LETTER * top < width:
            box = {"fc": fill, "ec": "none", "pad": 1.2}
            axes.text(left + width / 2, row, text, size=7.5, ha="center", va="center", color=ink, bbox=box)
        left += width
    axes.annotate(amount(of.total), (left, row), (5, 0), textcoords="offset points", va="center", size=8.5,
                  weight="bold", bbox={"fc": PAPER, "ec": "none", "pad": 0.8})  # fmt: skip


def _legend(axes: Any) -> None:
    handles = []
    for name in PARTS:
        fill, hatch, lines, _ = STYLES[name]
        handles.append(Rectangle((0, 0), 1, 1, fc=fill, ec=lines, hatch=hatch or None, lw=0, label=name))
    axes.legend(handles=handles, ncols=3, frameon=False, fontsize=7.5, loc="lower right", bbox_to_anchor=(1, 1),
                borderaxespad=0.1, columnspacing=1.3, handlelength=1.8, handleheight=1.3)  # fmt: skip


# -- over time ---------------------------------------------------------------------------------

WIDE, LEFT, TOP = 6.4, 0.95, 0.62  # inches
LANE, GAP, STAIR = 0.24, 0.06, 0.14  # heights: a lane, between two, of one layer that is held
LEGEND = 0.3
FILL = {COMPUTE: (FILLS[0], PAPER), GATHER: (FILLS[2], PAPER)}
SCATTERED = (FILLS[1], PAPER)
THIN = 0.13  # inches: a narrower bar has no number


@described
def draw_gathers(step: ShardedStep) -> Figure:
    """Lanes per rank over a common axis of time; the words are the schedule's own."""
    most = max(step.peak(r) for r in range(len(step.spans)))
    each = 2 * LANE + 3 * GAP + most * STAIR + 0.28
    height = TOP + LEGEND + len(step.spans) * each - 0.05
    figure, axes = sheet(WIDE, height)
    axes.text(0.02, 0.12, step.head(), size=9, weight="bold", va="center")
    axes.text(0.02, 0.34, f"the step takes {step.total:g}; forward of one layer takes 1", size=8, va="center",
              color=MUTED)  # fmt: skip
    _key(axes, TOP - 0.06)
    for rank in range(len(step.spans)):
        _rank(axes, step, rank, TOP + LEGEND + rank * each, most)
    return figure


def _rank(axes: Any, step: ShardedStep, rank: int, top: float, most: int) -> None:
    scale = (WIDE - LEFT - 0.05) / step.total
    axes.text(0.02, top + 0.02, step.lines()[rank], size=8, va="center", color=INK)
    lanes = top + 0.18, top + 0.18 + LANE + GAP
    for words, y in zip(("computes", "link"), lanes, strict=True):
        axes.text(LEFT - 0.08, y + LANE / 2, words, size=7.5, ha="right", va="center", color=MUTED)
    for span in step.spans[rank]:
        _span(axes, span, lanes[span.kind != COMPUTE], scale)
    floor = lanes[1] + LANE + GAP + most * STAIR
    axes.text(LEFT - 0.08, floor - most * STAIR / 2, "in full", size=7.5, ha="right", va="center", color=MUTED)
    axes.plot([LEFT, WIDE - 0.05], [floor, floor], color=FAINT, lw=0.8)
    moments = sorted({t for h in step.held[rank] for t in (h.start, h.end)})
    for start, end in pairwise(moments):
        count = step.count(rank, start)
        for i in range(count):
            place = (LEFT + start * scale, floor - (i + 1) * STAIR)
            axes.add_patch(Rectangle(place, (end - start) * scale, STAIR, fc=TINTS[2], ec=FILLS[2], lw=0.5))


def _span(axes: Any, span: WorkSpan, y: float, scale: float) -> None:
    fill, ink = FILL.get(span.kind, SCATTERED)
    left, width = LEFT + span.start * scale, (span.end - span.start) * scale
    hatch = "///" if span.backward and span.kind == COMPUTE else None
    axes.add_patch(Rectangle((left, y), width, LANE, fc=fill, ec="#7d9cbb" if hatch else PAPER, hatch=hatch, lw=0))
    axes.add_patch(Rectangle((left, y), width, LANE, fc="none", ec=PAPER, lw=0.8))
    if width > THIN:
        box = {"fc": fill, "ec": "none", "pad": 0.8}
        axes.text(left + width / 2, y + LANE / 2, str(span.layer), size=7, ha="center", va="center_baseline", color=ink,
                  bbox=box)  # fmt: skip


def _key(axes: Any, y: float) -> None:
    x = 0.02
    for words, fill, hatch in (
        ("forward", FILLS[0], None), ("backward", FILLS[0], "///"), ("all-gather", FILLS[2], None),
        ("reduce-scatter", FILLS[1], None), ("a layer in full", TINTS[2], None),
    ):  # fmt: skip
        axes.add_patch(Rectangle((x, y - 0.06), 0.2, 0.12, fc=fill, ec="#7d9cbb" if hatch else FILLS[2], hatch=hatch,
                                 lw=0.5 if fill == TINTS[2] else 0))  # fmt: skip
        axes.text(x + 0.25, y, words, size=7.5, va="center", color=INK)
        x += 0.25 + 0.068 * len(words) + 0.22


# -- the explorer ----------------------------------------------------------------------------------

zero = Explorer(
    "Lesson 15: what a rank holds of a model, by the stage of ZeRO.",
    stages,
    draw_zero,
    Choice("billion", "parameters in 10⁹", (0.125, 1, 3, 7.5, 13, 70, 175), at=(7.5, 7.5)),
    Choice("ranks", "ranks", (1, 2, 4, 8, 16, 64, 256, 1024), at=(1, 64)),
    Choice("precision", "precision", tuple(PRECISIONS), at=("mixed", "mixed")),
    begins={"ranks": 8},
)

gathers = Explorer(
    "Lesson 15: one step of FSDP on two ranks, with all-gathers, computation, and the layers held in full.",
    schedule_gathers,
    draw_gathers,
    Slider("layers", "layers", 2, 6, at=(4, 4)),
    Choice("ahead", "gather ahead", (("none", 0), ("1 layer", 1), ("2 layers", 2)), at=(0, 1)),
    Choice("link", "time of a collective", (0.25, 0.5, 1.0, 2.0), at=(1.0, 1.0)),
    Choice("after", "after forward", (FREE, KEEP), at=(FREE, FREE)),
    Choice("slow", "slow rank", (("none", False), ("rank 1", True)), at=(False, False)),
)
