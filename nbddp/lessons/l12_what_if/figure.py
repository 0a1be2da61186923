"""Lesson 12's first figure: one rank's step with the network beneath it, and the efficiency on more nodes."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from nbddp.analysis.quantities import duration, percent
from nbddp.figures.figure import described
from nbddp.figures.palette import FILLS, FRAME, INK, MUTED, PAPER
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l12_what_if.simulation import (
    DELAYS,
    GPUS,
    MODELS,
    MOST_NODES,
    SPEEDS,
    WhatIf,
    micro_batches,
    simulate_what_if,
)

WIDTH, HEIGHT = 9.2, 2.8
FORWARD, BACKWARD, EXPOSED = "#c9dccd", FILLS[2], "#f0c9a0"
COMPUTES, NETWORK, TALL = 1.0, 0.0, 0.62  # rows and their height
NAMED = 0.09  # share of the axis above which a pass has its name in it


@described
def draw_what_if(some: WhatIf) -> Figure:
    """The step at the left, efficiency over nodes at the right; the words are the model's own."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.45, 1])
    _step(left, some)
    _efficiency(right, some)
    return figure


def _step(axes: Any, some: WhatIf) -> None:
    unit, per = ("s", 1.0) if some.chosen.step >= 1 else ("ms", 1e3)
    end, computed = per * some.chosen.step, per * some.chosen.compute
    for name, start, stop in some.passes():
        _box(axes, per * start, per * stop, COMPUTES, FORWARD if name == "forward" else BACKWARD)
        if per * (stop - start) > NAMED * end:
            ink = INK if name == "forward" else PAPER
            axes.text(per * (start + stop) / 2, COMPUTES, name, size=7.5, ha="center", va="center", color=ink)
    if end > computed:
        _box(axes, computed, end, COMPUTES, EXPOSED, "////")
    for start, stop in some.exchange:
        _box(axes, per * start, per * stop, NETWORK, FILLS[0])
    axes.set_xlim(0, end * 1.01)
    axes.set_ylim(NETWORK - 0.5, COMPUTES + 0.95)
    axes.set_yticks([COMPUTES, NETWORK], ["a rank", "network"])
    axes.tick_params(left=False)
    axes.set_xlabel(f"{unit} since the step began")
    axes.set_title(f"a step of {micro_batches(some.micro_batches)}: {duration(some.chosen.step)}", loc="left", size=9)
    _key(axes)
    _bare(axes, "left")


def _key(axes: Any) -> None:
    handles = [
        Patch(fc=FORWARD, ec=MUTED, lw=0.5, label="forward"),
        Patch(fc=BACKWARD, ec=MUTED, lw=0.5, label="backward"),
        Patch(fc=EXPOSED, ec=MUTED, hatch="////", lw=0.5, label="waits for gradients"),
        Patch(fc=FILLS[0], ec=MUTED, lw=0.5, label="all-reduce"),
    ]
    axes.legend(handles=handles, frameon=False, fontsize=7.5, loc="upper left", ncols=4, columnspacing=1.2)


def _box(axes: Any, start: float, end: float, row: float, colour: str, hatch: str | None = None) -> None:
    place, edge = (start, row - TALL / 2), MUTED if hatch else PAPER
    line = 0.0 if row == NETWORK else 0.6  # a bucket may be too short for an edge
    axes.add_patch(Rectangle(place, end - start, TALL, fc=colour, ec=edge, lw=line, hatch=hatch))


def _efficiency(axes: Any, some: WhatIf) -> None:
    nodes, values = [p.nodes for p in some.curve], [100 * p.efficiency for p in some.curve]
    here = 100 * some.chosen.efficiency
    axes.plot(nodes, values, color=FILLS[0], lw=1.8, marker="o", ms=3.6)
    axes.plot([some.nodes], [here], "D", ms=7, mfc=PAPER, mec=INK, mew=1.5, zorder=5, clip_on=False)
    above = here < 75
    side = "left" if some.nodes == 1 else "center"
    axes.annotate(percent(some.chosen.efficiency), (some.nodes, here), (0, 9 if above else -9), ha=side, size=8.5,
                  weight="bold", va="bottom" if above else "top", textcoords="offset points")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xlim(nodes[0] / 1.25, nodes[-1] * 1.25)
    axes.set_ylim(0, 105)
    axes.set_xticks(nodes, [str(n) for n in nodes])
    axes.set_xticks([], [], minor=True)
    axes.set_yticks(range(0, 101, 20), [f"{v} %" for v in range(0, 101, 20)])
    axes.set_xlabel(f"nodes of {GPUS} GPUs")
    axes.set_title("efficiency; each rank keeps its batch", loc="left", size=9)
    axes.grid(axis="y", color=FRAME, lw=1)
    axes.set_axisbelow(True)
    _bare(axes)


def _bare(axes: Any, *also: str) -> None:
    for side in ("top", "right", *also):
        axes.spines[side].set_visible(False)


# -- the explorer ----------------------------------------------------------------------------------

what_if = Explorer(
    "Lesson 12: a step on more nodes, with another network, model, and number of micro-batches per exchange.",
    simulate_what_if,
    draw_what_if,
    Slider("nodes", "nodes", 1, MOST_NODES, at=(1, 8)),
    Choice("link", "link of a node", SPEEDS, at=("400Gb/s", "100Gb/s")),
    Choice("latency", "latency", DELAYS, at=("10us", "10us")),
    Choice("model", "parameters", tuple(MODELS), at=("100 M", "1 B")),
    Slider("micro_batches", "micro-batches", 1, 16, at=(1, 1)),
    begins={"nodes": 16},
)
