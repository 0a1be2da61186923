"""The process-to-device figure: node ⊃ process ⊃ GPU, every rank as text, and the links between GPUs.

`boxes.layout_boxes` has laid everything out in inches before anything is drawn; here each box becomes
a patch and its words, in a figure of exactly that size or, smaller, in axes that are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from nbddp.analysis.placement import describe
from nbddp.capabilities.topology.boxes import MARGIN, TITLE, Box, layout_boxes
from nbddp.capabilities.topology.document import topology_document
from nbddp.figures.figure import DescribedFigure, remade
from nbddp.figures.palette import FILLS, FRAME, INK, MUTED, PAPER, RC
from nbddp.launch.topology import Topology

HEADING = 11.0  # points, as all sizes of text


@dataclass(frozen=True)
class BoxStyle:
    """One kind of box: fill, edge, the colours of its title and of the smaller text below, their sizes in points."""

    fill: str = "none"
    edge: str = "none"
    title: str = INK
    text: str = MUTED
    large: float = 8.0
    small: float = 6.5
    line: float = 0.9
    dashed: bool = False
    corner: float = 0.04
    bold: bool = True
    left: bool = False  # title and text begin at the left edge, not about the middle


def _cell(fill: str, ink: str = INK) -> BoxStyle:
    return BoxStyle(fill, PAPER, title=ink, text=ink, large=7.5, corner=0.0, bold=False)


LOOKS = {
    "node": BoxStyle(FRAME, "#8a929a", large=10, small=7.5, corner=0.08, left=True),
    "process": BoxStyle(FILLS[0], PAPER, title=PAPER, text=PAPER, large=9.2, small=7, corner=0.08),
    "gpu": BoxStyle(PAPER, INK),
    "simulated": BoxStyle(PAPER, INK, dashed=True),
    "shared": BoxStyle(PAPER, FILLS[1], text=FILLS[1], line=1.8),
    "idle": BoxStyle(FRAME, MUTED, title=MUTED, dashed=True),
    "numa": BoxStyle(PAPER, "#8a929a", small=7),
    "fold": BoxStyle(PAPER, "#8a929a", large=9, small=7.5, dashed=True, corner=0.08),
    "matrix": BoxStyle(FRAME, "#8a929a", large=8.5, corner=0.08, left=True),
    "head": BoxStyle(large=7.0, bold=False),
    "note": BoxStyle(text=INK, small=7.2, left=True),
    "network": BoxStyle(title=INK, large=7.5, bold=False, left=True),
    "NV": _cell(FILLS[0], PAPER),
    "PIX": _cell("#8fb4d8"),
    "PXB": _cell("#aac7e2"),
    "PHB": _cell("#c4d8eb"),
    "NODE": _cell("#dbe7f3"),
    "SYS": _cell("#eaf1f8"),
    "X": _cell(PAPER),
    "?": _cell(PAPER, MUTED),
}


@remade
def draw_topology(placed: Topology, axes: Any = None) -> DescribedFigure:
    """Draw a placement, in `axes` or in a figure of its own; its words are `describe(placed)`."""
    made = layout_boxes(placed)
    document = topology_document(placed) if axes is None else None
    width, height = made.width, made.height
    with rc_context(RC):
        if axes is None:
            axes = Figure(figsize=(width, height)).add_axes((0, 0, 1, 1))
        scale = _scale(axes, width, height)
        axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
        axes.axis("off")
        axes.set_title(
            heading(placed, width), loc="left", weight="bold", size=HEADING * scale, pad=9 * scale, color=INK
        )
        for start, end in made.lines:
            x, y = zip(start, end, strict=True)
            axes.plot(x, y, color=INK, lw=1.4 * scale, solid_capstyle="projecting", clip_on=False, zorder=0.5)
        for box in made.boxes:
            _draw(axes, box, scale)
    whole = axes.figure.figure  # of a subfigure, the figure it is part of
    return DescribedFigure(whole, describe(placed), document=document)


def heading(placed: Topology, width: float) -> str:
    """The equation, in two lines if `width` inches are too few for one."""
    equation = placed.equation()
    fits = len(equation) * 0.62 * HEADING / 72 <= width
    return equation if fits else equation.replace("; ", ";\n", 1)


def look(box: Box) -> BoxStyle:
    """How a box is drawn; a process has the colour of its node, which its title tells as well."""
    found = LOOKS[box.kind]
    return BoxStyle(**{**vars(found), "fill": FILLS[box.node % len(FILLS)]}) if box.kind == "process" else found


def _scale(axes: Any, width: float, height: float) -> float:
    """By how much the layout shrinks or grows in these axes, text included."""
    place, (across, down) = axes.get_position(), axes.figure.figure.get_size_inches()
    return float(min(place.width * across / width, place.height * down / height))


def _draw(axes: Any, box: Box, scale: float) -> None:
    its = look(box)
    if its.edge != "none":
        axes.add_patch(
            FancyBboxPatch(
                (box.x, box.y),
                box.width,
                box.height,
                boxstyle=f"round,pad=0,rounding_size={its.corner}" if its.corner else "square,pad=0",
                facecolor=its.fill,
                edgecolor=its.edge,
                linewidth=its.line * scale,
                linestyle=(0, (4, 2.5)) if its.dashed else "solid",
                clip_on=False,
            )
        )
    _write(axes, box, its, scale)


def _write(axes: Any, box: Box, its: BoxStyle, scale: float) -> None:
    """Title above, text below it; a title alone in the middle of its box."""
    x, side = (box.x + MARGIN * bool(its.fill != "none"), "left") if its.left else (box.x + box.width / 2, "center")
    y = box.y + TITLE / 2 + 0.02
    if box.kind == "fold":
        y = box.y + box.height / 2 - 0.08
    elif not box.text and box.kind != "matrix" and box.kind != "node":
        y = box.y + box.height / 2
    below = y + 0.11 if box.title else box.y + 0.02
    weight = "bold" if its.bold else "normal"
    axes.text(x, y, box.title, ha=side, va="center", size=its.large * scale, weight=weight, color=its.title)
    axes.text(x, below, box.text, ha=side, va="top", size=its.small * scale, color=its.text, linespacing=1.15)
