"""The process-to-device figure as live drawings: one for each node and each matrix of links, which a page puts in rows.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nbddp.analysis.placement import code_words
from nbddp.capabilities.topology.boxes import TITLE, Box, Cell, apart, distinct_links, joints
from nbddp.figures.document.page import Document
from nbddp.figures.document.sheet import LETTER, Mark, Sheet, text
from nbddp.launch.machine import Node
from nbddp.launch.topology import Topology

INCH, INCH_OF_LINKS = 112, 82  # pixels across to an inch of the layout: of a node, of a matrix of links
LINE = 15  # pixels from a line of small print to the next
BESIDE, BUS = 9, 34  # pixels: at each side of a node; below it, with the network
KINDS = {  # of boxes: the kind of their bar
    "node": "none", "gpu": "paper", "simulated": "paper", "shared": "paper", "idle": "none", "numa": "paper",
    "fold": "none", "matrix": "none", "NV": "blue", "PIX": "tint", "PXB": "tint", "PHB": "tint", "NODE": "none",
    "SYS": "none", "X": "none", "?": "none",
}  # fmt: skip
OF_NODE = ("blue", "brown", "green", "purple")
DASHED = ("simulated", "idle", "fold")


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
        _draw(sheet, box, "\n".join(filter(None, said)), INCH, BESIDE)
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
    _draw(sheet, first, first.title, INCH_OF_LINKS, row=-1)
    pairs = [(a.index, b.index, code) for a, row in zip(node.devices, node.links, strict=True)
             for b, code in zip(node.devices, row, strict=True)]  # fmt: skip
    at = iter(pairs)
    for box in inner:
        if box.kind in ("head", "note"):
            _write(sheet, box, INCH_OF_LINKS)
            continue
        one, other, code = next(at)
        _draw(sheet, box, _link(one, other, code), INCH_OF_LINKS, row=one)
    sheet.height = first.height * INCH + 4
    return sheet


def _link(one: int, other: int, code: str) -> str:
    if one == other:
        return f"GPU {one}"
    return f"GPU {one} and GPU {other}\n{code_words(code) if code else 'the link is unknown'}"


def _draw(sheet: Sheet, box: Box, words: str, inch: int, left: float = 2, row: int | None = None) -> None:
    """A box with its texts as a part of the drawing."""
    kind = OF_NODE[box.node % len(OF_NODE)] if box.kind == "process" else KINDS.get(box.kind)
    if kind is None:
        return _write(sheet, box, inch, left)
    x, y, end, bottom = left + box.x * inch, 2 + box.y * INCH, left + box.right * inch, 2 + box.bottom * INCH
    look = f"k-{kind}" + (" dashed" if box.kind in DASHED else "")
    shapes = sheet.rect(x / sheet.width, end / sheet.width, y, bottom - y, look) + _texts(sheet, box, kind, inch, left)
    place = Mark(x / sheet.width, end / sheet.width, y, bottom, words, int(y) if row is None else row)
    sheet.mark(shapes, place)
    return None


def _write(sheet: Sheet, box: Box, inch: int, left: float = 2) -> None:
    sheet.body.append(_texts(sheet, box, "none", inch, left))


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
