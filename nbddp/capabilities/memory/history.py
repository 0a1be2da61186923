"""The allocations of one rank over time, as data: from a snapshot of torch's CUDA allocator, or from samples. Pure.

Of a GPU every allocation is known with the Python frames that made it, so the lines that hold memory at a peak are
exact. On a CPU nothing records allocations. So the memory in use is sampled, with the line that ran, and each change
counts for that line. Which memory was freed is not known.

Times are nanoseconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypedDict

CUDA, HEAP, RESIDENT = "cuda", "heap", "resident"
BEFORE = ("", 0)  # in place of a line: what was there before
POINTS = 400  # of a curve that travels: each is the least or the most of a span of time

Place = tuple[str, int]  # file, line
Where = Callable[[Sequence["TracedFrame"]], "Place | None"]


class TracedFrame(TypedDict):
    filename: str
    line: int


class TraceEntry(TypedDict):
    """Of an allocator's history, as far as it is read."""

    action: str
    addr: int
    size: int
    time_us: int
    frames: list[TracedFrame]


class Segment(TypedDict):
    allocated_size: int


class Snapshot(TypedDict):
    """The result of `torch.cuda.memory._snapshot()`; its docstring has the format."""

    segments: list[Segment]
    device_traces: list[list[TraceEntry]]


class MemoryChange(NamedTuple):
    """`bytes` more (or less) in use. place: the user's line, if known; block: which allocation, on a GPU."""

    at: int
    bytes: int
    place: Place | None
    block: Hashable = None


class PhaseMark(NamedTuple):
    """A phase of a step (`forward`, `backward`, `optimizer`) begins or ends."""

    phase: str
    begins: bool
    step: int
    model: int
    at: int


class Phase(NamedTuple):
    name: str
    start: int
    end: int


@dataclass(frozen=True)
class MemoryHistory:
    """`start`: in use when the recording began. lost: earlier allocations were overwritten, so that it begins later
    than the cell. samples: how many were taken, 0 if all allocations are known."""

    kind: str
    began: int
    ended: int
    start: int
    changes: Sequence[MemoryChange]
    samples: Sequence[int] = ()
    lost: bool = False


@dataclass(frozen=True)
class Window:
    """A span of a history. before: in use at its start; peak: the most in use, `at` nanoseconds after the start;
    points: (nanoseconds after the start, bytes); lines: bytes of each line at the peak, most first, and at BEFORE those
    from before; of samples: how much more was in use after the line; samples: how many lie in it; counted: those that
    lines count from."""

    before: int
    peak: int
    at: int
    points: list[tuple[int, int]]
    lines: list[tuple[Place | None, int]]
    samples: int
    counted: int


@dataclass(frozen=True)
class RankAllocations:
    """One rank's window, its phases (nanoseconds since the window's start), and the code of its lines."""

    rank: int
    kind: str
    window: Window
    phases: tuple[Phase, ...]
    length: int
    code: Mapping[Place, str]
    lost: bool = False

    def phase(self) -> str:
        """`in backward`, `between forward and backward`: where in its step the peak is; empty if that is not known."""
        at = self.window.at
        inside = next((p.name for p in self.phases if p.start <= at <= p.end), None)
        if inside is not None:
            return f"in {inside}" if inside else ""
        before = [p.name for p in self.phases if p.end < at][-1:]
        after = [p.name for p in self.phases if p.start > at][:1]
        return f"between {before[0]} and {after[0]}" if before and after else ""


class RecordedSteps(TypedDict):
    """What a rank has of the last recorded cell. steps: each step's peak; why: the reason if it has none."""

    run: int
    cell: int | None
    model: str
    why: str
    steps: dict[int, int]


def from_snapshot(snapshot: Snapshot, where: Where, began: int, ended: int, shift: int, limit: int) -> MemoryHistory:
    """The history in a snapshot.

    where: the user's place among an entry's frames. shift: what added to an entry's time (microseconds since 1970,
    told in ns) gives the clock of `began` and `ended`. limit: entries that the recording keeps of each device.
    """
    changes = [c for d, entries in enumerate(snapshot["device_traces"]) for c in _changes(d, entries, where, shift)]
    changes.sort(key=lambda change: change.at)
    in_use = sum(segment["allocated_size"] for segment in snapshot["segments"])
    lost = any(len(entries) >= limit for entries in snapshot["device_traces"])
    start = in_use - sum(change.bytes for change in changes)
    return MemoryHistory(CUDA, changes[0].at if lost else began, ended, start, changes, lost=lost)


def _changes(device: int, entries: Iterable[TraceEntry], where: Where, shift: int) -> Iterable[MemoryChange]:
    signs = {"alloc": 1, "free_requested": -1}  # the allocator counts memory as free once that was requested
    for entry in entries:
        sign = signs.get(entry["action"])
        if sign is not None:
            place = where(entry["frames"]) if sign > 0 else None
            yield MemoryChange(entry["time_us"] * 1000 + shift, sign * entry["size"], place, (device, entry["addr"]))


def from_samples(kind: str, samples: Sequence[tuple[int, int, Place | None]], start: int) -> MemoryHistory:
    """samples: (when, bytes in use, line that ran); `start` is taken from all bytes."""
    changes = [MemoryChange(at, level - before, place) for (_, before, _), (at, level, place) in pairwise(samples)]
    times = [at for at, _, _ in samples]
    return MemoryHistory(kind, times[0], times[-1], samples[0][1] - start, changes, times)


def window(history: MemoryHistory, start: int, end: int, starts: Sequence[int] = ()) -> Window:
    """What happened from `start` to `end`. starts: of the steps within it. Lines of samples count from the last start
    before the peak: over many steps a line that allocates would outgrow what another has freed."""
    level = history.start + sum(c.bytes for c in history.changes if c.at < start)
    curve = [(start, level)]
    for change in history.changes:
        if start <= change.at <= end:
            level += change.bytes
            curve.append((change.at, level))
    at, peak = max(curve, key=lambda point: point[1])  # the first, if there are several
    since = max((s for s in starts if s <= at), default=start)
    lines = _held(history, at) if history.kind == CUDA else _changed(history, since, at)
    lines[BEFORE] = peak - sum(lines.values())
    points = [(t - start, level) for t, level in thinned([*curve, (end, level)])]
    kept = sorted(((place, size) for place, size in lines.items() if size), key=lambda line: -line[1])
    samples, counted = (sum(a <= t <= b for t in history.samples) for a, b in ((start, end), (since, at)))
    return Window(curve[0][1], peak, at - start, points, kept, samples, counted)


def _held(history: MemoryHistory, until: int) -> dict[Place | None, int]:
    """Line → what it has allocated since the recording began and is not free at `until`."""
    living: dict[Hashable, MemoryChange] = {}
    for change in history.changes:
        if change.at > until:
            break
        if change.bytes > 0:
            living[change.block] = change
        else:
            living.pop(change.block, None)
    found: dict[Place | None, int] = {}
    for change in living.values():
        found[change.place] = found.get(change.place, 0) + change.bytes
    return found


def _changed(history: MemoryHistory, start: int, until: int) -> dict[Place | None, int]:
    """Line → how much more was in use at the samples that saw it, from `start` to `until`."""
    found: dict[Place | None, int] = {}
    for change in history.changes:
        if start <= change.at <= until:
            found[change.place] = found.get(change.place, 0) + change.bytes
    return found


def thinned(points: Sequence[tuple[int, int]], most: int = POINTS) -> list[tuple[int, int]]:
    """At most about `most` points with the same extremes: of each span of time the least and the most, in order."""
    if len(points) <= most:
        return list(points)
    start, end = points[0][0], points[-1][0]
    spans = most // 2 - 1
    width = (end - start) // spans + 1
    groups: dict[int, list[tuple[int, int]]] = {}
    for point in points:
        groups.setdefault((point[0] - start) // width, []).append(point)
    found = [points[0]]
    for some in groups.values():
        low, high = min(some, key=lambda p: p[1]), max(some, key=lambda p: p[1])
        found += sorted({low, high}, key=some.index)
    return [*found, points[-1]]


def steps(marks: Sequence[PhaseMark], began: int) -> dict[int, list[Phase]]:
    """Step → its phases in order: those of the DDP model that came last; without one, steps end with an optimizer's."""
    models = [mark.model for mark in marks if mark.phase != "optimizer"]
    if not models:
        return _optimizers(marks, began)
    found: dict[int, list[Phase]] = {}
    for phase, step in _phases([m for m in marks if m.model == models[-1] or m.phase == "optimizer"]):
        if phase.name != "optimizer" or step in found:
            found.setdefault(step, []).append(phase)
    return {n: some for n, some in found.items() if any(phase.name == "backward" for phase in some)}


def _optimizers(marks: Sequence[PhaseMark], began: int) -> dict[int, list[Phase]]:
    """Each from where the one before ended."""
    found = {}
    for number, (phase, _) in enumerate(_phases(marks)):
        found[number] = [Phase("", began, phase.start), phase]
        began = phase.end
    return found


def _phases(marks: Sequence[PhaseMark]) -> Iterable[tuple[Phase, int]]:
    """Those that have begun and ended, with their steps."""
    begun: dict[str, PhaseMark] = {}
    for mark in marks:
        if mark.begins:
            begun[mark.phase] = mark
        elif mark.phase in begun:
            first = begun.pop(mark.phase)
            yield Phase(mark.phase, first.at, mark.at), first.step
