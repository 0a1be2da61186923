"""`%ddp debug`, and `%debug` after a cell that failed on a rank: the rank's frames and what its names held, and none of
our own frames; a prompt where somebody can type, else all of it as text.

What failed is let go of at once (a frame would keep process groups and GPU memory alive). So the values were worded on
the rank when it failed (`worker.failure`); what the cell has set is still there. After any other error `%debug` is
IPython's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from nbddp.errors import BadInput, Cause, NbddpError, RunFailed
from nbddp.pool.pool import Pool
from nbddp.run import keyboard, report
from nbddp.run.postmortem import FIRST, PostMortem
from nbddp.run.prompt import STOPS, Keyboard


class Debug:
    """Replaces IPython's `%debug` in one shell, and passes on to it. pool: the shell's."""

    def __init__(self, shell: Any, pool: Callable[[], Pool]):
        self._shell, self._pool = shell, pool
        self._magics: dict[str, Any] = shell.magics_manager.magics["line"]
        self._original: Any = None

    def install(self) -> None:
        # not the stand-in of IPython 9, which fails once another magic of its class (`%time`) has loaded that
        self._original = self._shell.find_line_magic("debug")
        if self._original is not None:
            self._magics["debug"] = self._debug

    def remove(self) -> None:
        if self._original is not None and self._magics.get("debug") == self._debug:
            self._magics["debug"] = self._original

    def last(self) -> None:
        """`%ddp debug`: of the last run. Raises BadInput if no rank failed in it."""
        run = self._pool().last_run
        error = run.error() if run is not None else None
        if not isinstance(error, RunFailed):
            raise BadInput("no rank failed in the last cell; breakpoint() in a %%ddp cell stops its ranks")
        self._show(error)

    def _debug(self, line: str) -> Any:
        """After a %%ddp cell that failed: the failing rank's frames, with the values of their names.
        Else as IPython has it."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, RunFailed) and not line.strip():
            return self._show(error)
        return self._original(line)

    def _show(self, error: RunFailed) -> None:
        cause, typed = getattr(error, "cause", None), keyboard.for_ranks(self._shell)
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
            answer = dead.answer(keyboard.line(typed, f"rank {dead.rank} post-mortem> ", dead.names))
        except STOPS:
            return
        if answer is None:
            return
        print(answer, flush=True)
