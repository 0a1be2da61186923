"""Which line of a cell calls a collective. Of calls that pass through Python some are noted, as phases are; the others,
DDP's in backward, are asked for by the line that asks for backward."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from nbddp.analysis.steps import Place
from nbddp.capabilities.timings.on_rank_marks import (
    CELL,
    NOTED,
    NOTED_EACH,
    StepMarks,
    agreed,
    asks_for_backward,
    numbered,
    place,
)
from nbddp.deadlock.on_rank.call_log import CallRecord

KEPT = 1000  # calls that are noted at the same time
BOOTSTRAP = "_bootstrap"  # the first frame of a thread that Python has started
Key = tuple[str, int]  # a group, and the sequence number of a call in it
Finder = Callable[[Key, int], Place | None]  # a call and when it was made → its line


class CallPlaces:
    """The calls of a worker that were noted: of each kind in a run the first, and then one of so many."""

    def __init__(self) -> None:
        self._noted: deque[tuple[Key, Place]] = deque(maxlen=KEPT)
        self._counts: Counter[tuple[str, str]] = Counter()

    def begin(self) -> None:
        """A run begins."""
        self._counts.clear()

    def note(self, call: CallRecord, names: Mapping[str, str]) -> None:
        """A collective has been called from outside of the caller of this. names: file → what its cell is called."""
        op, key, sequence = call
        done = self._counts[op, key]
        self._counts[op, key] = done + 1
        if done >= NOTED and done % NOTED_EACH:
            return
        frame = sys._getframe(2)
        found = place(frame, names) or place(_backward(frame), names)
        number = CELL.search(found[0]) if found else None
        if found and number:
            self._noted.append(((key, sequence), (int(number[1]), found[1])))

    def finder(self, called: frozenset[Key], since: int, steps: Sequence[StepMarks]) -> Finder:
        """called: the calls that passed through Python, since then; steps: of DDP. All times are those of
        time.perf_counter_ns()."""
        noted, spans = dict(self._noted), sorted(_backwards(steps))
        begins = [begin for begin, _, _ in spans]

        def find(call: Key, at: int) -> Place | None:
            if call in noted or call in called or at < since:
                return noted.get(call)
            i = bisect_right(begins, at) - 1
            return spans[i][2] if i >= 0 and at <= spans[i][1] else None

        return find


def _backward(frame: FrameType | None) -> FrameType | None:
    """The frame that waits for autograd's engine, if the engine's own thread is the one of this frame."""
    if threading.current_thread() is threading.main_thread():
        return None
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    is_pythons = frame is not None and frame.f_code.co_name == BOOTSTRAP
    return None if is_pythons else asks_for_backward()


def _backwards(steps: Sequence[StepMarks]) -> Iterator[tuple[int, int, Place]]:
    """Begin and end of each backward on a CPU whose line is known. Those on GPUs have times of the GPU, which lie after
    the calls."""
    by_run: dict[tuple[int, int], list[StepMarks]] = {}
    for step in steps:
        by_run.setdefault((step.run, id(step.model)), []).append(step)
    for some in by_run.values():
        lines = agreed(some)
        for step in some:
            found = next((p[1:] for p in numbered(step.called or lines) if p[0] == "backward"), None)
            if found and isinstance(step.begun, int) and isinstance(step.through, int) and step.through:
                yield step.begun, step.through, found
