"""Where each rank's memory is, as plain data and in words. All sizes are bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from nbddp.analysis.quantities import drawn, note, size
from nbddp.analysis.steps import Origin, none_since, recorded_from
from nbddp.figures.table import Table
from nbddp.launch.topology import counted

PARTS = ("parameters", "module buffers", "gradients", "optimizer state", "DDP buckets")


@dataclass(frozen=True)
class RankMemory:
    """One rank's memory (`nbddp.capabilities.memory.on_rank` says where each number comes from).

    kind: `cuda` or `cpu`. parameters … buckets: bytes that tensors hold between steps. peak: the most that
    was in use since the last cell began: allocated on the GPU, or resident in the process. outside: those of the
    parts that are not in `peak` (of a `cuda` rank what lies on the CPU). start: resident when the worker
    started, before any cell (0 for `cuda`). since_start: the peak is the worker's, not the last cell's. trained: where
    the last step was recorded, if that is not the last cell. passing: what DDP's buckets take in backward alone.
    """

    rank: int = 0
    kind: str = "cpu"
    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    buckets: int = 0
    peak: int = 0
    outside: int = 0
    start: int = 0
    since_start: bool = False
    trained: Origin | None = None
    passing: int = 0

    @property
    def parts(self) -> tuple[int, ...]:
        """As PARTS has them."""
        return (self.parameters, self.buffers, self.gradients, self.optimizer, self.buckets)

    @property
    def kept(self) -> int:
        """What training holds between steps."""
        return sum(self.parts)

    @property
    def rest(self) -> int:
        """The peak without the parts and without what was there at the start; at least 0."""
        return max(0, self.peak - self.start - (self.kept - self.outside))

    @property
    def total(self) -> int:
        """What a bar shows: parts and rest."""
        return self.kept + self.rest


MemoryAnswer = tuple[RankMemory, tuple[int, int | None] | None]  # with run and cell of the last recorded step


@dataclass(frozen=True)
class NameSize:
    """What a name holds on one rank, in bytes.

    parts: by kind, each storage once. tied: tensors that lie in storages of others. spans: bytes of the elements, less
    than the parts if it is a view. whole: of all shards together. shared: other names → bytes in common. tensors:
    storages.
    """

    type: str
    parts: Mapping[str, int]
    tied: int
    spans: int
    whole: int
    sharded: Sequence[str]
    shared: Mapping[str, int]
    tensors: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def rest_name(ranks: Sequence[RankMemory]) -> str:
    """What the rest may be called: on a GPU the allocator knows only tensors, on a CPU it is a process's."""
    return "activations and temporaries" if all(r.kind == "cuda" for r in ranks) else "process: the rest"


def shown_parts(ranks: Sequence[RankMemory]) -> list[tuple[str, list[int]]]:
    """(name, bytes per rank) of the parts and the rest; module buffers only where there are some."""
    found = [(name, [r.parts[i] for r in ranks]) for i, name in enumerate(PARTS)]
    kept = [(name, some) for name, some in found if name != "module buffers" or any(some)]
    return [*kept, (rest_name(ranks), [r.rest for r in ranks])]


def shown_ranks(ranks: Sequence[RankMemory]) -> list[int]:
    """Where in `ranks` those are that have a row or a bar of their own: at most 16, with the most and the least."""
    chosen = drawn((r.rank for r in ranks), [r.rank for r in _extremes(ranks)])
    return [i for i, r in enumerate(ranks) if r.rank in chosen]


def _extremes(ranks: Sequence[RankMemory]) -> tuple[RankMemory, RankMemory]:
    """The ranks with the least and the most."""
    return min(ranks, key=lambda r: r.total), max(ranks, key=lambda r: r.total)


def table(ranks: Sequence[RankMemory]) -> Table:
    """One row for each of `shown_ranks`."""
    parts = shown_parts(ranks)
    started = any(r.start for r in ranks)
    columns = ["rank", *(name for name, _ in parts), "total", *(["at the start"] if started else [])]
    rows: list[list[object]] = [
        [
            ranks[i].rank, *(size(some[i]) for _, some in parts), size(ranks[i].total),
            *([size(ranks[i].start)] if started else []),
        ]
        for i in shown_ranks(ranks)
    ]  # fmt: skip
    return Table(columns, rows)


def sentences(ranks: Sequence[RankMemory]) -> list[str]:
    """What the ranks keep for training, what came on top, and what a folded figure leaves out."""
    lines = [_kept(ranks), *_passing(ranks), _rest(ranks), *_trained(ranks)]
    if said := note(len(ranks), len(shown_ranks(ranks))):
        least, most = _extremes(ranks)
        lines.append(
            f"{said}; overall: least {size(least.total)} (rank {least.rank}), "
            f"median {size(statistics.median(r.total for r in ranks))}, most {size(most.total)} (rank {most.rank})"
        )
    return lines


def span(some: Collection[int], words: Callable[[int], str] = size) -> str:
    """`4.0 MiB`, or `3.9 MiB to 4.1 MiB` where ranks differ."""
    low, high = words(min(some)), words(max(some))
    return low if low == high else f"{low} to {high}"


def _kept(ranks: Sequence[RankMemory]) -> str:
    return f"{kept_in_all(ranks)}: {', '.join(f'{name} {span(some)}' for name, some in shown_parts(ranks)[:-1])}"


def kept_in_all(ranks: Sequence[RankMemory]) -> str:
    """What the ranks keep, without its parts."""
    who = "each rank keeps" if len(ranks) > 1 else f"rank {ranks[0].rank} keeps"
    return f"memory of {counted(len(ranks), 'rank')}: {who} {_span(ranks, lambda r: r.kept)}"


def _passing(ranks: Sequence[RankMemory]) -> list[str]:
    """That buckets exist for a time only, where they do."""
    if not any(r.passing for r in ranks):
        return []
    return [
        f"in backward DDP holds another {_span(ranks, lambda r: r.passing)} of buckets (lazy_bucket_allocation), "
        f"which count in the peak"
    ]


def _rest(ranks: Sequence[RankMemory]) -> str:
    since = "the peak since the worker started" if any(r.since_start for r in ranks) else "the peak of the last cell"
    rest = _span(ranks, lambda r: r.rest)
    if rest_name(ranks) == "process: the rest":
        return (
            f"at {since} the process held {rest} more: activations, temporaries, freed memory that is kept, "
            f"libraries; Python and torch at the start ({_span(ranks, lambda r: r.start)}) are not drawn"
        )
    return f"at {since} {rest} more were allocated: activations and temporaries"


def _trained(ranks: Sequence[RankMemory]) -> list[str]:
    """That the peak is not of the cell that trained, where that is so."""
    found = ranks[0].trained
    if not none_since(found):
        return []
    return [f"{recorded_from('the last recorded step is', found)}, so this peak may not be that of a step"]


def _span(ranks: Sequence[RankMemory], of: Callable[[RankMemory], int]) -> str:
    return span([of(r) for r in ranks])


def unit(most: float) -> tuple[str, float]:
    """The largest unit in which `most` is 1 or more, and its bytes."""
    for name, scale in (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if most >= scale:
            return name, scale
    return "bytes", 1.0
