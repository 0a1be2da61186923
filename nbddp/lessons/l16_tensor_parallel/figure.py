"""Lesson 16's figure: the GPUs of each node with what their rank holds and sees, and the groups of both sides."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from nbddp.figures.axes import sheet
from nbddp.figures.figure import described
from nbddp.figures.palette import FAINT, FILLS, FRAME, INK, MUTED, PAPER
from nbddp.lessons.framework.explorer import Choice, Explorer
from nbddp.lessons.l16_tensor_parallel.simulation import DATA, SHARDS, TENSOR, Mesh, build_mesh

COLOURS = (*FILLS, "#54478c", "#6b5b00", "#005f73", "#7a2e2e")  # one per shard; the letter says it too
WIDTH, LEFT, TOP = 6.4, 0.75, 0.5  # inches
BOX, HIGH, ROW = 0.63, 0.62, 0.86


@described
def draw_mesh(some: Mesh) -> Figure:
    """A row of GPUs per node; the words are the mesh's own."""
    height = TOP + some.nodes * ROW + 0.42 * len(some.lines()) + 0.3
    figure, axes = sheet(WIDTH, height)
    axes.text(0.02, 0.13, some.head(), size=9, weight="bold", va="center")
    axes.text(0.02, 0.33, "colour and letter: the shard of each layer; number: which samples", size=8, va="center",
              color=MUTED)  # fmt: skip
    for node in range(some.nodes):
        _node(axes, some, node, TOP + node * ROW)
    y = TOP + some.nodes * ROW + 0.1
    for line in some.lines():
        name, _, rest = line.partition(": ")
        axes.text(0.02, y, f"{name}:", size=8, va="center", color=INK)
        axes.text(0.16, y + 0.2, rest, size=8, va="center", color=MUTED)
        y += 0.42
    axes.text(0.02, y, some.verdict(), size=8.5, weight="bold", va="center", color=INK)
    return figure


def _node(axes: Any, some: Mesh, node: int, y: float) -> None:
    wide = some.gpus * (BOX + 0.06) + 0.06
    axes.add_patch(Rectangle((LEFT, y), wide, HIGH + 0.12, fc=FRAME, ec=FAINT, lw=0.8))
    axes.text(LEFT - 0.08, y + HIGH / 2 + 0.06, f"node {node}", size=8, ha="right", va="center", color=MUTED)
    for gpu in range(some.gpus):
        rank = node * some.gpus + gpu
        data, tensor = some.place(rank)
        x = LEFT + 0.06 + gpu * (BOX + 0.06)
        fill = COLOURS[tensor]
        axes.add_patch(FancyBboxPatch((x + 0.03, y + 0.09), BOX - 0.06, HIGH - 0.06, boxstyle="round,pad=0.03", fc=fill,
                                      ec=PAPER, lw=0.8))  # fmt: skip
        for line, (text, weight) in enumerate(
            ((f"rank {rank}", "bold"), (f"shard {SHARDS[tensor]}", "normal"), (f"samples {data}", "normal"))
        ):
            axes.text(x + BOX / 2, y + 0.19 + 0.17 * line, text, size=7, ha="center", va="center", color=PAPER,
                      weight=weight)  # fmt: skip


# -- the explorer ----------------------------------------------------------------------------------

mesh = Explorer(
    "Lesson 16: ranks on a mesh of data × tensor, and over which links each side exchanges.",
    build_mesh,
    draw_mesh,
    Choice("nodes", "nodes", (1, 2, 4), at=(2, 2)),
    Choice("gpus", "GPUs per node", (2, 4, 8), at=(2, 2)),
    Choice("tensor", "tensor ranks", (1, 2, 4, 8), at=(1, 2)),
    Choice("inner", "side by side", (TENSOR, DATA), at=(TENSOR, TENSOR)),
    begins={"gpus": 4, "tensor": 4},
)
