"""The longest kernels and calls of a trace: how often, how long in all, on which rank most.

Of a rank with GPUs its kernels and copies count with their durations, as in Holistic Trace Analysis' "Kernel
Breakdown"; of one without, operations with their own time, without that of operations inside them ("host self
duration" in TensorBoard's profiler plugin), and collectives with the time of their transfer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbddp.analysis.activity import TRANSFER, communicates, on_gpu, span
from nbddp.capabilities.trace.merge import PROCESSES, WAIT

MOST = 10
Event = Mapping[str, Any]
TEMPLATE = re.compile(r"<[^<>]*>|\([^()]*\)")
LETTERS = 60


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
    for rank, own in _by_rank(events).items():
        for name, kind, took in _times(own):
            times.setdefault((name, kind), {}).setdefault(rank, []).append(took)
    found = [
        Longest(name, kind, sum(map(len, by.values())), sum(map(sum, by.values())), max(map(max, by.values())),
                max(by, key=lambda r: (sum(by[r]), -r)))
        for (name, kind), by in times.items()
    ]  # fmt: skip
    return sorted(found, key=lambda f: (-f.total, f.name))[:most]


def _by_rank(events: Iterable[Event]) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    for e in events:
        if e.get("ph") == "X":
            found.setdefault(e["pid"] // PROCESSES, []).append(e)
    return found


def _times(own: Sequence[Event]) -> list[tuple[str, str, int]]:
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
