"""How long a thread has waited for a core: it could run, and another thread ran. Linux alone keeps count of it
(/proc/…/schedstat, its second number)."""

from __future__ import annotations

import os
import threading

from nbddp.compat import system

STATISTICS = "/proc/thread-self/schedstat"
_open: dict[int, int] = {}  # a thread's native id → its descriptor
os.register_at_fork(after_in_child=_open.clear)


def waited() -> int | None:
    """Nanoseconds that the calling thread has waited for a core since it began; None where nobody counts."""
    me = threading.get_native_id()
    try:
        if me not in _open:
            if not system.is_linux():
                return None
            _open[me] = os.open(STATISTICS, os.O_RDONLY | os.O_CLOEXEC)
        return int(os.pread(_open[me], 64, 0).split(None, 2)[1])
    except (OSError, ValueError, IndexError):  # no such file, or a program that closed it
        _open.pop(me, None)
        return None
