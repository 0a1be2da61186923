"""Every private name of ipykernel and IPython that nbddp uses, each as a function with a name of ours.

No other module reads one (`tests/versions/test_seams.py`), but for what a subclass overrides: that stays in the
subclass, and `OVERRIDES` lists it.
"""

from __future__ import annotations

import asyncio
import functools
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


def kernel_of_engine() -> Any:
    """The IPython kernel of the engine that this process is."""
    from ipykernel.kernelapp import IPKernelApp

    return IPKernelApp.instance().kernel


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


def parameters(name: str) -> list[str]:
    """Parameters of a method of ipykernel's kernel that is overridden, without `self`; empty where it is missing."""
    from ipykernel.ipkernel import IPythonKernel

    method = getattr(IPythonKernel, name, None)
    return [] if method is None else list(inspect.signature(method).parameters)[1:]


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
    """Whether this is IPython's function around all that runs a cell: what it meets is no error of the cell's code."""
    return code.co_name == "_run_cell"


def words_history(shell: Any) -> bool:
    """Whether this IPython words every exception for its history, as version 9 does."""
    return hasattr(shell, "_format_exception_for_storage")


def autoreload(shell: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Of `%autoreload`, if it is loaded: module → time of its file when it was last looked at; files that it could not
    read."""
    loaded = None if shell is None else shell.magics_manager.registry.get("AutoreloadMagics")
    reloader = getattr(loaded, "_reloader", None)
    return getattr(reloader, "modules_mtimes", {}), getattr(reloader, "failed", {})


def reads_traceback() -> bool:
    """Whether ipykernel answers with what `no_traceback` sets."""
    from ipykernel.ipkernel import IPythonKernel

    code = IPythonKernel.do_execute.__code__
    return "_last_traceback" in code.co_names


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


# -- messages while a cell runs -----------------------------------------------------------------


class Shell:
    """The shell channel of a kernel, for a cell that waits: its socket, what answers go out by, and what is for later.

    ipykernel 7 reads the channel in a thread and hands messages on to the main thread by a pair of sockets; before, the
    main thread's stream is the channel. To read a message and leave it to ipykernel it goes to where ipykernel queues
    it; to read it twice is to lose it, since its signature is known then.
    """

    def __init__(self, kernel: Any):
        manager = getattr(getattr(kernel, "shell_channel_thread", None), "manager", None)
        self.kernel, self.threaded = kernel, manager is not None
        if manager is not None:
            self.stream = manager.get_shell_channel_to_subshell_pair(None).to_stream
            self.reply = manager.get_subshell_to_shell_channel_socket(None)
        else:
            self.stream = self.reply = kernel.shell_stream
        self.socket = self.stream.socket
        self.cell = kernel.get_parent("shell")

    def later(self, loop: Any, raw: list[Any]) -> None:
        """Have ipykernel handle a message when the cell has ended, in its turn."""
        if self.threaded:
            loop.call_soon(lambda: asyncio.ensure_future(self.kernel.shell_main(None, raw)))
        else:
            self.kernel.schedule_dispatch(self.kernel.dispatch_shell, raw)

    def taken(self) -> list[list[Any]]:
        """Messages that ipykernel 6 has read and keeps until the cell has ended: they came with the cell's own. All
        that is no message of this channel stays in its order."""
        queue = getattr(self.kernel, "msg_queue", None)
        if self.threaded or queue is None:
            return []
        found = []
        for _ in range(queue.qsize()):
            entry = queue.get_nowait()
            _, dispatch, args = entry
            if dispatch == self.kernel.dispatch_shell:
                found.append(args[0])
            else:
                queue.put_nowait(entry)
        return found

    def say(self, status: str, parent: Any) -> None:
        """Publish `busy` or `idle` for a message."""
        self.kernel._publish_status(status, "shell", parent=parent)


def lacks_of_shell(kernel_class: Any) -> list[str]:
    """What `Shell` needs of a kernel's class and it does not have."""
    needed = ["get_parent", "_publish_status", "session", "shell_handlers"]
    needed += ["shell_main"] if hasattr(kernel_class, "shell_main") else ["schedule_dispatch", "dispatch_shell"]
    named = {*dir(kernel_class), *getattr(kernel_class, "__annotations__", {}), "shell_handlers"}
    return [name for name in needed if name not in named]


# -- what the reader is asked -------------------------------------------------------------------


def may_ask(kernel: Any) -> bool:
    """Whether the front end that has sent the running cell answers `input()`."""
    return bool(getattr(kernel, "_allow_stdin", False)) and hasattr(kernel, "stdin_socket")


def identity_of_cell(kernel: Any) -> Any:
    """By what the front end that has sent the running cell is reached on the stdin channel."""
    if hasattr(kernel, "_get_shell_context_var"):
        return kernel._get_shell_context_var(kernel._shell_parent_ident)
    known = getattr(kernel, "_shell_parent_ident", None)
    return known.get() if known is not None else kernel._parent_ident["shell"]


@functools.cache
def lacks_of_stdin(kernel_class: Any) -> tuple[str, ...]:
    """What a question to the reader needs of a kernel's class and it does not have."""
    named = {*dir(kernel_class), *getattr(kernel_class, "__annotations__", {})}
    needed = ["get_parent", "session", "stdin_socket", "_allow_stdin"]
    has_ident = "_get_shell_context_var" in named or "_parent_ident" in named or "_shell_parent_ident" in named
    return (*(name for name in needed if name not in named), *["_parent_ident"] * (not has_ident))
