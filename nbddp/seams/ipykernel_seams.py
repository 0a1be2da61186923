"""Every private name of ipykernel and IPython that nbddp uses, each as a function with a name of ours.

No other module reads one (`tests/test_seams.py`), but for what a subclass overrides: that stays in the
subclass, and `OVERRIDES` lists it.
"""

from __future__ import annotations

import inspect
import os
import select
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

# Methods and attributes of ipykernel's kernel that `worker.kernel.WorkerKernel` overrides or calls
OVERRIDES = ("_publish_status", "_cancel_on_sigint", "_supports_kernel_subshells", "_topic")
LEAVE_SECONDS = 0.005
# What a seam of `nbddp.seams` needs, as module:attribute; the others are tried alone
NAMES = {
    "captured output": ("ipykernel.iostream:OutStream._watch_pipe_fd",),
    "status messages": ("ipykernel.kernelbase:Kernel._publish_status",),
    "interrupt of an await": ("ipykernel.ipkernel:IPythonKernel._cancel_on_sigint",),
    "topics of messages": (
        "ipyparallel.engine.kernel:IPythonParallelKernel._topic",
        "ipykernel.kernelbase:Kernel._topic",
    ),
}
READ_BY_WATCH = {"_fid", "_should_watch", "_original_stdstream_copy", "_exc"}


# -- ipykernel's output streams -----------------------------------------------------------------


def captured_pipe(stream: Any) -> int | None:
    """The read end of the pipe into which C++ and subprocesses write; None where descriptors are not captured."""
    return getattr(stream, "_fid", None)


@contextmanager
def unlisted_modules() -> Iterator[None]:
    """While a kernel is made: ipykernel lists the files of all modules, for a debugger that no worker has. To look at
    each of 3000 modules is to copy 14 MB that a forked worker shares with the others."""
    from ipykernel import ipkernel

    class Sys(types.ModuleType):
        modules: ClassVar[dict[str, Any]] = {}

        def __getattr__(self, name: str) -> Any:
            return getattr(sys, name)

    ipkernel.sys = Sys("sys")
    try:
        yield
    finally:
        ipkernel.sys = sys


def may_hold_text(stream: Any) -> bool:
    """Whether a stream may have text that was not sent; True where it does not tell."""
    return bool(getattr(stream, "_buffers", True))


def flush_text() -> None:
    """Have ipykernel's streams be flushed only where they hold text. A flush wakes another thread and waits for it, and
    ipykernel asks for four after each message; what is sent afterwards comes after the text of before in any case."""
    from ipykernel.iostream import OutStream

    if OutStream.flush.__qualname__ != _flushing.__name__:
        OutStream.flush = _flushing(OutStream.flush)


def _flushing(theirs: Callable[[Any], None]) -> Callable[[Any], None]:
    def flush(stream: Any) -> None:
        if may_hold_text(stream):
            theirs(stream)

    flush.__qualname__ = _flushing.__name__
    return flush


def watch_pipes() -> bool:
    """Have ipykernel's streams read captured descriptors as `_watch` does; before they are made. False, and nothing is
    changed, where ipykernel's own way does not use the names that ours needs."""
    from ipykernel.iostream import OutStream

    theirs = getattr(OutStream, "_watch_pipe_fd", None)
    if theirs is not None and (theirs is _watch or set(theirs.__code__.co_names) >= READ_BY_WATCH):
        OutStream._watch_pipe_fd = _watch
        return True
    return False


def _watch(stream: Any) -> None:
    """The thread of one captured descriptor: ipykernel's `OutStream._watch_pipe_fd`, but for the pause."""
    if stream._fid is None:
        return
    try:
        while True:
            select.select([stream._fid], [], [])
            time.sleep(LEAVE_SECONDS)
            while select.select([stream._fid], [], [], 0)[0]:
                stream.has_in_hand = True
                data = os.read(stream._fid, 1 << 16)
                if not data or not stream._should_watch:
                    return
                stream.write(data.decode(errors="replace"))
                stream.has_in_hand = False
                os.write(stream._original_stdstream_copy, data)
    except Exception:
        stream._exc = sys.exc_info()  # where ipykernel looks for it
    finally:
        stream.has_in_hand = False


def tells_in_hand(stream: Any) -> bool:
    """Whether `has_in_hand` can be believed: descriptors are not captured, or `_watch` reads them."""
    return captured_pipe(stream) is None or getattr(type(stream), "_watch_pipe_fd", None) is _watch


def has_in_hand(stream: Any) -> bool:
    """Whether the thread of a captured descriptor has taken what it has not written down yet."""
    return bool(getattr(stream, "has_in_hand", False))


# -- ipykernel's kernel -------------------------------------------------------------------------


def topic(kernel: Any, name: str) -> bytes:
    """Under what an engine's kernel publishes a message."""
    of_kernel = getattr(kernel, "_topic", None)
    made: bytes = f"nbddp.{name}".encode() if of_kernel is None else of_kernel(name)
    return made


def parameters(name: str) -> list[str]:
    """Parameters of a method of ipykernel's kernel that is overridden, without `self`; empty where it is missing."""
    from ipykernel.ipkernel import IPythonKernel

    method = getattr(IPythonKernel, name, None)
    return [] if method is None else list(inspect.signature(method).parameters)[1:]


# -- IPython's shell ----------------------------------------------------------------------------


def word_history_by(shell: Any, word: Callable[..., dict[str, Any]]) -> None:
    """Have `word(error)` make what IPython 9 keeps of an exception in its history."""
    shell._format_exception_for_storage = word


def words_history(shell: Any) -> bool:
    """Whether this IPython words every exception for its history, as version 9 does."""
    return hasattr(shell, "_format_exception_for_storage")


def reads_traceback() -> bool:
    """Whether ipykernel answers with what `no_traceback` sets."""
    from ipykernel.ipkernel import IPythonKernel

    code = IPythonKernel.do_execute.__code__
    return "_last_traceback" in code.co_names


def no_traceback(shell: Any) -> None:
    """What the shell would answer as the traceback of the cell that has just failed: nothing."""
    shell._last_traceback = []
