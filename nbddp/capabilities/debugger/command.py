"""`%ddp debug`, and `%debug` and `%pdb on` after a cell that failed on a rank: the rank's frames and what its names
held, and none of our own frames; a prompt where somebody can type, else all of it as text.

What failed is let go of at once (a frame would keep process groups and GPU memory alive). So the values were worded on
the rank when it failed (`worker.failure`); what the cell has set is still there. After any other error `%debug` is
IPython's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbddp.capabilities.debugger import stdin
from nbddp.capabilities.debugger.postmortem import FIRST, PostMortem
from nbddp.capabilities.debugger.prompt import STOPS, Keyboard
from nbddp.errors import BadInput, Cause, NbddpError, RunFailed
from nbddp.execution import report
from nbddp.launch.options import Parser
from nbddp.notebook.commands import Asked, CommandLine

if TYPE_CHECKING:
    from nbddp.pool.pool import Pool


def arguments(parser: Parser) -> None:
    parser.epilog = (
        "breakpoint() in a %%ddp cell stops the ranks there and opens a prompt for all of them: n, s, r and c step "
        "them together, p x shows x on every rank, @1 p x on rank 1, q ends the cell, h lists the rest. If a "
        "panel is open (%ddp panel), its Debugger page is the prompt. After a failure %ddp debug shows the frames of "
        "the rank that failed first: w, u, d, l, p x, a, q. Where nobody can type, it prints them."
    )


def show(asked: Asked, line: CommandLine) -> None:
    Debug(asked.shell, lambda: asked.pool).last()


class Debug:
    """Replaces one shell's `debugger`, which `%debug` and, under `%pdb on`, each error call. pool: the shell's."""

    def __init__(self, shell: Any, pool: Callable[[], Pool]):
        self._shell, self._pool = shell, pool
        self._original: Callable[[bool], None] = shell.debugger

    def install(self) -> None:
        self._shell.debugger = self._debugger

    def remove(self) -> None:
        if self._shell.debugger == self._debugger:
            self._shell.debugger = self._original

    def last(self) -> None:
        """`%ddp debug`: of the last run. Raises BadInput if no rank failed in it."""
        run = self._pool().last_run
        error = run.error() if run is not None else None
        if not isinstance(error, RunFailed):
            raise BadInput("no rank failed in the last cell; breakpoint() in a %%ddp cell stops its ranks")
        self._show(error)

    def _debugger(self, force: bool = False) -> None:
        """After a %%ddp cell that failed: the failing rank's frames, with the values of their names. Else IPython's."""
        error = getattr(sys, "last_value", None)
        if not isinstance(error, RunFailed):
            self._original(force)
        elif force or self._shell.call_pdb:
            self._show(error)

    def _show(self, error: RunFailed) -> None:
        cause, typed = getattr(error, "cause", None), stdin.for_ranks(self._shell)
        if typed is None or not isinstance(cause, Cause):
            print(report.post_mortem(error))
            return
        dead = PostMortem(cause, lambda text: self._value(cause.rank, text))
        if not dead.frames:
            print(report.post_mortem(error))
            return
        print(error, dead.answer("l"), FIRST, sep="\n", flush=True)
        _converse(dead, typed)

    def _value(self, rank: int, expression: str) -> str:
        """Of an expression on a rank, in words; or why there is none."""
        try:
            return bytes(self._pool().answers("evaluate", [rank], text=expression)[rank][0]).decode()
        except NbddpError as e:
            return str(e)


def _converse(dead: PostMortem, typed: Keyboard) -> None:
    while True:
        try:
            answer = dead.answer(stdin.line(typed, f"rank {dead.rank} post-mortem> ", dead.names))
        except STOPS:
            return
        if answer is None:
            return
        print(answer, flush=True)
