"""The ranks' allocations over a step (or a cell) side by side: the bytes of each line at the peak, as text and rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbddp.analysis.quantities import drawn, duration, note, size
from nbddp.analysis.steps import Origin, recorded_from
from nbddp.capabilities.memory.history import BEFORE, CUDA, HEAP, Place, RankAllocations
from nbddp.capabilities.memory.parts import span
from nbddp.figures.table import Table
from nbddp.launch.topology import rank_words

MOST_LINES = 8  # with a row of their own
CODE = 56  # characters of a line's code
FEW = 5  # samples: with fewer, chance decides in which line a change is seen


@dataclass(frozen=True)
class Allocations:
    """`step` None: the whole cell. steps: those that can be asked for. missing: ranks without a recording, each with
    the reason. origin: as a recording of timings has it."""

    ranks: Sequence[RankAllocations]
    step: int | None
    steps: Sequence[int]
    model: str = ""
    missing: Mapping[int, str] | None = None
    origin: Origin | None = None

    @property
    def sampled(self) -> bool:
        return any(r.kind != CUDA for r in self.ranks)


@dataclass(frozen=True)
class PeakLine:
    """A line of the program and what it holds at the peak, by rank."""

    name: str
    code: str
    held: Mapping[int, int]


def lines(found: Allocations) -> list[PeakLine]:
    """Of all ranks, those first that hold the most on any; what has no place of its own is one line."""
    names: dict[Place | None, dict[int, int]] = {}
    code: dict[Place | None, str] = {}
    for r in found.ranks:
        for place, held in r.window.lines:
            names.setdefault(place, {})[r.rank] = held
            code.setdefault(place, r.code.get(place, "") if place is not None else "")
    made = [PeakLine(_name(place, found), code[place], held) for place, held in names.items()]
    return sorted(made, key=lambda line: -max(line.held.values()))


def _name(place: Place | None, found: Allocations) -> str:
    if place is None:
        return "no line of your code" if found.sampled else "no Python line (backward's thread)"
    if place == BEFORE:
        return "before the step" if found.sampled and found.steps else "before the cell"
    return f"{place[0].removeprefix('Cell ')} line {place[1]}"


def table(found: Allocations) -> Table:
    """A row per line of the program, most first, and one for the rest."""
    some = lines(found)
    last = "change until the peak" if found.sampled else "held at the peak"
    rows: list[list[object]] = [
        [line.name, line.code[:CODE], span(line.held.values(), signed), _ranks(line.held, found)]
        for line in some[:MOST_LINES]
    ]
    rest = {r.rank: sum(line.held.get(r.rank, 0) for line in some[MOST_LINES:]) for r in found.ranks}
    if any(rest.values()):
        rows.append([f"{len(some) - MOST_LINES} other lines", "", span(rest.values(), signed), _ranks(rest, found)])
    return Table(["line", "code", last, "ranks"], rows)


def _ranks(held: Mapping[int, int], found: Allocations) -> str:
    return "all" if len(held) == len(found.ranks) else rank_words(sorted(held)).removeprefix("ranks ").removeprefix(
        "rank "
    )  # fmt: skip


def signed(count: int) -> str:
    return size(count) if count >= 0 else f"−{size(-count)}"


def heading(found: Allocations) -> str:
    """What is shown: `allocations over step 3 of Net`."""
    of = f" of {found.model}" if found.model and found.step is not None else ""
    what = "the cell" if found.step is None else f"step {found.step}{of}"
    return recorded_from(f"allocations over {what}", found.origin)


def extremes(found: Allocations) -> tuple[RankAllocations, RankAllocations]:
    """The ranks with the lowest and the highest peak."""
    return min(found.ranks, key=lambda r: r.window.peak), max(found.ranks, key=lambda r: r.window.peak)


def shown_ranks(found: Allocations) -> list[RankAllocations]:
    """At most 16, those with the highest and the lowest peak among them."""
    chosen = drawn((r.rank for r in found.ranks), [r.rank for r in extremes(found)])
    return [r for r in found.ranks if r.rank in chosen]


def sentences(found: Allocations) -> list[str]:
    """The highest peak, what holds it, what the figures are, and that not all ranks are drawn."""
    least, most = extremes(found)
    phase = f" {most.phase()}" if most.phase() else ""
    began = "the cell" if found.step is None else "the step"
    when = f"{duration(most.window.at / 1e9)} after {began} began"
    text = f"rank {most.rank} peaks at {size(most.window.peak)}{phase}, {when}"
    if most.window.peak != least.window.peak:
        text += f"; the lowest peak is rank {least.rank}'s, {size(least.window.peak)}"
    few = note(len(found.ranks), len(shown_ranks(found)))
    return [text, *_top(most, found), *_kind(found), *_gaps(found), *filter(None, [few])]


def _top(most: RankAllocations, found: Allocations) -> list[str]:
    own = [(place, held) for place, held in most.window.lines if place not in (None, BEFORE) and held > 0]
    if not own:
        return []
    place, held = own[0]
    code = most.code.get(place, "")[:CODE] if place is not None else ""
    named = _name(place, found) + (f" ({code})" if code else "")
    if found.sampled and most.window.counted < FEW:
        return ["where memory grew most is not known: the samples are too few"]
    if found.sampled:
        return [f"until the peak, memory grew most at {named}: {size(held)}"]
    return [f"of the cell's lines, {named} holds the most: {size(held)}"]


def _kind(found: Allocations) -> list[str]:
    if not found.sampled:
        return []
    counts = [r.window.samples for r in found.ranks]
    every = statistics.median(r.length / max(1, r.window.samples) for r in found.ranks)
    of = "memory that malloc has given out" if found.ranks[0].kind == HEAP else "resident memory of the process"
    return [
        f"sampled: {of} since the worker started, {span(counts, str)} samples per rank, about one in "
        f"{duration(every / 1e9)}; memory freed before the next sample is missed, and a change counts for the line "
        "where it was seen"
    ]


def _gaps(found: Allocations) -> list[str]:
    said = [f"nothing was recorded on rank {rank}: {why}" for rank, why in sorted((found.missing or {}).items())[:1]]
    others = len(found.missing or {}) - 1
    if others > 0:
        said[0] += f" (and on {others} more)"
    if any(r.lost for r in found.ranks):
        said.append("the recording was full: the cell's first allocations are missing and count as before the cell")
    return said
