"""The geometry of the topology figure: a placement → rectangles with their words, and lines between nodes.

A GPU that one process owns lies inside that process. A GPU that several processes share cannot lie in each of them. So
it is drawn once, on a shelf below the processes, with the ranks that share it; idle GPUs and the NUMA nodes stand on
the shelf too. Lengths are inches, y grows downwards, the size of a text is estimated from its length. Pure: no
matplotlib here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from nbddp.analysis.placement import bus_words, code_words, codes, model_words, near
from nbddp.errors import several
from nbddp.launch.machine import Node, Numa, node_holds
from nbddp.launch.topology import Device, Topology, Worker, counted, rank_words

NARROWEST, WIDEST = 4.1, 10.8  # a row of nodes: for the title's sake, and for the page's
NODE_WIDTH, FOLD_WIDTH, PROCESS_WIDTH, GPU_WIDTH, NAMED_GPU_WIDTH, NUMA_WIDTH = 1.75, 1.7, 0.86, 0.66, 1.0, 1.2
FEW_ABREAST = 3  # processes of a node, on a narrow page
MARGIN, GAP, BETWEEN = 0.12, 0.08, 0.2
TITLE, LINE, SMALL = 0.3, 0.135, 0.118  # heights of a title, of a line of text, of one in a GPU
CELL, CELL_HEIGHT, TALLEST = 0.46, 0.26, 0.4  # of the matrix of links: width, and least and greatest height
DROP, SPINE = 0.17, 0.2  # how far the line that joins nodes runs below them, and to the left of them


@dataclass(frozen=True)
class Box:
    """A rectangle from its upper left corner; `kind` is a key of `capabilities.topology.figure.LOOKS`."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    title: str = ""
    text: str = ""
    node: int = 0

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    def holds(self, other: Box) -> bool:
        return (
            self.x <= other.x
            and self.y <= other.y
            and other.right <= self.right + 1e-9
            and other.bottom <= self.bottom + 1e-9
        )

    def moved(self, x: float, y: float) -> Box:
        return replace(self, x=self.x + x, y=self.y + y)


Cell = list[Box]  # an outer box and all that it holds, its upper left corner at the origin


@dataclass
class BoxLayout:
    """All rectangles, outer ones before those they hold, and lines as pairs of (x, y)."""

    boxes: list[Box] = field(default_factory=list)
    lines: list[tuple[tuple[float, float], tuple[float, float]]] = field(default_factory=list)

    @property
    def width(self) -> float:
        return max(b.right for b in self.boxes)

    @property
    def height(self) -> float:
        return max([*(b.bottom for b in self.boxes), *(y for line in self.lines for _, y in line)])

    def add_row(self, cells: Sequence[Cell], x: float, y: float) -> list[Box]:
        """Cells side by side from (x, y), nodes as high as the highest; their outer boxes."""
        height = max(cell[0].height for cell in cells)
        outer = []
        for first, *inner in cells:
            own = first.height if first.kind == "matrix" else height
            outer.append(replace(first, height=own).moved(x, y))
            self.boxes += [outer[-1], *(b.moved(x, y) for b in inner)]
            x += first.width + BETWEEN
        return outer


def layout_boxes(placed: Topology) -> BoxLayout:
    """The whole figure: nodes in rows, what joins them, the links within them, and what was not told."""
    items, matrices = placed.folded(), distinct_links(placed)
    cells, made = _node_cells(placed, items, bool(matrices)), BoxLayout()
    if len(cells) == 1 and len(matrices) == 1:
        made.add_row([cells[0], _matrix(*matrices[0], cells[0][0].height)], 0, 0)
    else:
        _add_nodes(made, placed, items, cells)
        for row in _rows([_matrix(*found) for found in matrices]):
            made.add_row(row, made.boxes[0].x, made.height + BETWEEN)
    _add_notes(made, placed)
    return made


def apart(placed: Topology) -> tuple[list[Cell], list[Cell]]:
    """The nodes, with few processes abreast, and the links within them: for a page, which puts them in rows itself."""
    items = placed.folded()
    cells = _node_cells(placed, items, True, FEW_ABREAST)
    return cells, [_matrix(*found) for found in distinct_links(placed)]


def distinct_links(placed: Topology) -> list[tuple[Node, str]]:
    """One node for each different matrix of links, with the words for all nodes that have it."""
    found: dict[object, list[Node]] = {}
    for node in placed.nodes:
        if node.links:
            found.setdefault((node.links, tuple(d.index for d in node.devices)), []).append(node)
    return [(nodes[0], several("node", (n.index for n in nodes))) for nodes in found.values()]


def columns(count: int, most: float) -> int:
    """Columns of a grid of `count` items, at most `most` wide and with its rows about equally long."""
    rows = ceil(count / max(1, int(most)))
    return ceil(count / max(1, rows))


def _node_cells(placed: Topology, items: Sequence[tuple[Node, ...]], narrow: bool, most: int = 8) -> list[Cell]:
    abreast = min(most, 4 if len(items) > 1 or narrow else 8)
    room = abreast * (_process_width(placed) + GAP) - GAP + 2 * MARGIN + 0.01  # against rounding
    plans = [_NodePlan(placed, nodes[0], room) for nodes in items]
    narrowest = NODE_WIDTH if narrow else (NARROWEST + BETWEEN) / len(items) - BETWEEN
    width = max([NODE_WIDTH, narrowest, *(plan.width for plan in plans)])
    return [
        plan.boxes(width) if len(nodes) == 1 else _fold(placed, nodes) for nodes, plan in zip(items, plans, strict=True)
    ]


def _fold(placed: Topology, nodes: Sequence[Node]) -> Cell:
    title = f"nodes {nodes[0].index}–{nodes[-1].index}: same"
    return [Box("fold", 0, 0, max(FOLD_WIDTH, 0.085 * len(title) + 0.2), 2 * TITLE, title, placed.ranks_on(nodes))]


def _rows(cells: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
    """Cells in rows of at most WIDEST inches, about equally many in each."""
    if not cells:
        return
    total = sum(cell[0].width + BETWEEN for cell in cells) - BETWEEN
    widest = max(cell[0].width for cell in cells)
    fit = len(cells) if total <= WIDEST else columns(len(cells), (WIDEST + BETWEEN) / (widest + BETWEEN))
    for i in range(0, len(cells), fit):
        yield cells[i : i + fit]


def _add_nodes(made: BoxLayout, placed: Topology, items: Sequence[tuple[Node, ...]], cells: Sequence[Cell]) -> None:
    """Rows of nodes; a line below each row joins its nodes, one to the left of them joins the rows."""
    rows, names = list(_rows(cells)), joints(items)
    joined = placed.nnodes > 1
    left = SPINE if joined and len(rows) > 1 else 0.0
    y, ends = 0.0, []
    for row in rows:
        outer = made.add_row(row, left, y)
        y = outer[0].bottom + BETWEEN
        if joined:
            ends.append(_join(made, outer, names[: len(outer)], 0.0 if left else None))
            y = max(made.height, ends[-1]) + BETWEEN
        names = names[len(outer) :]
    if left:
        made.lines.append(((0.0, ends[0]), (0.0, ends[-1])))


def _join(made: BoxLayout, outer: Sequence[Box], names: Sequence[str], spine: float | None) -> float:
    """A line below a row of nodes, out to the `spine` if there is one, with the names of what joins them; its y."""
    at = outer[0].bottom + DROP
    middles = [b.x + b.width / 2 for b in outer]
    made.lines += [((x, b.bottom), (x, at)) for x, b in zip(middles, outer, strict=True)]
    made.lines.append(((middles[0] if spine is None else spine, at), (middles[-1], at)))
    for x, name in zip(middles, names, strict=True):
        if name:
            made.boxes.append(Box("network", x + 0.04, at + 0.03, 0.075 * len(name) + 0.1, 0.2, name))
    return at


def joints(items: Sequence[tuple[Node, ...]]) -> list[str]:
    """What joins each node to the others, as far as it is known; said once, at the first, if it is the same for all."""
    names = [nodes[0].interface.describe() if nodes[0].interface else "" for nodes in items]
    if len(set(names)) > 1:
        return [name or "network unknown" for name in names]
    return [f"network: {names[0]}" if names[0] else "network", *[""] * (len(names) - 1)]


def _add_notes(made: BoxLayout, placed: Topology) -> None:
    for sentence in placed.untold():
        text = textwrap.fill(sentence, max(30, int(made.width * 16)))
        width = max(len(line) for line in text.splitlines()) / 16 + 0.1
        made.boxes.append(Box("note", 0, made.height + GAP, width, LINE * _lines(text) + 0.06, "", text))


def _matrix(node: Node, whose: str, beside: float = 0.0) -> Cell:
    """The links of a node's GPUs, the code in each cell, and what the codes mean.

    beside: the height of what stands next to it, which the cells grow to match.
    """
    title = f"links between the GPUs of {whose}"
    legend = "\n".join(code_words(code) for code in codes(node.links))
    n, top, under = len(node.devices), TITLE + CELL_HEIGHT, GAP + _lines(legend) * LINE + MARGIN
    tall = min(TALLEST, max(CELL_HEIGHT, (beside - top - under) / n))
    width = 2 * MARGIN + max((n + 1) * CELL, 0.079 * len(title), _longest(legend) / 16)
    found = [Box("matrix", 0, 0, width, top + n * tall + under, title)]
    for i, device in enumerate(node.devices):
        head, y = f"GPU {device.index}", top + i * tall
        found.append(Box("head", MARGIN + (i + 1) * CELL, TITLE, CELL, CELL_HEIGHT, head))
        found.append(Box("head", MARGIN, y, CELL, tall, head))
        for j, code in enumerate(node.links[i]):
            found.append(Box(code_kind(code), MARGIN + (j + 1) * CELL, y, CELL, tall, code or "?"))
    found.append(
        Box("note", MARGIN, top + n * tall + GAP, width - 2 * MARGIN, _lines(legend) * LINE + 0.04, "", legend)
    )
    return found


def code_kind(code: str) -> str:
    """The look of a cell: `NV` for any number of NVLinks, else the code itself."""
    return "NV" if code.startswith("NV") else code or "?"


def _process_width(placed: Topology) -> float:
    """Least width of a process: that of its rank, which may have four digits and more."""
    return PROCESS_WIDTH + 0.08 * max(0, len(str(placed.world_size - 1)) - 3)


class _NodePlan:
    """How one node is divided, before its final width is known."""

    def __init__(self, placed: Topology, node: Node, room: float) -> None:
        self.node, self.placed, self.workers = node, placed, placed.on_node(node.index)
        self.owners = placed.owners(node.index)
        self.shares = any(len(ranks) > 1 for ranks in self.owners.values())
        self.models = {model_words(d) for d in node.devices}
        self.gpu_width = NAMED_GPU_WIDTH if len(self.models) > 1 else GPU_WIDTH
        most = max((len(self._inside(w)) for w in self.workers), default=0)
        self.gpus_per_row = columns(most, (room - 2 * MARGIN - GAP) / (self.gpu_width + GAP))
        self.process = max(_process_width(placed), self.gpus_per_row * (self.gpu_width + GAP) + GAP)
        self.per_row = columns(len(self.workers), (room - 2 * MARGIN + GAP) / (self.process + GAP))
        self.width = self.per_row * (self.process + GAP) - GAP + 2 * MARGIN

    def boxes(self, width: float) -> Cell:
        inner = width - 2 * MARGIN
        text = textwrap.fill(self._holds(), int(inner * 16))
        top = TITLE + LINE * _lines(text) + GAP
        each = (inner + GAP) / self.per_row - GAP if self.per_row else inner
        found = list(in_rows([self._process(w, each) for w in self.workers], self.per_row, MARGIN, top))
        for shelf in (self._spare_gpus, self._cores):
            found += shelf(inner, max((b.bottom for b in found), default=top - GAP) + GAP)
        height = max((b.bottom for b in found), default=top) + MARGIN
        return [Box("node", 0, 0, width, height, self.node.label(), text, self.node.index), *found]

    def _holds(self) -> str:
        """`8 GPUs · NVIDIA H100 80GB HBM3, 79.6 GiB`, or who shares the cores of a node without GPUs."""
        if self.node.devices:
            model = next(iter(self.models)) if len(self.models) == 1 else ""
            return " · ".join(filter(None, (node_holds(self.node), model)))
        if self.node.simulated:
            return "cores shared by all nodes"
        return f"CPU · {'shared by' if len(self.workers) > 1 else 'for'} {rank_words(w.rank for w in self.workers)}"

    def _inside(self, worker: Worker) -> tuple[Device, ...]:
        return () if self.shares else worker.devices

    def _process(self, worker: Worker, width: float) -> Cell:
        letters = int(width * 16.5)
        text = _filled(self._process_lines(worker), letters)
        top = TITLE + LINE * max(_lines(_filled(self._process_lines(w), letters)) for w in self.workers) + 0.06
        gpus = self._gpus(self._inside(worker), width - 2 * GAP, self.gpus_per_row)
        found = list(in_rows(gpus, self.gpus_per_row, GAP, top))
        bottom = max((b.bottom for b in found), default=top - 0.05)
        return [Box("process", 0, 0, width, bottom + GAP, f"rank {worker.rank}", text, worker.node), *found]

    def _process_lines(self, worker: Worker) -> list[str]:
        return [f"local rank {worker.local_rank}", *([f"on {worker.device_words()}"] if self.shares else [])]

    def _spare_gpus(self, width: float, y: float) -> Iterable[Box]:
        """GPUs that lie in no process: idle ones, and all of them where some are shared."""
        devices = [d for d in self.node.devices if self._is_spare(d)]
        across = columns(len(devices), (width + GAP) / (self.gpu_width + GAP))
        return in_rows(self._gpus(devices, width, across), across, MARGIN, y)

    def _is_spare(self, device: Device) -> bool:
        return self.shares or not self.owners[device.index]

    def _gpus(self, devices: Sequence[Device], width: float, across: int) -> list[Cell]:
        each = (width + GAP) / across - GAP if across else width
        letters = max(8, int(each * 17 - 1))
        texts = {d.index: _filled(self._gpu_lines(d), letters) for d in self.node.devices}
        peers = [d for d in self.node.devices if any(self._is_spare(d) == self._is_spare(own) for own in devices)]
        lines = max((_lines(texts[d.index]) for d in peers), default=0)
        height = TITLE + lines * SMALL + 0.04 * bool(lines)
        return [[Box(self._kind(d), 0, 0, each, height, f"GPU {d.index}", texts[d.index])] for d in devices]

    def _gpu_lines(self, device: Device) -> list[str]:
        """What stands in a GPU: who shares it or that it is idle, model and memory if they differ, bus id, NUMA."""
        ranks = self.owners[device.index]
        model = model_words(device).removeprefix("NVIDIA ").split(", ") if len(self.models) > 1 else []
        numa = f"NUMA {device.numa}" if device.numa is not None else ""
        use = "idle" if not ranks else rank_words(ranks) if self.shares else ""
        return [line for line in (use, *model, bus_words(device.bus_id), numa) if line]

    def _kind(self, device: Device) -> str:
        own = "simulated" if device.simulated else "gpu"
        return ("idle", own, "shared")[min(len(self.owners[device.index]), 2)]

    def _cores(self, width: float, y: float) -> Iterable[Box]:
        """The NUMA nodes with their cores, or the number of cores where no NUMA node is to be seen."""
        groups = [self._numa(numa) for numa in self.node.numa] or self._counted_cores()
        across = columns(len(groups), (width + GAP) / (NUMA_WIDTH + GAP))
        each = (width + GAP) / max(1, across) - GAP
        filled = [(title, _filled(lines, int(each * 16))) for title, lines in groups]
        height = TITLE + LINE * max((_lines(text) for _, text in filled), default=0) + 0.04
        cells = [[Box("numa", 0, 0, each, height, title, text)] for title, text in filled]
        return in_rows(cells, across, MARGIN, y)

    def _numa(self, numa: Numa) -> tuple[str, list[str]]:
        cores = several("core", numa.cores) if numa.cores else "no core that may be used"
        there = ", ".join(near(self.placed, self.node, numa))
        return f"NUMA {numa.index}", [line for line in (cores, there) if line]

    def _counted_cores(self) -> list[tuple[str, list[str]]]:
        """Nothing for a planned node, whose cores nobody said, and for a simulated one, which has none of its own."""
        if self.node.planned or self.node.simulated:
            return []
        return [(counted(self.node.cores, "core"), [])]


def in_rows(groups: Sequence[Cell], across: int, x: float, y: float) -> Iterator[Box]:
    """Groups of equal size side by side, `across` to a row, the first with its corner at (x, y)."""
    for i, group in enumerate(groups):
        row, column = divmod(i, across)
        for box in group:
            yield box.moved(x + column * (group[0].width + GAP), y + row * (group[0].height + GAP))


def _filled(lines: Iterable[str], letters: int) -> str:
    return "\n".join(textwrap.fill(line, letters) for line in lines)


def _lines(text: str) -> int:
    return text.count("\n") + 1 if text else 0


def _longest(text: str) -> int:
    return max(map(len, text.splitlines()), default=0)
