"""Records the allocations of this rank while a cell runs (`%%ddp --memory`), and answers for one of its steps.

Where torch sees a GPU its caching allocator keeps the history, with the Python frames of each allocation. Elsewhere a
thread samples the memory in use, and the user's line that runs. glibc's mallinfo2 takes a microsecond and knows every
byte that tensors hold; where it does not (a torch with an allocator of its own, macOS) the resident memory has to do.
The recorder's marks say when steps and their phases begin; on a CPU they are samples too.
"""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

from nbddp.capabilities.memory.history import (
    BEFORE,
    CUDA,
    HEAP,
    RESIDENT,
    MemoryHistory,
    Phase,
    PhaseMark,
    Place,
    RankAllocations,
    RecordedSteps,
    Snapshot,
    TracedFrame,
    from_samples,
    from_snapshot,
    steps,
    window,
)
from nbddp.capabilities.memory.on_rank import resident
from nbddp.capabilities.timings.on_rank import Recorder, now
from nbddp.compat.clock import clock
from nbddp.compat.extra import system as system_extra
from nbddp.compat.extra import torch as torch_extra
from nbddp.compat.thread import OwnThread
from nbddp.deadlock.on_rank import frames
from nbddp.deadlock.on_rank.frames import SeenFrame
from nbddp.protocol import pickling
from nbddp.protocol.run_spec import RunSpec
from nbddp.worker.parts import RankWorker

EVERY, STILL = 0.001, 0.004  # seconds between samples; between those of a rank that has not moved
MOST = 200_000  # samples; then every second one goes
ENTRIES = 50_000  # of the CUDA allocator's history, several KB each
TRIED = 1 << 20  # bytes


class AllocationRecorder:
    """The recording of the last cell that was recorded here. why: the reason if it has none."""

    def __init__(self, worker: RankWorker) -> None:
        self._worker = worker
        in_use = system_extra.heap_in_use()  # the worker starts: what is in use from then on is the programs'
        self.start = resident() if in_use is None else in_use
        self.why = ""
        self.run = 0
        self.cell: int | None = None
        self._kind = ""
        self._history: MemoryHistory | None = None
        self._marks: list[PhaseMark] = []
        self._model = ""
        self._samples: list[tuple[int, int, Place | None]] = []
        self._began = self._shift = 0
        self._names: dict[str, str] = {}
        self._user: dict[str, bool] = {}
        self._thread: OwnThread | None = None
        self._ended = threading.Event()
        self._recorder: Recorder | None = None

    def begin(self, spec: RunSpec) -> None:
        self.record(spec.run, spec.cell, self._worker.parts["timings"], self._worker.files.shown)

    def ended(self, error: BaseException | None) -> None:
        self.stop()

    def record(self, run: int, cell: int | None, recorder: Recorder, names: dict[str, str]) -> None:
        """Record from here on. names: file of a cell → `Cell In[n]`."""
        self.stop()
        self.run, self.cell, self.why = run, cell, ""
        self._history, self._marks, self._samples, self._model = None, [], [], ""
        self._names, self._user = names, {}
        self._recorder, recorder.heard = recorder, self._mark
        self._began, self._shift = now(), now() - clock.time_ns()
        try:
            self._kind = CUDA if torch_extra.begin_memory_history(ENTRIES) else _counted()
        except RuntimeError as e:  # an allocator that keeps none
            self._kind, self.why = CUDA, f"{e}"
            return
        if self._kind != CUDA:
            self._ended.clear()
            self._sample(frames.outwards(sys._getframe()))
            self._thread = OwnThread("nbddp-memory", self._go_on)
            self._thread.begin()

    def stop(self) -> None:
        """The cell has ended, well or not. Its end is reported either way, so this does not raise."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        recorder.heard = None
        last = recorder.steps[-1] if recorder.steps else None
        self._model = last.model.title if last is not None and last.run == self.run else ""
        try:
            self._history = self._whole()
        except Exception as e:
            self.why = f"{type(e).__name__}: {e}"

    def _whole(self) -> MemoryHistory | None:
        if self._kind == CUDA:
            if self.why:
                return None
            snapshot = cast(Snapshot, torch_extra.end_memory_history())
            return from_snapshot(snapshot, self._of_frames, self._began, now(), self._shift, ENTRIES)
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._sample(())
        samples, self._samples = self._samples, []
        return from_samples(self._kind, samples, self.start)

    # -- samples -----------------------------------------------------------------------------

    def _go_on(self) -> None:
        main, before, every = threading.main_thread().ident or 0, (0, 0), EVERY
        while not self._ended.wait(every):
            its = frames.of(main)
            level = self._sample(its)
            seen = (level, its[0].lasti if its else 0)
            every = EVERY if seen != before else min(STILL, 2 * every)  # a rank that waits costs nothing
            before = seen
            if len(self._samples) > MOST:
                del self._samples[1:-1:2]

    def _sample(self, its: Iterable[SeenFrame]) -> int:
        """its: the main thread's frames, innermost first."""
        place = next(((f.file, f.line) for f in its if self._is_user(f.file)), None)
        level = resident() if self._kind == RESIDENT else int(system_extra.heap_in_use() or 0)
        self._samples.append((now(), level, place))
        return level

    def _mark(self, phase: str, begins: bool, step: int, model: int) -> None:
        self._marks.append(PhaseMark(phase, begins, step, model, now()))
        if self._kind != CUDA:
            self._sample(frames.outwards(sys._getframe()))

    # -- lines -------------------------------------------------------------------------------

    def _of_frames(self, frames: Sequence[TracedFrame]) -> Place | None:
        """The innermost of the user's among those of a snapshot's entry, which has the innermost first."""
        return next(((f["filename"], f["line"]) for f in frames if self._is_user(f["filename"])), None)

    def _is_user(self, file: str) -> bool:
        if file not in self._user:
            self._user[file] = frames.is_user(file, self._names)
        return self._user[file]

    # -- answers -----------------------------------------------------------------------------

    def summary(self) -> RecordedSteps | None:
        """None if no cell was recorded."""
        if not self.run:
            return None
        found: RecordedSteps = {
            "run": self.run, "cell": self.cell, "model": self._model, "why": self.why, "steps": {},
        }  # fmt: skip
        if self._history is not None:
            if self._kind == CUDA and not self._history.changes:
                return {**found, "why": "the cell allocated nothing on a GPU"}
            for number, phases in self._steps().items():
                found["steps"][number] = window(self._history, phases[0].start, phases[-1].end).peak
        return found

    def of_step(self, number: int | None) -> RankAllocations:
        """A step, or the whole cell (None)."""
        history = self._history
        assert history is not None
        phases = self._steps()
        some = [p for of in phases.values() for p in of] if number is None else phases[number]
        start, end = (history.began, history.ended) if number is None else (some[0].start, some[-1].end)
        found = window(history, start, end, [of[0].start for of in phases.values()] if number is None else ())
        lines = [(None if place is None else (self._shown(place[0]), place[1]), held) for place, held in found.lines]
        code = {
            (self._shown(file), line): linecache.getline(file, line).strip()
            for file, line in (place for place, _ in found.lines if place is not None and place != BEFORE)
        }
        moved = tuple(Phase(p.name, p.start - start, p.end - start) for p in some)
        shown = replace(found, lines=lines)
        return RankAllocations(0, history.kind, shown, moved, end - start, code, history.lost)

    def _steps(self) -> dict[int, list[Phase]]:
        assert self._history is not None
        found = steps(self._marks, self._history.began)
        return {n: some for n, some in found.items() if some[0].start >= self._history.began}

    def _shown(self, file: str) -> str:
        return self._names.get(file, file)


def _counted() -> str:
    """What can be sampled here: HEAP if malloc's own count sees a tensor come."""
    import torch

    before = system_extra.heap_in_use()
    tensor = torch.empty(TRIED, dtype=torch.uint8)
    after = system_extra.heap_in_use()
    del tensor
    return HEAP if before is not None and after is not None and after - before >= TRIED else RESIDENT


def allocations(worker: RankWorker, buffers: Sequence[Any], *, part: str, step: int | None = None) -> list[bytes]:
    """Which steps the recording of the last recorded cell has, or one of them."""
    own = worker.parts["allocations"]
    return [pickling.pack_answer(own.summary() if part == "steps" else own.of_step(step))]
