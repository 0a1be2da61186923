"""torch.profiler around a cell, and the marks that align its trace with those of the other ranks.

The profiler's clock and the recorder's are read together a few times: the least difference is their shift, since a
mark can only be late. Collectives come from torch's flight recorder, which has their groups and sequence numbers.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbddp.capabilities.timings import on_rank
from nbddp.capabilities.trace.merge import Collective, RankTrace
from nbddp.compat.clock import clock
from nbddp.compat.extra import torch as torch_extra
from nbddp.deadlock.on_rank import position
from nbddp.protocol import pickling
from nbddp.protocol.run_spec import RunSpec
from nbddp.worker import gpus
from nbddp.worker.parts import RankWorker

MARK, MARKS = "nbddp clock", 20
TAKEN = "the program has started torch.profiler itself; there can be one profile at a time, and its own is kept"
STANDS = "the program has had torch.profiler on since an earlier cell; there can be one profile at a time"
LOST = "a program started torch.profiler in a thread under an earlier --trace; %ddp restart makes traces possible again"
QUIET = {"KINETO_LOG_LEVEL": "6"}  # it says that it starts and stops on stderr, at a level above its errors


class Tracer:
    """The trace of the last cell that was traced here."""

    def __init__(self, recorder: on_rank.Recorder) -> None:
        """recorder: of the calls and waits that are shown in the trace."""
        self._recorder = recorder
        self.last: RankTrace | None = None
        self.why = ""  # why there is none, though one was asked for
        self._profile: Any = None
        self._ours = False  # whether a profiler that begins or ends is ours
        self._others = 0  # profilers of programs that are on
        self._lost = False  # whether a program has taken over from another thread; ours is then on for ever
        self._marks: list[int] = []
        self._began = self._since = 0

    def install(self) -> None:
        """Know of the profilers of programs; once, when the worker starts. Two at once end the process."""
        torch_extra.watch_profilers(self._step_back, lambda: self._count(1), lambda: self._count(-1))

    def _count(self, more: int) -> None:
        if not self._ours:
            self._others = max(0, self._others + more)

    def _step_back(self) -> None:
        """The program begins a profile of its own: that one is kept."""
        if self._ours or self._profile is None:
            return
        self.why = TAKEN
        if threading.current_thread() is threading.main_thread():
            self._abandon()
        else:  # ours ends in its own thread alone, and not after another has begun
            self._profile, self._lost = None, True

    @contextmanager
    def _as_ours(self) -> Iterator[None]:
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    def begin(self, spec: RunSpec) -> None:
        self._recorder.wake()
        self._recorder.keep(spec)
        self.start()

    def ended(self, error: BaseException | None) -> bool:
        self.stop(failed=error is not None)
        return self._profile is not None

    def start(self) -> None:
        """Begin a trace, unless the program has a profiler on: then `why` has the reason."""
        from torch import profiler

        os.environ.update({k: v for k, v in QUIET.items() if k not in os.environ})
        self.last, self.why = None, ""
        if self._lost or self._others:
            self.why = LOST if self._lost else STANDS
            return
        self._abandon()
        self._began, self._since = clock.time_ns(), on_rank.now()
        known = profiler.supported_activities()
        wanted = [a for a in (profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA) if a in known]
        self._profile = profiler.profile(activities=wanted)
        with self._as_ours():
            self._profile.start()
        self._marks = []
        for _ in range(MARKS):
            self._marks.append(on_rank.now())
            with profiler.record_function(MARK):
                pass

    def stop(self, failed: bool = False) -> None:
        """End it and keep its trace, or why there is none; nothing if none is on. The cell's end is reported either
        way, so this does not raise.

        To end it waits for the GPUs. After a failure they may wait for a peer that will never come. So then it stays
        on, until another cell ends or another trace begins.
        """
        if self._profile is None:
            return
        if failed and gpus.at_work():
            self.why = "the cell failed while a GPU was busy, and a trace is available only once it has finished"
            return
        profile, self._profile = self._profile, None
        try:
            self.last = self._kept(profile)
        except Exception as e:
            self.why = f"{type(e).__name__}: {e}"

    def _abandon(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            with self._as_ours():
                profile.stop()

    def _kept(self, profile: Any) -> RankTrace:
        with self._as_ours():
            profile.stop()
        collectives = self._collectives()
        waits = [(s.begin, s.end, s.thread, f"wait for {s.op or 'a collective'}")
                 for s in list(self._recorder.spent) if s.waits and s.begin >= self._since]  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
        base = int(trace["baseTimeNanoseconds"])
        marks = sorted(e["ts"] for e in trace["traceEvents"] if e.get("name") == MARK and e.get("ph") == "X")
        if len(marks) != len(self._marks):
            raise RuntimeError(f"the profiler kept {len(marks)} of {len(self._marks)} marks; its clock is unknown")
        shift = min(base + round(at * 1000) - mark for at, mark in zip(marks, self._marks, strict=True))
        events = [e for e in trace["traceEvents"] if e.get("name") != MARK]
        return RankTrace(events, base, shift, os.getpid(), collectives=collectives, waits=waits)

    def _collectives(self) -> list[Collective]:
        """Those that were called since the trace began, with their lines."""
        find, behind = self._recorder.finder(), clock.time_ns() - on_rank.now()
        return [
            Collective(
                c["op"], c["group"], c["ranks"], c["sequence"], c["created"], c["what"],
                find((c["key"], c["sequence"]), c["created"] - behind),
            )
            for c in position.collectives(self._began)
        ]  # fmt: skip


def part(worker: RankWorker) -> Tracer:
    """The worker's own."""
    tracer = Tracer(worker.parts["timings"])
    tracer.install()
    return tracer


def trace(worker: RankWorker, buffers: Sequence[Any]) -> list[bytes]:
    """The trace of the last cell that was traced, or why it left none."""
    tracer = worker.parts["trace"]
    return [pickling.pack_answer(tracer.last or tracer.why)]
