"""Traces of all ranks as one file for Perfetto: a process per rank, one clock, flows between ranks.

The format is the Trace Event Format that torch.profiler writes and Perfetto reads. A rank's trace has its times on the
profiler's clock; marks, taken together with the recorder's clock, tell the shift. A collective is known across ranks by
its group and sequence number. torch's flight recorder notes these while the call is open that the collective belongs
to; so calls are matched by time, and the transfers on the backend's threads by their order in each group, whose threads
serve no other. NCCL's kernels are matched to calls by their launch.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbddp.analysis.answers import ClockOffset
from nbddp.analysis.steps import Place

Event = dict[str, Any]
CALL = "c10d::"
WAIT = "wait"  # the category of spans in which a thread is blocked until a collective is done
QUEUED = "nccl:"  # spans of this name on the host end when the kernel is queued
SLACK_US = 60.0  # between the two clocks that torch writes down, which are read one after the other
LAUNCHES = ("cuda_runtime", "cuda_driver")
PROCESSES = 1000  # process ids of a rank in the merged file: from rank * 1000


@dataclass(frozen=True)
class Collective:
    """One call of a collective as torch's flight recorder has it. created: nanoseconds since 1970. place: the
    line of a cell that called it."""

    op: str
    group: str
    ranks: tuple[int, ...]
    sequence: int
    created: int
    what: str = ""
    place: Place | None = None

    @property
    def key(self) -> tuple[str, tuple[int, ...], int]:
        """The same on all ranks of the group."""
        return self.group, self.ranks, self.sequence


@dataclass(frozen=True)
class RankTrace:
    """One rank's trace. Event times are microseconds after `base`, which is nanoseconds since 1970; `shift` is what
    the profiler's clock is ahead of the recorder's, in nanoseconds. pid: of the process that was traced. waits: (begin,
    end, thread, name) of waits for collectives, in nanoseconds of the recorder's clock."""

    events: Sequence[Event]
    base: int
    shift: int
    pid: int
    node: int = 0
    collectives: Sequence[Collective] = ()
    waits: Sequence[tuple[int, int, int, str]] = ()


@dataclass
class Merged:
    """`data` is the file's content; how many spans are in it and how many collectives are joined across ranks.
    `missing`: ranks without a trace; `why`: the reason, for ranks that gave one."""

    data: dict[str, Any]
    ranks: list[int]
    spans: int
    joined: int
    missing: list[int] = field(default_factory=list)
    why: dict[int, str] = field(default_factory=dict)
    residual: int = 0


def merge(traces: Mapping[int, RankTrace], clocks: Mapping[int, ClockOffset]) -> Merged:
    """One trace on rank 0's clock, beginning at 0; empty where nothing was traced, as in a cell that fails at once."""
    events: list[Event] = []
    ends: dict[tuple[str, tuple[int, ...], int], list[tuple[Event, Collective]]] = {}
    spans = 0
    for rank, trace in sorted(traces.items()):
        own = _spans(trace)
        spans += len(own)
        for event, collective in _known(own, trace):
            ends.setdefault(collective.key, []).append((event, collective))
        own += _arrows(trace, rank)
        _move(own, trace, rank, clocks.get(rank, ClockOffset()))
        events += [*_processes(own, trace, rank), *_threads(trace, rank), *own]
    begin = min((e["ts"] for e in events if "ts" in e), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - begin, 3)
    joined = [found for found in ends.values() if len(found) > 1]
    flows = [f for n, found in enumerate(joined, 1) for f in _flow(n, found)]
    data = {"displayTimeUnit": "ms", "traceEvents": [*events, *flows]}
    residual = max((c.residual for c in clocks.values()), default=0)
    return Merged(data, sorted(traces), spans, len(joined), residual=residual)


def _spans(trace: RankTrace) -> list[Event]:
    """Copies of the spans, without the profiler's own."""
    kept = (e for e in trace.events if e.get("ph") == "X" and e.get("cat") != "Trace")
    return [{**e, "args": dict(e.get("args", {}))} for e in kept] + _waits(trace)


def _waits(trace: RankTrace) -> list[Event]:
    """torch's profiler has no span for a thread that is blocked in `Work.wait()`."""
    begin = trace.base - trace.shift
    return [
        {"ph": "X", "cat": WAIT, "name": name, "pid": trace.pid, "tid": tid, "ts": (start - begin) / 1000,
         "dur": (end - start) / 1000, "args": {}}
        for start, end, tid, name in trace.waits
    ]  # fmt: skip


def _arrows(trace: RankTrace, rank: int) -> list[Event]:
    """The profiler's own flows, from forward to backward and from a launch to its kernel; ids are the rank's."""
    return [{**e, "id": f"{rank}/{e.get('id')}"} for e in trace.events if e.get("ph") in ("s", "t", "f")]


def _threads(trace: RankTrace, rank: int) -> list[Event]:
    """Names of threads."""
    wanted = ("thread_name", "thread_sort_index")
    named = [e for e in trace.events if e.get("ph") == "M" and e.get("name") in wanted]
    return [{**{k: v for k, v in e.items() if k != "ts"}, "pid": _process(e["pid"], trace, rank)} for e in named]


def _move(own: Iterable[Event], trace: RankTrace, rank: int, clock: ClockOffset) -> None:
    """To the common clock, and to the rank's processes."""
    for event in own:
        event["ts"] += (trace.base - trace.shift + clock.offset) / 1000
        event["pid"] = _process(event["pid"], trace, rank)


def _process(pid: Any, trace: RankTrace, rank: int) -> int:
    """The traced process is rank * 1000; a GPU, which the profiler numbers from 0, comes right after it."""
    if pid == trace.pid or not isinstance(pid, int):
        return rank * PROCESSES
    return rank * PROCESSES + 1 + pid % (PROCESSES - 1)


def _processes(own: Iterable[Event], trace: RankTrace, rank: int) -> list[Event]:
    """What the rank's processes are called, and their order."""
    found = []
    for pid in sorted({e["pid"] for e in own}):
        device = pid % PROCESSES
        name = f"rank {rank} (node {trace.node})" + (f" GPU {device - 1}" if device else "")
        for kind, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": pid})):
            found.append({"ph": "M", "name": kind, "pid": pid, "tid": 0, "args": args})
    return found


def _known(own: Sequence[Event], trace: RankTrace) -> list[tuple[Event, Collective]]:
    """The span of each collective that the flight recorder has: its transfer where that was traced, else the call."""
    calls = sorted((e for e in own if e["name"].startswith(CALL)), key=lambda e: e["ts"])
    starts = [e["ts"] for e in calls]
    free: dict[str, list[tuple[Event, Collective]]] = {}
    found: dict[int, tuple[Event, Collective]] = {}
    for collective in sorted(trace.collectives, key=lambda c: c.created):
        call = _open_at((collective.created - trace.base) / 1000, calls, starts)
        if call is not None and id(call) not in found:
            _note(call, collective)
            found[id(call)] = (call, collective)
            free.setdefault(collective.op, []).append((call, collective))
    for kernel, call in _kernels(own, calls):
        if id(call) in found:
            collective = found[id(call)][1]
            _note(kernel, collective)
            found[id(call)] = (kernel, collective)
    groups: dict[Any, str] = {}
    moved = (e for e in own if e["name"] in free and not e["name"].startswith(QUEUED))
    for transfer in sorted(moved, key=lambda e: e["ts"]):
        waiting = free[transfer["name"]]
        group = groups.get(transfer["tid"])
        at = next((i for i, (call, c) in enumerate(waiting)
                   if (group is None or c.group == group) and call["ts"] <= transfer["ts"]), None)  # fmt: skip
        if at is not None:
            call, collective = waiting.pop(at)
            groups[transfer["tid"]] = collective.group
            _note(transfer, collective)
            found[id(call)] = (transfer, collective)
    return list(found.values())


def _kernels(own: Sequence[Event], calls: Sequence[Event]) -> list[tuple[Event, Event]]:
    """NCCL's kernels with the call that launched each: the launch has the kernel's correlation and is within the call,
    on its thread."""
    kernels = {
        e["args"]["correlation"]: e
        for e in own if e.get("cat") == "kernel" and "nccl" in e["name"].lower() and "correlation" in e["args"]
    }  # fmt: skip
    launches = (e for e in own if e.get("cat") in LAUNCHES and e["args"].get("correlation") in kernels)
    by_thread: dict[Any, list[Event]] = {}
    for call in calls:
        by_thread.setdefault(call["tid"], []).append(call)
    found = []
    for launch in launches if kernels else ():
        some = by_thread.get(launch["tid"], [])
        at = bisect.bisect_right([c["ts"] for c in some], launch["ts"]) - 1
        if at >= 0 and launch["ts"] <= some[at]["ts"] + some[at]["dur"]:
            found.append((kernels[launch["args"]["correlation"]], some[at]))
    return found


def _open_at(time: float, calls: Sequence[Event], starts: Sequence[float]) -> Event | None:
    """The last of these calls that had begun by then, if it was still open."""
    at = bisect.bisect_right(starts, time + SLACK_US) - 1
    while at >= 0 and calls[at]["ts"] > time and at > 0 and _holds(calls[at - 1], time):
        at -= 1
    return calls[at] if at >= 0 and _holds(calls[at], time) else None


def _holds(call: Event, time: float) -> bool:
    return bool(call["ts"] - SLACK_US <= time <= call["ts"] + call["dur"] + SLACK_US)


def _note(event: Event, collective: Collective) -> None:
    event["args"].update(
        {"group": collective.group, "sequence": collective.sequence, "ranks": list(collective.ranks),
         "tensors": collective.what, "op": collective.op.rpartition(":")[2].lstrip("_")}
    )  # fmt: skip
    if collective.place:
        event["args"].update(zip(("cell", "line"), collective.place, strict=True))


def _flow(number: int, found: Sequence[tuple[Event, Collective]]) -> list[Event]:
    """Arrows through a collective's spans in the order in which the ranks came."""
    order = sorted(found, key=lambda pair: pair[0]["ts"])
    name = f"{order[0][1].op.split(':')[-1]} #{order[0][1].sequence}"
    kinds = ["s", *["t"] * (len(order) - 2), "f"]
    return [
        {"ph": kind, "id": number, "cat": "collective", "name": name, "pid": e["pid"], "tid": e["tid"],
         "ts": e["ts"], "bp": "e"}
        for kind, (e, _) in zip(kinds, order, strict=True)
    ]  # fmt: skip
