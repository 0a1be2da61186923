"""What a program leaves behind that ended by an error, or whose process group was ended: let go of in a thread.

The frames of a traceback hold all that the program had in hand, and what dies with them may take any time: an iterator
over a data loader joins its processes for up to 5 s each, a `__del__` is the program's own. No rank waits for that, and
none is replaced for it. A traceback is in a cycle with IPython's frames, which hold its exception. So those are
cleared, and what it holds dies at once and not in a collection: there an iterator finds its queues closed, and its
processes do not hear that they are to end. What is left in cycles (a DDP model, with the threads of its group) is
collected in the thread.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from nbddp.compat import torch
from nbddp.worker import failure
from nbddp.worker.interrupts import WorkerInterrupts

LOADER_SECONDS = 0.3  # that processes of data loaders have to end, after an interrupt or a failure


class Leftovers:
    """machinery: beginnings of the files that run programs."""

    def __init__(self, machinery: tuple[str, ...]) -> None:
        self._machinery = machinery
        self._held: list[Any] = []
        self._threads: set[int] = set()
        self._times = 0  # that something was let go of

    def install(self, interrupts: WorkerInterrupts) -> None:
        """Have processes of data loaders end soon where they are no longer of use; once, when the worker starts."""

        def hurries() -> Callable[[], bool]:
            ours, times = threading.get_ident() in self._threads, self._times
            return lambda: ours or interrupts.taken or self._times != times

        torch.hurry_loaders(hurries, LOADER_SECONDS)

    def hold(self, *left: Any) -> None:
        """Let go of these in the thread, and not where they are."""
        self._held += left

    def let_go(self) -> None:
        """What was held dies, and garbage is collected; returns at once. When nothing of the program runs any more."""
        self._times += 1
        held, self._held = self._held, []
        self._unlink(held)  # a loop here would keep its last one until this thread leaves
        threading.Thread(target=self._let_go, args=(held,), name="nbddp-ending", daemon=True).start()

    def _let_go(self, held: list[Any]) -> None:
        ident = threading.get_ident()
        self._threads.add(ident)
        try:
            held.clear()
            gc.collect()
        finally:
            self._threads.discard(ident)

    def _unlink(self, held: list[Any]) -> None:
        """Clear the frames of the machinery in the tracebacks of exceptions and of those before them."""
        for error in held:
            if isinstance(error, BaseException):
                self._unlink_one(error)

    def _unlink_one(self, error: BaseException) -> None:
        seen: list[BaseException] = []
        current: BaseException | None = error
        while current is not None and not any(current is e for e in seen):
            seen.append(current)
            tb = failure.traceback_of(current)
            if tb is not None:
                self._clear(tb.tb_frame)
            while tb is not None:
                self._clear_one(tb.tb_frame)
                tb = tb.tb_next
            current, _ = failure.before(current)

    def _clear(self, frame: FrameType | None) -> None:
        """And those that have called it."""
        while frame is not None:
            self._clear_one(frame)
            frame = frame.f_back

    def _clear_one(self, frame: FrameType) -> None:
        if frame.f_code.co_filename.startswith(self._machinery):
            with contextlib.suppress(RuntimeError):  # it still runs
                frame.clear()
