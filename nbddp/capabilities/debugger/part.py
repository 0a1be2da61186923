"""The debugger on the notebook's side: lines for ranks that stop, and `%debug` after a cell that failed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nbddp.capabilities.debugger.messages import Stopped
from nbddp.compat.extra import ipykernel as ipykernel_extra
from nbddp.pool.runs import shell
from nbddp.protocol.codec import Json, from_json
from nbddp.protocol.request import Request

if TYPE_CHECKING:
    from nbddp.capabilities.debugger.command import Debug
    from nbddp.capabilities.debugger.sender import DebugSender
    from nbddp.execution.execution import Execution
    from nbddp.pool.pool import WorkerPool
    from nbddp.pool.state import PoolState


class DebuggerPart:
    """`elsewhere`: whether somebody sends lines to ranks that stop by other ways than a keyboard."""

    def __init__(self, pool: PoolState):
        self.elsewhere: Callable[[], bool] = lambda: False
        self._types = False  # whether somebody can type lines in the run that goes on
        self._sender: DebugSender | None = None
        self._debug: Debug | None = None

    def installed(self, shell: Any, pool: Callable[[], WorkerPool]) -> None:
        from nbddp.capabilities.debugger.command import Debug

        self._debug = Debug(shell, pool)
        self._debug.install()

    def removed(self) -> None:
        if self._debug is not None:
            self._debug.remove()

    def tells(self, request: Request) -> dict[str, bool]:
        """Whether somebody can type lines for a rank that stops: without, a breakpoint raises."""
        elsewhere = self.elsewhere()
        self._types = not elsewhere and can_type(shell())
        return {"debug": True} if elsewhere or self._types else {}

    def run_begins(self, run: Execution) -> None:
        self._sender = None
        if not any(spec.debug for spec in run.specs.values()):
            return
        from nbddp.capabilities.debugger import stdin
        from nbddp.capabilities.debugger.sender import DebugSender

        self._sender = DebugSender(run, stdin.for_ranks(shell()) if self._types else None)

    def message(self, rank: int, kind: str, content: Json, buffers: Sequence[Any]) -> None:
        if self._sender is not None:
            self._sender.debugged.heard(rank, from_json(Stopped, content))


def can_type(shell: Any) -> bool:
    """Whether somebody can type lines in this shell (None: plain Python) while a cell runs; in another thread than the
    main one nobody can."""
    if threading.current_thread() is not threading.main_thread():
        return False
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        return not ipykernel_extra.lacks_of_stdin(kernel.__class__) and ipykernel_extra.may_ask(kernel)
    return _is_terminal(sys.stdin) and _is_terminal(sys.stdout)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # not a file, or closed
        return False
