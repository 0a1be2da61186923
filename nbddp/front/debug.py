"""`%debug` after a cell that failed on a rank: the rank's frames and what its names held, and none of our own frames.

A rank has no prompt, and what failed is let go of at once (a frame would keep process groups and GPU memory alive). So
the values were worded on the rank when it failed (`worker.failure`); this shows them. After any other error `%debug` is
IPython's.
"""

from __future__ import annotations

import sys
from typing import Any

from nbddp.errors import RunFailed
from nbddp.run import report


class Debug:
    """Replaces IPython's `%debug` in one shell, and passes on to it."""

    def __init__(self, shell: Any):
        self._magics: dict[str, Any] = shell.magics_manager.magics["line"]
        self._original: Any = None

    def install(self) -> None:
        self._original = self._magics.get("debug")
        if self._original is not None:
            self._magics["debug"] = self._debug

    def remove(self) -> None:
        if self._original is not None and self._magics.get("debug") == self._debug:
            self._magics["debug"] = self._original

    def _debug(self, line: str) -> Any:
        """After a %%ddp cell that failed: the failing rank's frames, with the values of their names.
        Else as IPython has it."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, RunFailed) and not line.strip():
            return print(report.post_mortem(error))
        self._magics["debug"] = self._original  # of IPython 9 it is a stand-in, which puts the real one in its place
        try:
            return self._magics["debug"](line)
        finally:
            self.install()
