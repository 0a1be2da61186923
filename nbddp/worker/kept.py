"""A copy of a run's text that outlives the process.

A message of a process that is killed may never leave it. So what is written to stdout and stderr
during a run is also written to a file next to the worker's log, which the kernel of the operating system keeps;
when a rank has died, the client takes from it what has not come (`run.spmd`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

STREAMS = ("stdout", "stderr")


def path(log: str, stream: str) -> str:
    """Where the copy of a stream is, for a worker with this log."""
    return f"{log}.{stream}"


class Kept:
    """The two copies; one per worker. Each holds the text of the current run alone."""

    def __init__(self, log: str):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC
        self._files = {s: os.open(path(log, s), flags, 0o600) for s in STREAMS}
        for stream in STREAMS:
            out: Any = getattr(sys, stream)
            out.write = self._copying(out.write, self._files[stream])

    def begin(self) -> None:
        """A run begins: nothing has been written in it."""
        for file in self._files.values():
            os.ftruncate(file, 0)

    def _copying(self, write: Callable[[str], Any], file: int) -> Callable[[str], Any]:
        def both(text: str) -> Any:
            if isinstance(text, str):
                os.write(file, text.encode("utf-8", "replace"))
            return write(text)

        return both
