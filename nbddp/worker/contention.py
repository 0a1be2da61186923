"""How long a thread has waited for a core: it could run, and another thread ran. Linux alone keeps count of it
(/proc/…/schedstat, its second number)."""

from __future__ import annotations

import os
import threading

from nbddp.base import system

STATISTICS = "/proc/thread-self/schedstat"
_open: dict[tuple[int, int], int] = {}  # process and thread → its descriptor


def waited() -> int | None:
    """Nanoseconds that the calling thread has waited for a core since it began; None where nobody counts."""
    if not system.is_linux():
        return None
    me = os.getpid(), threading.get_native_id()
    try:
        if me not in _open:
            _open.clear()  # of the process that this one was forked from
            _open[me] = os.open(STATISTICS, os.O_RDONLY | os.O_CLOEXEC)
        return int(os.pread(_open[me], 100, 0).split()[1])
    except (
        OSError,
        ValueError,
        IndexError,
    ):  # no such file, or a program that closed it
        return None
