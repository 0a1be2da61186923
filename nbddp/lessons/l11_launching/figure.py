"""Lesson 11's figure: the layout, and below it the command for each node, the program's lines or a batch script. A
frame has the colour of the node that it is for."""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nbddp.capabilities.export.torchrun_line import C10D, SRUN, STATIC
from nbddp.capabilities.topology.boxes import layout_boxes
from nbddp.capabilities.topology.figure import draw_topology
from nbddp.figures.axes import part
from nbddp.figures.figure import described
from nbddp.figures.palette import FILLS, FRAME, INK, MUTED
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l11_launching.simulation import GLOO, NCCL, LaunchPlan, plan_launch, where

LETTER, LINE, POINTS = 0.0585, 0.132, 6.8  # inches across and down, points: DejaVu Sans Mono
NARROWEST, TITLE, HEAD, ABOVE, PAD, GAP, BAR = 8.2, 0.6, 0.3, 0.1, 0.07, 0.08, 0.07  # inches
Frame = tuple[str, list[str], str]  # label, lines, colour of its bar


@described
def draw_launching(plan: LaunchPlan) -> Figure:
    """The layout with its commands; the words are the plan's."""
    made = layout_boxes(plan.placed)
    width = max(made.width, NARROWEST)
    letters = int((width - BAR - 2 * PAD) / LETTER)
    parts = [(head, [(a, _wrapped(b, letters), c) for a, b, c in frames]) for head, frames in _parts(plan)]
    below = ABOVE + sum(HEAD + sum(_height(f) + GAP for f in frames) for _, frames in parts)
    height = TITLE + made.height + below
    figure = Figure(figsize=(width, height))
    draw_topology(plan.placed, figure.add_axes((0, below / height, made.width / width, made.height / height)))
    axes = part(figure, (0, 0, 1, below / height), width, below)
    y = ABOVE
    for head, frames in parts:
        axes.text(0, y + HEAD / 2 + 0.03, head, size=8.5, weight="bold", va="center", color=INK)
        y += HEAD
        for frame in frames:
            _draw(axes, frame, y, width)
            y += _height(frame) + GAP
    return figure


def _parts(plan: LaunchPlan) -> list[tuple[str, list[Frame]]]:
    """Headings, each with its frames."""
    by_slurm = plan.launch.rendezvous == SRUN
    each: list[Frame] = [
        (where(nodes), [line], FILLS[nodes[0] % len(FILLS)] if len(nodes) == 1 else MUTED)
        for nodes, line in plan.lines()
    ]
    return [
        ("Slurm's variables on each node" if by_slurm else "typed on each node", each),
        ("in the program", [("", list(plan.program()), MUTED)]),
        ("or, on a cluster with Slurm: sbatch", [("", plan.sbatch().rstrip().splitlines(), MUTED)]),
    ]


def _wrapped(lines: list[str], letters: int) -> list[str]:
    found = []
    for line in lines:
        found += textwrap.wrap(
            line, letters, subsequent_indent="      ", break_on_hyphens=False, break_long_words=False
        ) or [""]
    return found


def _height(frame: Frame) -> float:
    return 2 * PAD + LINE * (len(frame[1]) + bool(frame[0]))


def _draw(axes: Any, frame: Frame, y: float, width: float) -> None:
    """A frame with its bar, its label in the bar's colour, and its lines."""
    label, lines, colour = frame
    axes.add_patch(Rectangle((0, y), width, _height(frame), facecolor=FRAME, edgecolor="none"))
    axes.add_patch(Rectangle((0, y), BAR, _height(frame), facecolor=colour, edgecolor="none"))
    at = y + PAD + LINE / 2
    if label:
        axes.text(BAR + PAD, at, label, size=POINTS, weight="bold", va="center", color=colour)
        at += LINE
    for line in lines:
        text = line.replace("$", r"\$")  # no formula
        axes.text(BAR + PAD, at, text, size=POINTS, va="center", color=INK, family="DejaVu Sans Mono")
        at += LINE


# -- the explorer ----------------------------------------------------------------------------------

launch = Explorer(
    "Lesson 11: a layout, the torchrun line of each node, and a batch script for Slurm.",
    plan_launch,
    draw_launching,
    Slider("nodes", "nodes", 1, 4, at=(1, 2)),
    Slider("processes", "processes per node", 1, 8, at=(2, 4)),
    Choice("backend", "backend", (NCCL, GLOO), at=(GLOO, NCCL)),
    Choice("rendezvous", "rendezvous", (C10D, STATIC, SRUN), at=(C10D, STATIC)),
    begins={"nodes": 2},
)
