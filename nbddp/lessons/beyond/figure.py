"""Lesson 12's second figure: a bar for each stage of ZeRO, of what a rank holds, beside the memory of a GPU."""

from __future__ import annotations

from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nbddp.draw.memory import STYLES
from nbddp.draw.palette import INK, PAPER, RC
from nbddp.draw.shown import Shown
from nbddp.lessons.beyond.simulation import MEMORY, NAMES, PARTS, Share, Stages
from nbddp.trace.quantities import amount

WIDTH, HEIGHT = 9.2, 2.75
BAR = 0.62  # of a row
NARROW = 0.008  # of the axis: a part below this gets no edge, which would cover it
LETTER = 0.0095  # of the axis that a letter of a label takes


def zero(some: Stages) -> Shown:
    """The four bars; the words are the model's own."""
    with rc_context(RC):
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
            axes.annotate(f"a GPU of {MEMORY / 1e9:.0f} GB", (MEMORY / scale, 3.5), (4, 2), size=7.5, va="bottom",
                          textcoords="offset points")  # fmt: skip
        axes.set(xlim=(0, top), ylim=(3.5, -0.5))
        axes.set_yticks(range(len(some.shares)), list(NAMES.values()))
        axes.tick_params(left=False)
        axes.set_xlabel(f"{unit} per rank, without activations")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        _legend(axes)
    return Shown(figure, some.words())


def _bar(axes: Any, row: int, of: Share, scale: float, top: float) -> None:
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
