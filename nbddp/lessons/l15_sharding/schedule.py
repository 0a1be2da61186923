"""Lesson 15's second explorer: when FSDP gathers a layer, computes with it and frees it, over one step.

Each rank has one stream that computes and one link on which collectives run one after another, in the order in which
they are issued; a collective begins when all ranks have issued it. Backward takes twice as long as forward. With
`ahead` = 0 a layer's all-gather is issued when the layer before it is through, in backward behind that layer's
reduce-scatter; with 1 it is issued when the computation of the layer before it begins, as FSDP2 does. The last
layer is not freed after forward, since backward begins with it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbddp.launch.topology import counted

FORWARD, BACKWARD = 1.0, 2.0  # time of a layer's computation; the unit of all times here
SLOW = 1.5  # times as long, on the slow rank
FREE, KEEP = "freed, gathered again in backward", "kept until backward"
COMPUTE, GATHER, SCATTER = "compute", "all-gather", "reduce-scatter"


@dataclass(frozen=True)
class WorkSpan:
    """Something that takes `start` to `end`: `kind` is COMPUTE, GATHER or SCATTER, of `layer`."""

    kind: str
    layer: int
    backward: bool
    start: float
    end: float


@dataclass(frozen=True)
class LayerInMemory:
    """A layer that is there in full on a rank from `start` to `end`."""

    layer: int
    start: float
    end: float


@dataclass(frozen=True)
class ShardedStep:
    """One step on two ranks. spans, held: by rank; the spans of the link are the same on both."""

    layers: int
    ahead: int
    link: float
    after: str
    slow: bool
    spans: tuple[tuple[WorkSpan, ...], ...]
    held: tuple[tuple[LayerInMemory, ...], ...]

    @property
    def total(self) -> float:
        return max(s.end for row in self.spans for s in row)

    @property
    def gathers(self) -> int:
        return sum(s.kind == GATHER for s in self.spans[0])

    def computes(self, rank: int) -> float:
        return sum(s.end - s.start for s in self.spans[rank] if s.kind == COMPUTE)

    def exposed(self, rank: int) -> float:
        """How long a rank computes nothing."""
        return self.total - self.computes(rank)

    def peak(self, rank: int) -> int:
        """The most layers that are there in full at one moment."""
        return max(self.count(rank, h.start) for h in self.held[rank])

    def count(self, rank: int, moment: float) -> int:
        """Layers that are there in full from `moment` on."""
        return sum(h.start <= moment < h.end for h in self.held[rank])

    def head(self) -> str:
        ahead = "no prefetch" if not self.ahead else f"prefetch {counted(self.ahead, 'layer')} ahead"
        return f"one step of {counted(self.layers, 'layer')}, {ahead}; after forward a layer is {self.after}"

    def lines(self) -> list[str]:
        """A line per rank: how long it takes, how much of it is exposed, what it holds."""
        rows = []
        for rank in range(len(self.spans)):
            name = f"rank {rank} ({SLOW:g} × slower)" if self.slow and rank == 1 else f"rank {rank}"
            rows.append(
                f"{name}: computes {self.computes(rank):g}, exposed {self.exposed(rank):g}; "
                f"at most {counted(self.peak(rank), 'layer')} of {self.layers} in full"
            )
        return rows

    def describe(self) -> str:
        moved = (
            f"{counted(self.gathers, 'all-gather')} and {counted(self.layers, 'reduce-scatter')} of {self.link:g} each"
        )
        total = f"the step takes {self.total:g} (forward of one layer: {FORWARD:g}); {moved}"
        row = self.spans[0]
        told = [f"  {s.start:g}–{s.end:g} {_what(s)}" for s in sorted(row, key=lambda s: (s.start, s.end))]
        return "\n".join([self.head(), total, *self.lines(), "rank 0:", *told])


def _what(span: WorkSpan) -> str:
    way = "backward" if span.backward else "forward"
    return f"{way} of layer {span.layer}" if span.kind == COMPUTE else f"{span.kind} of layer {span.layer}"


def schedule_gathers(
    layers: int = 4, ahead: int = 0, link: float = 1.0, after: str = FREE, slow: bool = False
) -> ShardedStep:
    """layers: in the model; ahead: how many layers are gathered before they are needed; link: the time of an all-gather
    or a reduce-scatter of one layer, forward of one layer being 1; after: FREE or KEEP; slow: whether rank 1 is."""
    line = _Line((1.0, SLOW if slow else 1.0), link)
    order = [(i, False) for i in range(layers)] + [(i, True) for i in reversed(range(layers))]
    needs = [not back or (after == FREE and layer < layers - 1) for layer, back in order]
    asked = 0
    for k, (layer, back) in enumerate(order):
        while asked <= k:
            line.gather(order[asked], needs[asked])
            asked += 1
        line.begin(layer, back)
        while ahead and asked <= min(k + ahead, len(order) - 1):
            line.gather(order[asked], needs[asked])
            asked += 1
        line.finish(layer, back, frees=back or (after == FREE and layer < layers - 1))
    return ShardedStep(layers, ahead, link, after, slow, *line.result())


class _Line:
    """What has been scheduled so far. A rank computes one thing after another, and so does the link."""

    def __init__(self, speeds: Sequence[float], link: float):
        self.speeds, self.link, self.ranks = speeds, link, range(len(speeds))
        self.now = [0.0 for _ in self.ranks]  # when a rank issues what it issues next
        self.busy = 0.0  # until when the link is
        self.there: dict[tuple[int, bool], float] = {}
        self.since: dict[int, float] = {}
        self.until = [0.0 for _ in self.ranks]
        self.spans: list[list[WorkSpan]] = [[] for _ in self.ranks]
        self.held: list[list[LayerInMemory]] = [[] for _ in self.ranks]

    def gather(self, what: tuple[int, bool], needed: bool) -> None:
        layer, back = what
        if not needed:
            self.there[what] = 0.0
            return
        start = self._collective(GATHER, layer, back)
        self.there[what], self.since[layer] = self.busy, start

    def _collective(self, kind: str, layer: int, back: bool) -> float:
        start = max(self.busy, *self.now)
        self.busy = start + self.link
        for row in self.spans:
            row.append(WorkSpan(kind, layer, back, start, self.busy))
        return start

    def begin(self, layer: int, back: bool) -> None:
        """Computation starts when the layer is there and the one before is through."""
        for r in self.ranks:
            start = max(self.until[r], self.there[layer, back])
            end = start + (BACKWARD if back else FORWARD) * self.speeds[r]
            self.spans[r].append(WorkSpan(COMPUTE, layer, back, start, end))
            self.now[r], self.until[r] = start, end

    def finish(self, layer: int, back: bool, frees: bool) -> None:
        for r in self.ranks:
            self.now[r] = self.until[r]
            if frees:
                self.held[r].append(LayerInMemory(layer, self.since[layer], self.until[r]))
        if back:
            self._collective(SCATTER, layer, back)

    def result(self) -> tuple[tuple[tuple[WorkSpan, ...], ...], tuple[tuple[LayerInMemory, ...], ...]]:
        return tuple(map(tuple, self.spans)), tuple(map(tuple, self.held))
