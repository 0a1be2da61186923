"""The collectives of the last run that called some, and how this rank's main thread spent that run: without a profiler.

torch's flight recorder has every collective, also those that C++ calls, with the time of the call alone. Calls and
waits that pass through Python are noted with begin and end (`CallSpan`). Times are nanoseconds of
time.perf_counter_ns().
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypedDict

from nbddp.analysis.steps import Place
from nbddp.capabilities.timings.on_rank import Recorder, RunRecord
from nbddp.compat.clock import clock
from nbddp.deadlock.on_rank import flight, position
from nbddp.deadlock.on_rank.call_log import CALLS, STORE
from nbddp.deadlock.on_rank.torch_debug_detail import GATHERS
from nbddp.protocol import pickling
from nbddp.worker.parts import RankWorker


class ProgramCall(TypedDict):
    """A collective of this rank. ended: None where only the time of the call is known."""

    key: str
    sequence: int
    op: str
    ranks: list[int]
    arrived: int
    ended: int | None
    place: Place | None


class RecordedProgram(TypedDict, total=False):
    """A run, its collectives and where its time went. unseen: there were others that C++ called in groups of which
    torch does not say the name; run: None if there were no others, and then nothing else is said."""

    run: int | None
    unseen: bool
    cell: int | None
    begin: int
    end: int
    ran: int
    calls: list[ProgramCall]
    blocked: list[list[int]]
    own: list[list[Any]]
    gpu: bool


Calls = dict[tuple[str, int], ProgramCall]
CHECKED = 1 + GATHERS  # entries of a recorder for a collective under debug level DETAIL


def collect(recorder: Recorder) -> RecordedProgram | None:
    """The last run that has called a collective; None if none has."""
    dumped = flight.dumps(active=False)
    by_run, nameless = _by_run(recorder, dumped), _nameless(list(recorder.runs), dumped)
    if not by_run:
        return {"run": None, "unseen": True} if nameless else None
    run = max(by_run, key=lambda r: r.run)
    end = run.end or (clock.perf_counter_ns(), clock.thread_time_ns())
    spent = [s for s in list(recorder.spent) if run.begin[0] <= s.begin <= end[0]]
    for s in spent:
        known = by_run[run].get(s.note[1:3]) if s.note is not None and not s.note.is_peer else None
        if known is not None:
            known["ended"] = max(known["ended"] or 0, s.end) if s.waits else known["ended"]
    find = recorder.finder()
    for call in by_run[run].values():
        call["place"] = find((call["key"], call["sequence"]), call["arrived"])
    mine = [s for s in spent if s.waits or s.note is not STORE]
    return {
        "run": run.run, "cell": run.cell, "begin": run.begin[0], "end": end[0],
        "ran": end[1] - run.begin[1] - sum(s.ran[1] - s.ran[0] for s in mine),
        "calls": list(by_run[run].values()), "blocked": [[s.begin, s.end] for s in mine],
        "own": [list(o) for o in list(recorder.own) if run.begin[0] <= o[1] <= end[0]],
        "gpu": _uses_gpu(),
        "unseen": nameless[run] > CHECKED * len(by_run[run]) or any(later.run > run.run for later in nameless),
    }  # fmt: skip


def _run_at(runs: Sequence[RunRecord], at: int) -> RunRecord | None:
    """The run that was on at this time (time.perf_counter_ns())."""
    i = bisect_right(runs, at, key=lambda r: r.begin[0]) - 1
    return None if i < 0 or at > (runs[i].end or (at, 0))[0] else runs[i]


def _nameless(runs: Sequence[RunRecord], dumped: Sequence[flight.RecorderDump]) -> Counter[RunRecord]:
    """Run → how many entries of its collectives have no group."""
    behind = clock.time_ns() - clock.perf_counter_ns()
    found = (_run_at(runs, at - behind) for at in flight.nameless(dumped))
    return Counter(run for run in found if run is not None)


def _by_run(recorder: Recorder, dumped: Sequence[flight.RecorderDump]) -> dict[RunRecord, Calls]:
    runs = list(recorder.runs)
    found: dict[RunRecord, Calls] = {}

    def of(at: int) -> Calls | None:
        run = _run_at(runs, at)
        return None if run is None else found.setdefault(run, {})

    members = CALLS.members()
    behind = clock.time_ns() - clock.perf_counter_ns()
    for e in flight.entries(dumped):
        own = of(e.created_ns - behind)
        if own is not None and e.sequence:
            key = position.key_of(e)
            _add(own, key, e.sequence, e.op, members.get(key, []), e.created_ns - behind)
    for s in list(recorder.spent):
        own = of(s.begin)
        if own is not None and s.is_collective:
            assert s.note is not None
            op, key, sequence = s.note
            _add(own, key, sequence, op, members.get(key, []), s.begin)
    return {run: own for run, own in found.items() if own}


def _add(own: Calls, key: str, sequence: int, op: str, ranks: list[int], at: int) -> None:
    known = own.setdefault(
        (key, sequence),
        {"key": key, "sequence": sequence, "op": op, "ranks": ranks, "arrived": at, "ended": None, "place": None},
    )
    known["arrived"] = min(known["arrived"], at)


def _uses_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())


def together(worker: RankWorker, buffers: Sequence[Any]) -> list[bytes]:
    """The collectives of the last run that called some; None without any."""
    return [pickling.pack_answer(collect(worker.parts["timings"]))]
