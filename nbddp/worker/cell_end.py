"""The end of a cell, and its threads, processes and registrations.

A cell that fails or is stopped ends what it has started and nobody would: a script's end would. Functions that a
program gives to `atexit` are called when its worker ends on request.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any
from weakref import WeakSet

import psutil

from nbddp.agent.process_id import ProcessId
from nbddp.compat import torch
from nbddp.compat.clock import clock
from nbddp.compat.thread import OwnThread
from nbddp.worker import exit_info, failure
from nbddp.worker.program import WorkerInterrupts

END_SECONDS = 0.3  # that a process has from SIGTERM to its end
LOOK_SECONDS = 0.005
LOADER_SECONDS = 0.3  # that processes of data loaders have to end, after an interrupt or a failure

_kill = os.kill  # whatever a program puts in its place


class StartedProcesses:
    """Processes of multiprocessing's that a cell has started. A daemon goes with the object that holds it (a data
    loader, a pool), as ever; only what a script would wait for at its end is interrupted and ended."""

    def __init__(self) -> None:
        self._before = WeakSet[BaseProcess]()
        self._noted: list[ProcessId] | None = None

    def begin(self) -> None:
        self._before, self._noted = WeakSet(multiprocessing.active_children()), None

    def note(self) -> None:
        """The main thread has the interrupt: what it starts from here on is its clean-up, and has none."""
        self._noted = self._identities()

    def interrupt(self) -> None:
        """The cell is interrupted; an executor of processes, say, is left only when what they do has ended."""
        for identity in self._identities() if self._noted is None else self._noted:
            if identity.alive():
                with contextlib.suppress(ProcessLookupError):
                    _kill(identity.pid, signal.SIGINT)

    def _identities(self) -> list[ProcessId]:
        found = []
        for process in self._started():
            if process.pid is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(ProcessId.of(process.pid))
        return found

    def end(self) -> None:
        """The cell did not end well."""
        started = self._started()
        for process in started:
            process.terminate()
        until = clock.monotonic() + END_SECONDS
        while any(process.exitcode is None for process in started) and clock.monotonic() < until:
            clock.sleep(LOOK_SECONDS)  # `join` counts by the program's clock
        for process in started:
            if process.exitcode is None:
                process.kill()

    def _started(self) -> list[BaseProcess]:
        return [p for p in multiprocessing.active_children() if p not in self._before and not p.daemon]


class Forked:
    """Ends a process that the program has forked with `os.fork`, once it comes to the end of the cell or script. It is
    no worker, and nobody waits for it there."""

    def __init__(self, hide: tuple[str, ...]) -> None:
        """hide: path prefixes of the machinery that runs programs, of which no traceback is shown."""
        self._pid, self._hide = os.getpid(), hide

    def end(self, error: BaseException | None, said: str = "") -> None:
        """Nothing in the worker itself; in its child this does not return. error: by which it left the program; said:
        what Python writes of that, where it is known."""
        if os.getpid() == self._pid:
            return
        code = 0
        try:
            if error is not None:
                how = exit_info.how(error)
                exits = how.exit_code is not None
                code = how.exit_code if how.exit_code is not None else 1
                said = how.exit_text or "" if exits else said or self._words(error)
                print(said, end="\n" * bool(said) * (not said.endswith("\n")), file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _words(self, error: BaseException) -> str:
        tb = error.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename.startswith(self._hide):
            tb = tb.tb_next
        return "".join(traceback.format_exception(type(error), error, tb))


class Exits:
    """Functions that programs have registered with `atexit` in this worker, and not those of the machinery."""

    def __init__(self, in_run: Callable[[], bool]):
        self._in_run = in_run
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._unregister = atexit.unregister

    def install(self) -> None:
        atexit.register = self._wrap_register(atexit.register)
        atexit.unregister = self._wrap_unregister(atexit.unregister)

    def __len__(self) -> int:
        return len(self._calls)

    def call(self) -> None:
        """Call them, the last first, as Python does at its end; an exception is printed, and ends no other."""
        while self._calls:
            function, args, kwargs = self._calls.pop()
            self._unregister(function)
            try:
                function(*args, **kwargs)
            except BaseException:
                print(f"Exception ignored in atexit callback {function!r}:", file=sys.stderr)
                traceback.print_exc()

    def _wrap_register(self, original: Any) -> Any:
        @functools.wraps(original)
        def register(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
            if self._in_run():
                self._calls.append((function, args, kwargs))
            return original(function, *args, **kwargs)  # type: ignore[no-any-return]

        return register

    def _wrap_unregister(self, original: Any) -> Any:
        @functools.wraps(original)
        def unregister(function: Callable[..., Any]) -> None:
            self._calls = [call for call in self._calls if call[0] != function]
            original(function)

        return unregister


class Leftovers:
    """What a program leaves behind that ended by an error, or whose process group was ended: let go of in a thread.

    The frames of a traceback hold all that the program had in hand. What dies with them may take any time. An iterator
    over a data loader joins its processes for up to 5 s each; a `__del__` is the program's own. No rank waits for that,
    and none is replaced for it. A traceback is in a cycle with IPython's frames, which hold its exception. So those are
    cleared, and the objects that it holds die at once and not in a collection. In a collection an iterator finds its
    queues closed, and its processes do not hear that they are to end. What is left in cycles (a DDP model, with the
    threads of its group) is collected in the thread. machinery: beginnings of the files that run programs.
    """

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
        if not OwnThread("nbddp-ending", self._let_go, held).begin():
            self._let_go(held)

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
