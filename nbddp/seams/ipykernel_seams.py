"""Every private name of ipykernel and IPython that nbddp uses, each as a function with a name of ours.

No other module reads one (`tests/test_seams.py`), but for what a subclass overrides: that stays in the
subclass, and `OVERRIDES` lists it.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

# Methods and attributes of ipykernel's kernel that `worker.kernel.WorkerKernel` overrides or calls
OVERRIDES = ("_publish_status", "_cancel_on_sigint", "_supports_kernel_subshells", "_topic")
# What a seam of `nbddp.seams` needs, as module:attribute; the others are tried alone
NAMES = {
    "status messages": ("ipykernel.kernelbase:Kernel._publish_status",),
    "interrupt of an await": ("ipykernel.ipkernel:IPythonKernel._cancel_on_sigint",),
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
    """The kernel of the engine that this process is."""
    from ipykernel.kernelapp import IPKernelApp

    return IPKernelApp.instance().kernel


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
