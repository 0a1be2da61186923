"""Lesson 02's figure: the placement, and below it the device index that each rank asks for, and whether it is there."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nbddp.capabilities.topology.boxes import layout_boxes
from nbddp.capabilities.topology.figure import draw_topology
from nbddp.errors import several
from nbddp.figures.axes import part
from nbddp.figures.figure import described
from nbddp.figures.palette import FILLS, FRAME, INK, MUTED, PAPER
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l02_ranks_and_devices.simulation import GLOBAL, LOCAL, DeviceLayout, TakenGpus, simulate_layout

CELL, ROW, ABOVE, HEAD = 0.94, 0.42, 0.3, 0.34  # inches
TITLE = 0.6  # inches above the placement, for its heading
ACROSS = 8  # ranks in a row of the strip


@described
def draw_placement(chosen: DeviceLayout) -> Figure:
    """The layout with its strip; the words are the layout's."""
    made = layout_boxes(chosen.placed)
    rows = -(-len(chosen.taken) // ACROSS)
    width = max(made.width, min(len(chosen.taken), ACROSS) * CELL)
    strip = ABOVE + HEAD + rows * ROW
    height = TITLE + made.height + strip
    figure = Figure(figsize=(width, height))
    draw_topology(chosen.placed, figure.add_axes((0, strip / height, made.width / width, made.height / height)))
    axes = part(figure, (0, 0, 1, strip / height), width, strip)
    head = f"each rank asks for the GPUs of its {chosen.by}"
    axes.text(0, ABOVE + HEAD / 2 - 0.06, head, size=8.5, weight="bold", va="center", color=INK)
    for i, taken in enumerate(chosen.taken):
        _cell(axes, taken, (i % ACROSS) * CELL, ABOVE + HEAD + i // ACROSS * ROW)
    return figure


def _cell(axes: Any, taken: TakenGpus, x: float, y: float) -> None:
    """One rank: what it asks for, on its node's colour if that is there, in a dashed frame if not."""
    there = not taken.missing
    axes.add_patch(
        Rectangle(
            (x + 0.03, y),
            CELL - 0.06,
            ROW - 0.07,
            facecolor=FILLS[taken.node % len(FILLS)] if there else FRAME,
            edgecolor=PAPER if there else INK,
            linestyle="solid" if there else (0, (3, 2)),
            linewidth=0.9,
        )
    )
    middle, ink = x + CELL / 2, PAPER if there else INK
    axes.text(middle, y + 0.11, f"rank {taken.rank}", size=6.8, ha="center", va="center", color=ink, weight="bold")
    asks = several("GPU", taken.gpus) + ("" if there else ": none")
    axes.text(middle, y + 0.245, asks, size=6.8, ha="center", va="center", color=ink if there else MUTED)


# -- the explorer ----------------------------------------------------------------------------------

layout = Explorer(
    "Lesson 02: nodes, processes and GPUs, and the device of each rank by its local or by its global rank.",
    simulate_layout,
    draw_placement,
    Slider("nodes", "nodes", 1, 4, at=(1, 2)),
    Slider("gpus", "GPUs per node", 1, 8, at=(4, 4)),
    Slider("per_process", "GPUs per process", 1, 8, at=(1, 1)),
    Choice("by", "device taken by", (LOCAL, GLOBAL), at=(LOCAL, GLOBAL)),
    begins={"nodes": 2},
)
