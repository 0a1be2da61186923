"""Private names of ipykernel and IPython that only capabilities use, as `compat.ipykernel` has those of the core."""

from __future__ import annotations

import asyncio
import functools
import inspect
from typing import Any


def kernel_of_engine() -> Any:
    """The IPython kernel of the engine that this process is."""
    from ipykernel.kernelapp import IPKernelApp

    return IPKernelApp.instance().kernel


def parameters(name: str) -> list[str]:
    """Parameters of a method of ipykernel's kernel that is overridden, without `self`; empty where it is missing."""
    from ipykernel.ipkernel import IPythonKernel

    method = getattr(IPythonKernel, name, None)
    return [] if method is None else list(inspect.signature(method).parameters)[1:]


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
