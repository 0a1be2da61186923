"""Descriptors that are kept for what a worker does at the end of a run, and to free it: a program may have used up all.

They are given back where they are needed, and taken again when the next run begins, as far as there are any.
"""

from __future__ import annotations

import os

KEPT = 8  # two new pipes, and some files in /proc


class Reserve:
    """`begin` takes descriptors, `free` gives them back; both may be called in any thread."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def begin(self) -> None:
        while len(self._held) < KEPT:
            try:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:  # a run before has left none
                return

    def free(self) -> None:
        while self._held:
            os.close(self._held.pop())
