"""Every private name of ipykernel and IPython that nbddp uses, each as a function with a name of ours.

No other module reads one (`tests/versions/test_seams.py`), but for what a subclass overrides: that stays in the
subclass, and `OVERRIDES` lists it.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

# Methods and attributes of ipykernel's kernel that `worker.kernel.WorkerKernel` overrides or calls
OVERRIDES = ("_publish_status", "_cancel_on_sigint", "_supports_kernel_subshells", "_topic")
# The names that a private API of `%ddp doctor` needs, as module:attribute; the others are tried alone
NAMES = {
    "status messages": ("ipykernel.kernelbase:Kernel._publish_status",),
    "messages during a cell": ("ipykernel.kernelbase:Kernel._publish_status",),
    "questions of a cell": ("ipykernel.kernelbase:Kernel._allow_stdin",),
    "interrupt of an await": ("ipykernel.ipkernel:IPythonKernel._cancel_on_sigint",),
    "flush before a display": ("ipykernel.zmqshell:ZMQDisplayPublisher._flush_streams",),
    "topics of messages": (
        "ipyparallel.engine.kernel:IPythonParallelKernel._topic",
        "ipykernel.kernelbase:Kernel._topic",
    ),
}


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


# -- ipykernel's kernel -------------------------------------------------------------------------


def topic(kernel: Any, name: str) -> bytes:
    """Under what an engine's kernel publishes a message."""
    of_kernel = getattr(kernel, "_topic", None)
    made: bytes = f"nbddp.{name}".encode() if of_kernel is None else of_kernel(name)
    return made


@dataclass(frozen=True)
class EventLoopContents:
    """What stands in an event loop: functions that it will call, each with what it gives them; and descriptors that it
    watches."""

    calls: list[tuple[Any, ...]]
    descriptors: list[int]


def held_by(loop: Any) -> EventLoopContents | None:
    """None of a loop that does not say. To be asked in the loop's own thread."""
    if not all(hasattr(loop, name) for name in ("_ready", "_scheduled", "_selector")):
        return None
    calls = [h for h in (*loop._ready, *loop._scheduled) if not h.cancelled()]
    return EventLoopContents([(h._callback, *h._args) for h in calls], list(loop._selector.get_map()))


# -- IPython's shell ----------------------------------------------------------------------------


def word_history_by(shell: Any, word: Callable[..., dict[str, Any]]) -> None:
    """Have `word(error)` make what IPython 9 keeps of an exception in its history."""
    shell._format_exception_for_storage = word


def sign_once(shell: Any) -> None:
    """ipykernel asks for the signature of what runs a cell before each cell, and Python works it out each time."""
    for name in ("run_cell", "run_cell_async"):
        function = getattr(type(shell), name)
        function.__signature__ = inspect.signature(function)


def is_outermost(code: types.CodeType) -> bool:
    """Whether this is IPython's function around a whole cell: an exception that it catches is not the cell's own."""
    return code.co_name == "_run_cell"


def no_traceback(shell: Any) -> None:
    """What the shell would answer as the traceback of the cell that has just failed: nothing."""
    shell._last_traceback = []


# -- what is displayed --------------------------------------------------------------------------


def publish(publisher: Any, data: dict[str, Any], **kwargs: Any) -> None:
    """`publisher.publish`. ipykernel's has stdout and stderr flushed before. For each it asks the thread that sends and
    waits for its answer, even if nothing has been written since the last flush. Here it is not asked then."""
    if all(map(knows_nothing_to_flush, (sys.stdout, sys.stderr))) and hasattr(publisher, "_flush_streams"):
        publisher._flush_streams = lambda: None
        try:
            publisher.publish(data, **kwargs)
        finally:
            del publisher._flush_streams
    else:
        publisher.publish(data, **kwargs)


def is_captured(publisher: Any) -> bool:
    """Whether what is displayed goes to `%%capture`."""
    from IPython.core.displaypub import CapturingDisplayPublisher

    return isinstance(publisher, CapturingDisplayPublisher)


def knows_nothing_to_flush(stream: Any) -> bool:
    """Whether one of ipykernel's streams has sent, or is just sending, all that was written to it."""
    return getattr(stream, "_flush_pending", True) is False
