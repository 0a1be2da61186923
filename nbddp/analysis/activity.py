"""The activity of each rank in a merged trace: compute, communication, copies, and phases of a training step.

Of a rank with kernels in its trace, its GPUs count: a kernel of NCCL communicates, any other computes, `Memcpy` and
`Memset` copy. Of a rank without, its threads count. An operation of torch computes, unless it belongs to a collective
or its thread is blocked in a wait; a collective communicates from the call to the end of its transfer.

The four kinds are those of Holistic Trace Analysis ("Temporal Breakdown", hta.readthedocs.io), which knows GPUs alone;
a CPU's are defined here to match. Spans are nanoseconds since the trace began. Pure.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nbddp.analysis.cause import BACKWARD, CODE, COPY, FORWARD, INPUT, OPTIMIZER
from nbddp.analysis.steps import Place, Span, common, minus, union
from nbddp.capabilities.trace.merge import CALL, PROCESSES, WAIT

Event = Mapping[str, Any]
Key = tuple[str, int, int]  # group, sequence number, and which of several inits that gave both anew
COLLECTIVE = re.compile(r"c10d::|_c10d_functional|record_param_comms")
TRANSFER = re.compile(r"(gloo|nccl|mpi|ucc|xccl|hccl):")
NCCL = re.compile(r"nccl", re.IGNORECASE)
LOADER, STEP, BACK, DDP = ("enumerate(DataLoader)#", "Optimizer.", "autograd::engine::evaluate_function",
                           "DistributedDataParallel.forward")  # fmt: skip
CONTAINERS = (BACK, "PythonSubclass", "PythonDispatchMode")  # have Python code inside, which waits in places
MOVES = ("aten::to", "aten::_to_copy", "aten::copy_", "aten::pin_memory")
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class CollectivePart:
    """One rank's part in a collective. arrived: when it was called; of a GPU's, when its kernel began. ended: its
    transfer or kernel was through. members: the group's ranks, if known. `known`: whether `ended` is. place: the line
    of a cell that called it, where that was noted."""

    op: str
    arrived: int
    ended: int
    members: tuple[int, ...] = ()
    known: bool = True
    place: Place | None = None


@dataclass(frozen=True)
class Activity:
    """One rank. `gpu`: the spans are of its GPUs. blocked: its thread waits for a collective."""

    gpu: bool
    compute: list[Span]
    communication: list[Span]
    copies: list[Span]
    phases: Mapping[str, list[Span]] = field(default_factory=dict)
    parts: Mapping[Key, CollectivePart] = field(default_factory=dict)

    @cached_property
    def window(self) -> Span | None:
        """From its first activity to its last."""
        spans = [*self.compute, *self.communication, *self.copies]
        return (min(s for s, _ in spans), max(e for _, e in spans)) if spans else None


def activities(events: Iterable[Event]) -> dict[int, Activity]:
    """Rank → what it did, of the events of a merged trace (`merge.Merged.data["traceEvents"]`)."""
    return {rank: _activity(own, rank) for rank, own in sorted(by_rank(events).items())}


def by_rank(events: Iterable[Event]) -> dict[int, list[Event]]:
    """Rank → its events that last."""
    found: dict[int, list[Event]] = {}
    for e in events:
        if e.get("ph") == "X":
            found.setdefault(e["pid"] // PROCESSES, []).append(e)
    return found


def span(event: Event) -> Span:
    """Nanoseconds of an event, whose times are microseconds."""
    return round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)


def on_gpu(event: Event) -> bool:
    return event.get("cat") in ON_GPU


def communicates(event: Event) -> bool:
    """Whether it is a collective: its call, its transfer on a backend's thread, or NCCL's kernel."""
    name = event["name"]
    return bool(NCCL.search(name) if on_gpu(event) else COLLECTIVE.match(name) or TRANSFER.match(name))


def _activity(own: Sequence[Event], rank: int) -> Activity:
    device = [e for e in own if on_gpu(e)]
    host = [e for e in own if e["pid"] == rank * PROCESSES and not on_gpu(e)]
    parts = _parts(own)
    if device:
        return _of_gpu(device, host, parts)
    return _of_cpu(host, parts)


def _parts(own: Sequence[Event]) -> dict[Key, CollectivePart]:
    """The rank's parts in collectives, of the spans that `merge` has marked."""
    marked = sorted((e for e in own if "sequence" in e.get("args", {})), key=lambda e: e["ts"])
    found: dict[Key, CollectivePart] = {}
    inits: dict[tuple[str, int], int] = {}  # group, number → how often it was called
    for e in marked:
        name = str(e["args"]["group"]), int(e["args"]["sequence"])
        start, end = span(e)
        if e["name"].startswith(CALL):
            inits[name] = inits.get(name, -1) + 1
            at = (e["args"]["cell"], e["args"]["line"]) if "cell" in e["args"] else None
            members = tuple(e["args"]["ranks"])
            found[(*name, inits[name])] = CollectivePart(e["args"]["op"], start, end, members, place=at)
        elif name in inits:
            part = found[(*name, inits[name])]
            part.arrived, part.ended = (start, end) if on_gpu(e) else (part.arrived, max(part.ended, end))
    return found


def _of_cpu(host: Sequence[Event], parts: Mapping[Key, CollectivePart]) -> Activity:
    by_thread: dict[Any, list[Event]] = {}
    for e in host:
        by_thread.setdefault(e["tid"], []).append(e)
    blocked = union(span(e) for e in host if e.get("cat") == WAIT)
    compute: list[Span] = []
    for events in by_thread.values():
        ops = [span(e) for e in events if e["cat"] == "cpu_op" and not e["name"].startswith(CONTAINERS)]
        other = [span(e) for e in events if communicates(e) or e["cat"] == WAIT]
        compute += minus(ops, other)
    flying = [(p.arrived, p.ended) for p in parts.values()]
    flying += [span(e) for e in host if communicates(e)]
    compute, communication = union(compute), union(flying)
    return Activity(False, compute, communication, [], _cpu_phases(host, compute, communication, blocked), parts)


def _named(host: Iterable[Event], start: str) -> list[Span]:
    return union(span(e) for e in host if e["name"].startswith(start))


def _cpu_phases(
    host: Sequence[Event], compute: list[Span], communication: list[Span], blocked: list[Span]
) -> dict[str, list[Span]]:
    """Which part of a step the time belongs to: each instant to the first of these that has it."""
    inside = _named(host, DDP)
    buffers = common(minus(communication, compute), inside)  # DDP waits in forward for a broadcast of buffers
    annotated = union(span(e) for e in host if e["cat"] == "user_annotation" and not TRANSFER.match(e["name"]))
    copies = union(span(e) for e in host if e["name"] in MOVES)
    back = _named(host, BACK)
    named = {
        INPUT: _named(host, LOADER),
        OPTIMIZER: _named(host, STEP),
        BACKWARD: back,
        COPY: minus(common(copies, compute), annotated),
        FORWARD: union([*minus(inside, buffers), *compute]),
    }
    return _in_turn(named, compute, communication, blocked)


def _in_turn(
    named: dict[str, list[Span]], compute: list[Span], communication: list[Span], blocked: list[Span]
) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    taken = list(blocked)
    for name, spans in named.items():
        found[name] = minus(spans, taken)
        taken = union([*taken, *spans])
    every = [*taken, *compute, *communication]
    whole = [(min(s for s, _ in every), max(e for _, e in every))] if every else []
    return {**found, CODE: minus(whole, every)}


def _of_gpu(device: Sequence[Event], host: Sequence[Event], parts: Mapping[Key, CollectivePart]) -> Activity:
    kernels = [e for e in device if e["cat"] == "kernel" and not communicates(e)]
    compute = union(map(span, kernels))
    copies = union(span(e) for e in device if e["cat"] != "kernel")
    communication = union(
        [span(e) for e in device if communicates(e)]
        + [span(e) for e in host if TRANSFER.match(e["name"]) and not e["name"].startswith("nccl")]
    )
    launches = {e["args"]["correlation"]: e for e in host if "correlation" in e.get("args", {})}
    named = {OPTIMIZER: _Places(host, STEP), BACKWARD: _Places(host, BACK)}
    by_phase: dict[str, list[Span]] = {OPTIMIZER: [], BACKWARD: [], FORWARD: []}
    for e in kernels:
        launch = launches.get(e["args"].get("correlation"))
        by_phase[next((n for n, p in named.items() if launch is not None and launch in p), FORWARD)].append(span(e))
    to_device = [span(e) for e in device if e["name"].startswith("Memcpy HtoD")]
    phases = {**by_phase, COPY: to_device, INPUT: minus(_named(host, LOADER), communication)}
    order = {name: union(phases[name]) for name in (OPTIMIZER, BACKWARD, FORWARD, COPY, INPUT)}
    phases = _in_turn(order, compute, [*communication, *copies], [])
    return Activity(True, compute, communication, copies, phases, parts)


class _Places:
    """Whether a launch is within one of the spans of this name, on its thread."""

    def __init__(self, host: Iterable[Event], start: str):
        by_thread: dict[Any, list[Span]] = {}
        for e in host:
            if e["name"].startswith(start):
                by_thread.setdefault(e["tid"], []).append(span(e))
        self._spans = {tid: union(some) for tid, some in by_thread.items()}
        self._starts = {tid: [s for s, _ in some] for tid, some in self._spans.items()}

    def __contains__(self, launch: object) -> bool:
        assert isinstance(launch, Mapping)
        tid, at = launch["tid"], span(launch)[0]
        i = bisect_right(self._starts.get(tid, []), at) - 1
        return i >= 0 and at < self._spans[tid][i][1]
