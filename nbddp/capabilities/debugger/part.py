"""The debugger on the notebook's side: lines for ranks that stop, and `%debug` after a cell that failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nbddp.capabilities.debugger.messages import Stopped
from nbddp.capabilities.debugger.prompt import Keyboard
from nbddp.capabilities.debugger.sender import DebugSender
from nbddp.capabilities.debugger.stdin import for_ranks
from nbddp.pool.runs import shell
from nbddp.protocol.codec import Json, from_json
from nbddp.protocol.request import Request

if TYPE_CHECKING:
    from nbddp.capabilities.debugger.command import Debug
    from nbddp.execution.execution import Execution
    from nbddp.pool.pool import WorkerPool
    from nbddp.pool.state import PoolState


class DebuggerPart:
    """`elsewhere`: whether somebody sends lines to ranks that stop by other ways than a keyboard."""

    def __init__(self, pool: PoolState):
        self.elsewhere: Callable[[], bool] = lambda: False
        self._keyboard: Keyboard | None = None
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
        elsewhere = request.is_program and self.elsewhere()
        self._keyboard = for_ranks(shell()) if request.is_program and not elsewhere else None
        return {"debug": True} if elsewhere or self._keyboard is not None else {}

    def run_begins(self, run: Execution) -> None:
        if any(spec.debug for spec in run.specs.values()):
            self._sender = DebugSender(run, self._keyboard)

    def message(self, rank: int, kind: str, content: Json, buffers: Sequence[Any]) -> None:
        if self._sender is not None:
            self._sender.debugged.heard(rank, from_json(Stopped, content))

    def run_ended(self, run: Execution) -> None:
        self._sender = None
