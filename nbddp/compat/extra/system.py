"""Features of the operating system that only capabilities use, as `compat.system` has those of the core."""

from __future__ import annotations

import ctypes
import functools
import socket
from typing import Any, ClassVar

from nbddp.compat.system import EVERY, IDLE, TIMES, is_linux

FORK = "_Fork"  # glibc's, from 2.34 on


def can_fork_quietly() -> bool:
    """Whether the C library has `_Fork`: glibc from 2.34 on."""
    return is_linux() and hasattr(ctypes.CDLL(None), FORK)


def fork_quietly() -> int:
    """As `os.fork`, without the handlers that libraries have registered in C: torch's makes autograd refuse to work in
    a fork. No lock of the C library is taken either. Another thread may have held one, and then the child stands still
    at once; the caller finds out by what the child says."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = int(getattr(ctypes.PyDLL(None), FORK)())
    (python.PyOS_AfterFork_Parent if pid else python.PyOS_AfterFork_Child)()
    if pid < 0:
        raise OSError("fork failed")
    return pid


class _MallInfo(ctypes.Structure):
    """mallinfo(3)."""

    _fields_: ClassVar = [
        (field, ctypes.c_size_t)
        for field in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def heap_in_use() -> int | None:
    """Bytes that malloc has given out, in all arenas and mapped; None where malloc is not glibc's 2.33 or newer."""
    count = _mallinfo()
    if count is None:
        return None
    found = count()
    return int(found.uordblks + found.hblkhd)


@functools.cache
def _mallinfo() -> Any:
    count = getattr(ctypes.CDLL(None), "mallinfo2", None) if is_linux() else None
    if count is not None:
        count.restype = _MallInfo
    return count


GIVEN_UP = IDLE + EVERY * TIMES  # seconds


def keep_alive(connection: socket.socket) -> None:
    """Let the operating system ask whether the other side lives."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE), ("TCP_KEEPINTVL", EVERY), ("TCP_KEEPCNT", TIMES)):
        if hasattr(socket, name):  # macOS has other names before Python 3.10
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def give_up_silent(connection: socket.socket) -> None:
    """The same, and have what is on its way be given up, too."""
    keep_alive(connection)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GIVEN_UP * 1000)
