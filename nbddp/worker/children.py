"""Processes that a cell starts: what they print, and their end.

A forked process has ipykernel's streams without the thread that sends: what it prints goes to the descriptors, as the
output of any subprocess does, and the worker reads it there. A cell that fails or is stopped ends what it has started
and nobody would: a script's end would.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable
from typing import Any

from nbddp.worker import ipykernel_seams

END_SECONDS = 0.3  # that a process has from SIGTERM to its end


class Direct:
    """Writes text to a descriptor, whole lines at once."""

    def __init__(self, descriptor: int):
        self._descriptor, self._text = descriptor, ""

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text)}")
        self._text += text
        if "\n" in text:
            self._send(self._text.rindex("\n") + 1)
        return len(text)

    def flush(self) -> None:
        self._send(len(self._text))

    def _send(self, length: int) -> None:
        left, self._text = self._text[:length].encode("utf-8", "backslashreplace"), self._text[length:]
        while left:
            left = left[os.write(self._descriptor, left) :]


def have_printed(streams: Iterable[Any]) -> None:
    """In what is forked from here, have the streams write to stdout's and stderr's descriptors; once.

    Whoever holds a stream, a logging handler say, holds the same one there.
    """
    pairs = [(s, n) for n, s in enumerate(streams, 1) if ipykernel_seams.captured_pipe(s) is not None]

    def in_child() -> None:
        for stream, descriptor in pairs:
            direct = Direct(descriptor)
            stream.write, stream.flush = direct.write, direct.flush

    os.register_at_fork(after_in_child=in_child)


class Started:
    """Processes of multiprocessing's that a cell has started. A daemon goes with the object that holds it (a data
    loader, a pool), as ever; only what a script would wait for at its end is ended."""

    def __init__(self) -> None:
        self._before: set[int | None] = set()

    def begin(self) -> None:
        self._before = {p.pid for p in multiprocessing.active_children()}

    def end(self) -> None:
        """The cell did not end well."""
        started = [p for p in multiprocessing.active_children() if p.pid not in self._before and not p.daemon]
        for process in started:
            process.terminate()
        until = time.monotonic() + END_SECONDS
        for process in started:
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode is None:
                process.kill()
