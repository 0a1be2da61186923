"""Which process is meant: pid and start time together, since a pid alone is reused."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class ProcessId:
    """A process by pid and start time (seconds since the epoch, as psutil gives it)."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The identity of a living process. Raises psutil.NoSuchProcess."""
        return cls(pid, psutil.Process(pid).create_time())

    def process(self) -> psutil.Process | None:
        """The living process that this names, or None if it has ended."""
        try:
            found = psutil.Process(self.pid)
            if abs(found.create_time() - self.started) < 0.02 and found.status() != psutil.STATUS_ZOMBIE:
                return found
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # somebody else's has the pid now, where one may not ask
            pass
        return None

    def alive(self) -> bool:
        return self.process() is not None


def is_zombie(child: int) -> bool:
    """Whether a child of this process has ended; nobody has waited for it, so its pid is its own."""
    return bool(psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Pid and user id of the process at the other end of a unix socket, as Linux reports them."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
