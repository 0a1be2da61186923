"""The process-to-device figure: node ⊃ process ⊃ GPU, every rank as text, and the links between GPUs.

`boxes.layout_boxes` has laid everything out in inches before anything is drawn; here each box becomes
a patch and its words, in a figure of exactly that size or, smaller, in axes that are given. The live drawing has a
sheet for each node and each matrix of links, which a page puts in rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from nbddp.analysis.placement import code_words, describe
from nbddp.capabilities.topology.boxes import MARGIN, TITLE, Box, Cell, apart, distinct_links, joints, layout_boxes
from nbddp.figures.document.page import Document
from nbddp.figures.document.sheet import LETTER, Mark, Sheet, text
from nbddp.figures.figure import DescribedFigure, remade
from nbddp.figures.palette import FILLS, FRAME, INK, MUTED, PAPER, RC
from nbddp.launch.machine import Node
from nbddp.launch.topology import Topology

HEADING = 11.0  # points, as all sizes of text


@dataclass(frozen=True)
class BoxStyle:
    """One kind of box: fill, edge, the colours of its title and of the smaller text below, their sizes in points.

    kind: of its bar in the live drawing; empty for a box that is text alone.
    """

    kind: str = ""
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


def _cell(kind: str, fill: str, ink: str = INK) -> BoxStyle:
    return BoxStyle(kind, fill, PAPER, title=ink, text=ink, large=7.5, corner=0.0, bold=False)


LOOKS = {
    "node": BoxStyle("none", FRAME, "#8a929a", large=10, small=7.5, corner=0.08, left=True),
    "process": BoxStyle("process", FILLS[0], PAPER, title=PAPER, text=PAPER, large=9.2, small=7, corner=0.08),
    "gpu": BoxStyle("paper", PAPER, INK),
    "simulated": BoxStyle("paper", PAPER, INK, dashed=True),
    "shared": BoxStyle("paper", PAPER, FILLS[1], text=FILLS[1], line=1.8),
    "idle": BoxStyle("none", FRAME, MUTED, title=MUTED, dashed=True),
    "numa": BoxStyle("paper", PAPER, "#8a929a", small=7),
    "fold": BoxStyle("none", PAPER, "#8a929a", large=9, small=7.5, dashed=True, corner=0.08),
    "matrix": BoxStyle("none", FRAME, "#8a929a", large=8.5, corner=0.08, left=True),
    "head": BoxStyle(large=7.0, bold=False),
    "note": BoxStyle(text=INK, small=7.2, left=True),
    "network": BoxStyle(title=INK, large=7.5, bold=False, left=True),
    "NV": _cell("blue", FILLS[0], PAPER),
    "PIX": _cell("tint", "#8fb4d8"),
    "PXB": _cell("tint", "#aac7e2"),
    "PHB": _cell("tint", "#c4d8eb"),
    "NODE": _cell("none", "#dbe7f3"),
    "SYS": _cell("none", "#eaf1f8"),
    "X": _cell("none", PAPER),
    "?": _cell("none", PAPER, MUTED),
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


# -- the live drawing ------------------------------------------------------------------------------

INCH, INCH_OF_LINKS = 112, 82  # pixels across to an inch of the layout: of a node, of a matrix of links
LINE = 15  # pixels from a line of small print to the next
BESIDE, BUS = 9, 34  # pixels: at each side of a node; below it, with the network
OF_NODE = ("blue", "brown", "green", "purple")  # kinds of processes, as FILLS


def topology_document(placed: Topology) -> Document:
    """Nodes first, joined by their network; then the links within them. Text of its own have only the notes."""
    cells, matrices = apart(placed)
    height = max(cell[0].height for cell in cells)
    items = placed.folded()
    names = joints(items) if placed.nnodes > 1 else [""] * len(items)
    sheets = [node_sheet(cell, height, nodes, name, placed.nnodes > 1)
              for cell, nodes, name in zip(cells, items, names, strict=True)]  # fmt: skip
    sheets += [links_sheet(cell, node) for cell, (node, _) in zip(matrices, distinct_links(placed), strict=True)]
    return Document(sheets, said=placed.untold())


def node_sheet(cell: Cell, height: float, nodes: Sequence[Node], network: str, joined: bool) -> Sheet:
    """A node with its processes and GPUs, and the line that joins it to others; a few words for nodes like it."""
    first, *inner = cell
    if first.kind == "fold":
        height, joined = first.height, False
    whole = round(first.width * INCH) + 2 * BESIDE
    sheet = Sheet(
        first.title.split("\n")[0] or f"node {nodes[0].index}", width=max(whole, _width(network) + 2 * BESIDE)
    )
    boxes = [replace(first, height=height), *inner]
    for box in boxes:
        around = next((b for b in reversed(boxes) if b.kind == "process" and b is not box and b.holds(box)), None)
        where = [] if box is first or box.kind == "node" else [f"node {nodes[0].index}"]
        said = [box.title, box.text, *([around.title] if around else []), *where]
        _add(sheet, box, "\n".join(filter(None, said)), INCH, BESIDE)
    bottom = height * INCH + 2
    if joined:
        middle = (BESIDE + first.width * INCH / 2) / sheet.width
        sheet.body += [sheet.tick(middle, bottom, 12), sheet.rect(0, 1, bottom + 12, 1.5, "rule")]
        if network:
            sheet.text(middle, bottom + 27, network, "s c")
    sheet.height = bottom + (BUS if joined else 2)
    return sheet


def links_sheet(cell: Cell, node: Node) -> Sheet:
    """The matrix of links; each cell says between which GPUs it is."""
    first, *inner = cell
    widest = max(_width(line) for box in inner for line in box.text.split("\n"))
    sheet = Sheet(first.title, width=max(round(first.width * INCH_OF_LINKS) + 4, widest + 20, _width(first.title) + 30))
    _add(sheet, first, first.title, INCH_OF_LINKS, row=-1)
    pairs = [(a.index, b.index, code) for a, row in zip(node.devices, node.links, strict=True)
             for b, code in zip(node.devices, row, strict=True)]  # fmt: skip
    at = iter(pairs)
    for box in inner:
        if box.kind in ("head", "note"):
            _add(sheet, box, "", INCH_OF_LINKS)
            continue
        one, other, code = next(at)
        _add(sheet, box, _link(one, other, code), INCH_OF_LINKS, row=one)
    sheet.height = first.height * INCH + 4
    return sheet


def _link(one: int, other: int, code: str) -> str:
    if one == other:
        return f"GPU {one}"
    return f"GPU {one} and GPU {other}\n{code_words(code) if code else 'the link is unknown'}"


def _add(sheet: Sheet, box: Box, words: str, inch: int, left: float = 2, row: int | None = None) -> None:
    """A box with its texts as a part of the drawing; text alone is no part."""
    its = LOOKS[box.kind]
    if not its.kind:
        sheet.body.append(_texts(sheet, box, "none", inch, left))
        return
    kind = OF_NODE[box.node % len(OF_NODE)] if box.kind == "process" else its.kind
    x, y, end, bottom = left + box.x * inch, 2 + box.y * INCH, left + box.right * inch, 2 + box.bottom * INCH
    look = f"k-{kind}" + " dashed" * its.dashed
    shapes = sheet.rect(x / sheet.width, end / sheet.width, y, bottom - y, look) + _texts(sheet, box, kind, inch, left)
    sheet.mark(shapes, Mark(x / sheet.width, end / sheet.width, y, bottom, words, int(y) if row is None else row))


def _texts(sheet: Sheet, box: Box, kind: str, inch: int, left: float) -> str:
    """Title above, text below it; a title alone is in the middle."""
    beside = box.kind in ("node", "matrix", "note")
    x = (left + box.x * inch + (8 if beside else box.width * inch / 2)) / sheet.width
    side = "" if beside else " c"
    top = 2 + box.y * INCH
    alone = not box.text and box.kind not in ("node", "matrix")
    y = top + box.height * INCH / 2 + 4 if alone else top + TITLE * INCH / 2 + 4
    large = "s" if box.kind in ("head", "gpu", "simulated") or (len(box.kind) < 5 and box.kind.isupper()) else "bold"
    found = text(x, y, box.title, f"t-{kind} {large}{side}") if box.title else ""
    below = y if box.title else top - 2
    for line in box.text.split("\n") if box.text else ():
        below += LINE
        found += text(x, below, line, f"t-{kind} s{side}")
    return found


def _width(words: str) -> int:
    return round(len(words) * LETTER * 1.08)
