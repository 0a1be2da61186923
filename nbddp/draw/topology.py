"""The process-to-device figure: node ⊃ process ⊃ GPU (or cores), every rank as text.

Geometry first: `boxes` lays everything out as plain rectangles in units of one device;
drawing last. Colour only tells nodes apart; everything it says stands there as text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from nbddp.draw.palette import FILLS, FRAME, INK, MUTED, PAPER, RC
from nbddp.draw.shown import Shown
from nbddp.topology import Device, Node, Topology, Worker, counted, node_holds

UNIT = 1.05  # inches per device
PROCESS_HEIGHT, HEADER, MARGIN, GAP = 1.45, 0.5, 0.12, 0.35
MOST_PER_ROW = 8.5  # devices in one row of the figure
FOLD_FROM = 16  # nodes; more than that are drawn as the first two and a note


@dataclass(frozen=True)
class Box:
    """A rectangle: lower left corner, size, what it is (`node`, `process`, `device`, `note`) and its words."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    title: str = ""
    text: str = ""
    node: int = 0

    def holds(self, other: Box) -> bool:
        return (
            self.x <= other.x
            and self.y <= other.y
            and other.x + other.width <= self.x + self.width
            and other.y + other.height <= self.y + self.height
        )


def topology(placed: Topology, axes: Any = None) -> Shown:
    """Draw a placement, in `axes` or in a figure of its own; its words are `placed.words()`."""
    layout = boxes(placed)
    width = max(b.x + b.width for b in layout)
    bottom = min(b.y for b in layout)
    with rc_context(RC):
        if axes is None:
            figure = Figure(figsize=(max(3.4, width * UNIT), -bottom * UNIT + 0.4))
            axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(-0.05, width + 0.05), ylim=(bottom - 0.05, 0.42), aspect="equal")
        axes.axis("off")
        axes.text(0, 0.2, placed.equation(), weight="bold", size=10.5, va="center")
        for box in layout:
            _draw(axes, box)
    return Shown(axes.figure, placed.words())


def boxes(placed: Topology) -> list[Box]:
    """Every rectangle of the figure; y grows upwards and the figure lies below y = 0."""
    nodes = placed.nodes if len(placed.nodes) <= FOLD_FROM else placed.nodes[:2]
    found: list[Box] = []
    x = y = 0.0
    for node in nodes:
        width = max(1.9, sum(_process_width(w) for w in placed.on_node(node.index)) + 2 * MARGIN)
        if x and x + width > MOST_PER_ROW:
            x, y = 0.0, y - PROCESS_HEIGHT - HEADER - GAP
        found += _node(placed, node, x, y, width)
        x += width + GAP
    if len(nodes) < len(placed.nodes):
        text = f"… nodes {len(nodes)}–{len(placed.nodes) - 1}: the same"
        found.append(Box("note", 0, y - PROCESS_HEIGHT - HEADER - 0.4, 4.0, 0.35, title=text))
    return found


def _process_width(worker: Worker) -> float:
    return max(1.0, 0.8 * len(worker.devices) + 0.2) + 0.1


def _node(placed: Topology, node: Node, x: float, top: float, width: float) -> list[Box]:
    height = PROCESS_HEIGHT + HEADER
    title = f"node {node.index}{' (simulated)' * node.simulated}"
    group = placed.on_node(node.index)
    text = node_holds(node) if width < 3 else f"{node_holds(node)}, {counted(len(group), 'process')}"
    found = [Box("node", x, top - height, width, height, title, text, node.index)]
    left = x + MARGIN
    for worker in group:
        found += _process(placed, worker, left, top - height + MARGIN)
        left += _process_width(worker)
    return found


def _process(placed: Topology, worker: Worker, x: float, y: float) -> list[Box]:
    width, height = _process_width(worker) - 0.1, PROCESS_HEIGHT - MARGIN
    found = [Box("process", x, y, width, height, f"rank {worker.rank}", f"local rank {worker.local_rank}", worker.node)]
    if not worker.devices:
        return [*found, Box("device", x + 0.1, y + 0.1, width - 0.2, 0.55, "CPU", "cores shared", worker.node)]
    each = (width - 0.2) / len(worker.devices)
    for i, device in enumerate(worker.devices):
        left = x + 0.1 + i * each + 0.03
        found.append(
            Box("device", left, y + 0.1, each - 0.06, 0.55, f"GPU {device.index}", _note(placed, device, worker))
        )
    return found


def _note(placed: Topology, device: Device, worker: Worker) -> str:
    """How many share a device, else the first word of its model: `H100`."""
    sharing = [w.rank for w in placed.on_node(worker.node) if device in w.devices]
    if len(sharing) > 1:
        return f"of {len(sharing)} ranks"
    return (device.name.removeprefix("NVIDIA ").split() or [""])[0]


def _draw(axes: Any, box: Box) -> None:
    if box.kind == "note":
        axes.text(box.x, box.y + box.height / 2, box.title, va="center", size=9, color=INK)
        return
    fill, edge, ink = {
        "node": (FRAME, MUTED, INK),
        "process": (FILLS[box.node % len(FILLS)], FILLS[box.node % len(FILLS)], PAPER),
        "device": (PAPER, INK, INK),
    }[box.kind]
    style = f"round,pad=0,rounding_size={0.06 if box.kind == 'device' else 0.1}"
    axes.add_patch(
        FancyBboxPatch(
            (box.x, box.y), box.width, box.height, boxstyle=style, fc=fill, ec=edge, lw=0.9, mutation_aspect=1
        )
    )
    middle, top = box.x + box.width / 2, box.y + box.height
    if box.kind == "node":
        axes.text(box.x + 0.15, top - 0.26, box.title, weight="bold", va="center", size=9)
        axes.text(box.x + box.width - 0.15, top - 0.26, box.text, ha="right", va="center", size=7.5, color=MUTED)
    elif box.kind == "process":
        axes.text(middle, top - 0.22, box.title, ha="center", va="center", color=ink, weight="bold", size=10)
        axes.text(middle, top - 0.47, box.text, ha="center", va="center", color=ink, size=7.5)
    else:
        offset = 0.1 if box.text else 0
        axes.text(middle, box.y + box.height / 2 + offset, box.title, ha="center", va="center", color=ink, size=8)
        axes.text(middle, box.y + 0.16, box.text, ha="center", va="center", color=MUTED, size=6)
