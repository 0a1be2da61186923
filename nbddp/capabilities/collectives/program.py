"""The content of a trace of any program: where each rank's time goes, who arrives last at collectives and why, and the
longest calls. Words and tables, the same for a figure, a console and a test.

Of a rank with GPUs the longest kernels and copies count with their durations, as in Holistic Trace Analysis' "Kernel
Breakdown"; of one without, collectives with the time of their transfer; and operations with their own time, without
operations inside them ("host self duration" in TensorBoard's profiler plugin).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbddp.analysis.activity import Activity, activities
from nbddp.analysis.cause import SlowRankCause, steady
from nbddp.analysis.quantities import drawn, duration, note, percent
from nbddp.analysis.steps import Place, common, length
from nbddp.capabilities.collectives.breakdown import Split, split, whole
from nbddp.capabilities.collectives.instances import (
    LATE,
    CollectiveInstance,
    Kind,
    LateRank,
    kinds,
    latest,
    meetings,
    places,
    stretches,
    waits,
)
from nbddp.figures.table import Table
from nbddp.launch.topology import counted, rank_words

if TYPE_CHECKING:  # it imports matplotlib
    from nbddp.figures.figure import DescribedFigure


import re

from nbddp.analysis.activity import TRANSFER, by_rank, communicates, on_gpu, span
from nbddp.capabilities.trace.merge import WAIT

MOST_KINDS = 8  # of collectives
RANKS = ("rank", "compute", "communication", "exposed", "of it waiting", "copies", "idle", "overlapped")
KINDS = ("collective", "ranks", "calls", "last to arrive", "waits for it", "moves")
CALLS = ("kernel or call", "kind", "calls", "in all", "longest", "most on")
MOST = 10
Event = Mapping[str, Any]
TEMPLATE = re.compile(r"<[^<>]*>|\([^()]*\)")
LETTERS = 60


@dataclass(frozen=True)
class Breakdown:
    """ranks: rank → its time. gpus: whether the times are of GPUs. late: the rank that the others wait for, `why` it is
    late; None where no rank is late enough, or the cause has no evidence. calls: the longest. notes: what else is to
    be said. title: what it is of; window: of which time. waits_at: rank → the lines at which it
    waits for others, the longest waits first."""

    ranks: Mapping[int, Split]
    gpus: bool
    kinds: Sequence[Kind]
    calls: Sequence[Longest]
    late: LateRank | None = None
    why: SlowRankCause | None = None
    notes: Sequence[str] = ()
    title: str = ""
    window: str = "from the first activity on any rank to the last"
    waits_at: Mapping[int, Sequence[Place]] = field(default_factory=dict)

    def draw(self) -> DescribedFigure:
        """The figure of it, with matplotlib."""
        from nbddp.capabilities.collectives.figure import draw_program

        return draw_program(self)

    @property
    def whole(self) -> int:
        """Nanoseconds from the first activity on any rank to the last."""
        return max((s.whole for s in self.ranks.values()), default=0)

    @property
    def shown(self) -> list[int]:
        """The ranks with a row and a bar of their own: the late one among them."""
        return drawn(self.ranks, [self.late.rank] if self.late is not None else [])

    def sentences(self) -> list[str]:
        """What it shows, the most important first."""
        if not self.whole:
            return [f"{self.title}no compute or communication was recorded"]
        return [self._first(), *self._overlap(), *self.unseen()]

    def unseen(self) -> list[str]:
        """Of the sentences those that no bar shows."""
        unknown = self.whole and self.late is None and self._mean(lambda s: s.waiting) >= LATE
        words = "no rank is known to be late: another one comes last each time, or too few collectives tell"
        return [*self.of_late(), *([words] if unknown else []), *self.folded(), *self.notes]

    def of_late(self) -> list[str]:
        """On the late rank, and why it is late; empty where none is."""
        if self.late is None or not self.whole:
            return []
        cost = f"{duration(self.late.cost / 1e9)} ({percent(self.late.cost / self.whole)})"
        return [self.late.describe(cost), self.why.describe() if self.why is not None else "cause: not known"]

    def folded(self) -> list[str]:
        """That not all ranks are drawn, where that is so."""
        return [*filter(None, [note(len(self.ranks), len(self.shown))])] if self.whole else []

    def tables(self) -> list[Table]:
        """Of ranks, collectives, kernels and calls; those that have rows."""
        rows = [(*_kind_row(k), called(k.places)) for k in self.kinds[:MOST_KINDS]]
        known = len(KINDS) + any(row[-1] for row in rows)  # without the last column where no line is known
        made = [
            Table(RANKS, [_rank_row(r, self.ranks[r]) for r in self.shown] if self.whole else []),
            Table((*KINDS, "called at")[:known], [row[:known] for row in rows]),
            Table(CALLS, [_call_row(c) for c in self.calls]),
        ]
        return [t for t in made if t.rows]

    def _first(self) -> str:
        means = {name: self._mean(lambda s, name=name: getattr(s, name)) for name in ("compute", "exposed", "idle")}  # type: ignore[misc]
        where = "GPUs" if self.gpus else "ranks"
        return (
            f"{self.title}{counted(len(self.ranks), 'rank')}, {duration(self.whole / 1e9)}: the {where} compute for "
            f"{percent(means['compute'])} of the time, wait for communication for {percent(means['exposed'])} and are "
            f"idle for {percent(means['idle'])}"
        )

    def _overlap(self) -> list[str]:
        some = [s.overlap for s in self.ranks.values() if s.overlap is not None]
        hidden = [f"{percent(statistics.fmean(some))} of communication is hidden behind compute"] if some else []
        waiting = self._mean(lambda s: s.waiting)
        return ["; ".join([*hidden, f"for {percent(waiting)} of the time a rank waits for one that comes later"])]

    def _mean(self, of: Callable[[Split], int]) -> float:
        return statistics.fmean(of(s) / s.whole for s in self.ranks.values())


def _rank_row(rank: int, s: Split) -> tuple[object, ...]:
    parts = (s.compute, s.communication, s.exposed, s.waiting, s.copies, s.idle)
    shares = ("–" if part is None else percent(part / s.whole) for part in parts)
    return (rank, *shares, "–" if s.overlap is None else percent(s.overlap))


def _kind_row(k: Kind) -> tuple[object, ...]:
    order = sorted(k.last.items(), key=lambda pair: (-pair[1], pair[0]))
    last = ", ".join(f"rank {r}: {n} of {k.count}" for r, n in order[:2])
    return (k.op, rank_words(k.ranks), k.count, last, duration(k.late / 1e9), duration(k.moving / 1e9))


def called(places: Sequence[Place]) -> str:
    """Lines of cells, as figures link them."""
    return ", ".join(f"In[{cell}] line {line}" for cell, line in places)


def _call_row(c: Longest) -> tuple[object, ...]:
    return (c.name, c.kind, c.count, duration(c.total / 1e9), duration(c.longest / 1e9), f"rank {c.rank}")


def program(events: Iterable[Event]) -> Breakdown:
    """What the events of a merged trace show."""
    events = list(events)
    ranks = activities(events)
    return shown(ranks, longest(events), meetings(ranks))


def shown(ranks: Mapping[int, Activity], calls: Sequence[Longest], met: Sequence[CollectiveInstance]) -> Breakdown:
    """What the ranks did, put together."""
    window = whole(ranks)
    splits = {r: split(a, window, waits(met, r)) for r, a in ranks.items()}
    late = latest(ranks, met, window)
    why = steady(_times(ranks, met), late.rank) if late is not None else None
    lines = {r: places(met, r) for r in ranks}
    gpus = any(a.gpu for a in ranks.values())
    return Breakdown(splits, gpus, kinds(met), calls, late, why, _notes(ranks, met), waits_at=lines)


def _times(ranks: Mapping[int, Activity], met: Sequence[CollectiveInstance]) -> list[dict[int, dict[str, int]]]:
    """For each stretch of the time, rank → phase → nanoseconds."""
    start = min((a.window[0] for a in ranks.values() if a.window), default=0)
    return [
        {r: {name: length(common(some, [span])) for name, some in a.phases.items()} for r, a in ranks.items()}
        for span in stretches(met, start)
    ]


def _notes(ranks: Mapping[int, Activity], met: Sequence[CollectiveInstance]) -> list[str]:
    found = []
    if any(not a.gpu for a in ranks.values()):
        found.append("idle on a CPU is time without an operation of torch or a collective: Python, input, sleep")
    if not met and len(ranks) > 1:
        found.append("no collective is known on more than one rank, so the last rank to arrive is not known")
    return found


# -- the longest kernels and calls -----------------------------------------------------------------


@dataclass(frozen=True)
class Longest:
    """kind: `compute`, `communication` or `copy`. total: nanoseconds on all ranks; most: rank → the largest of them."""

    name: str
    kind: str
    count: int
    total: int
    longest: int
    rank: int


def longest(events: Iterable[Event], most: int = MOST) -> list[Longest]:
    """Those with the most time in all, at most `most`."""
    times: dict[tuple[str, str], dict[int, list[int]]] = {}
    for rank, own in by_rank(events).items():
        for name, kind, took in _durations(own):
            times.setdefault((name, kind), {}).setdefault(rank, []).append(took)
    found = [
        Longest(name, kind, sum(map(len, by.values())), sum(map(sum, by.values())), max(map(max, by.values())),
                max(by, key=lambda r: (sum(by[r]), -r)))
        for (name, kind), by in times.items()
    ]  # fmt: skip
    return sorted(found, key=lambda f: (-f.total, f.name))[:most]


def _durations(own: Sequence[Event]) -> list[tuple[str, str, int]]:
    device = [e for e in own if on_gpu(e)]
    if device:
        return [(shortened(e["name"]), _kind(e), _took(e)) for e in device]
    moved = [(e["name"], "communication", _took(e)) for e in own if TRANSFER.match(e["name"])]
    return [*moved, *((e["name"], "compute", took) for e, took in _own_times(own))]


def _kind(event: Event) -> str:
    return "communication" if communicates(event) else "compute" if event["cat"] == "kernel" else "copy"


def _took(event: Event) -> int:
    start, end = span(event)
    return end - start


def _own_times(own: Iterable[Event]) -> list[tuple[Event, int]]:
    """Each operation that is no part of a collective, with its time less that of what is directly inside it."""
    by_thread: dict[Any, list[Event]] = {}
    for e in own:
        if e.get("cat") in ("cpu_op", WAIT) or communicates(e):
            by_thread.setdefault((e["pid"], e["tid"]), []).append(e)
    found: list[tuple[Event, int]] = []
    for events in by_thread.values():
        left: dict[int, int] = {}
        ops: list[Event] = []
        around: list[Event] = []
        for e in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while around and span(around[-1])[1] <= span(e)[0]:
                around.pop()
            if around:
                left[id(around[-1])] -= _took(e)
            left[id(e)] = _took(e)
            if e["cat"] == "cpu_op" and not any(map(communicates, (*around, e))):
                ops.append(e)
            around.append(e)
        found += [(e, max(0, left[id(e)])) for e in ops]
    return found


def shortened(name: str) -> str:
    """A kernel's name without `void` and without the arguments of its template and of its function."""
    while (shorter := TEMPLATE.sub("", name)) != name and shorter.strip():
        name = shorter
    name = name.strip().removeprefix("void ").strip()
    return name if len(name) <= LETTERS else f"{name[: LETTERS - 1]}…"
