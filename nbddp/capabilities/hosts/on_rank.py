"""Ends torch's connections to a host that has fallen silent, so that calls that wait for it raise.

A cut cable closes nothing. Linux goes on sending for a quarter of an hour, and torch waits until the group's timeout,
30 minutes by default. The control channel does not reach a rank beyond the cut, so each rank looks for itself. Where
nothing is on its way, Linux asks whether the other side lives (SO_KEEPALIVE). What is on its way is looked at here
(TCP_INFO): a connection is shut if something was unanswered, and nothing was answered, in UNANSWERED looks.

TCP_USER_TIMEOUT would need no looks. But since Linux 5.11 it also ends a connection whose other side answers that it
has no room. That may be a process that a debugger stops for some seconds, amid a large message.
"""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress

from nbddp.compat import system
from nbddp.compat.clock import clock
from nbddp.compat.extra.system import GIVEN_UP, keep_alive
from nbddp.compat.thread import OwnThread
from nbddp.protocol.run_spec import RunSpec
from nbddp.worker.parts import RankWorker
from nbddp.worker.release import BorrowedSocket, shut

LOOK_EVERY = 0.5  # seconds
UNANSWERED = int(GIVEN_UP / LOOK_EVERY)  # looks, and not seconds: a process that is stopped makes none
# linux/tcp.h, struct tcp_info: tcpi_state and tcpi_probes are bytes; tcpi_unacked, and tcpi_last_ack_recv in ms
INFO_BYTES, STATE_AT, PROBES_AT, UNACKED_AT, LAST_ACK_AT = 104, 0, 3, 24, 56
SYN_SENT = 2


class Silence:
    """Looks at torch's sockets, in a thread of its own, on a worker whose peers are on other hosts."""

    def __init__(self, worker: RankWorker):
        self._groups = worker.groups
        self._looks: dict[int, int] = {}  # inode → in how many looks in a row nothing was answered
        self._looked = 0.0  # clock.monotonic()
        self._thread: OwnThread | None = None

    def begin(self, spec: RunSpec) -> None:
        """Look from here on, as long as this process lives."""
        if self._thread is None and system.has_proc():
            thread = OwnThread("nbddp-silence", self._go_on)
            self._thread = thread if thread.begin() else None

    def _go_on(self) -> None:
        while True:
            self.look()
            clock.sleep(LOOK_EVERY)

    def look(self) -> None:
        """At each connection, once."""
        now, before = clock.monotonic(), self._looks
        since, self._looked, self._looks = now - self._looked, now, {}
        for inode, number in self._groups.sockets.candidates().items():
            with suppress(OSError), BorrowedSocket(number) as copy:  # closed meanwhile
                if _keeps_alive(copy) and _is_unanswered(copy, since):
                    self._looks[inode] = before.get(inode, 0) + 1
                    if self._looks[inode] >= UNANSWERED:
                        self._shut(number, copy)

    def _shut(self, number: int, copy: socket.socket) -> None:
        if number in self._groups.sockets.torchs():  # and not of an object in Python
            address = "a host"
            with suppress(OSError):  # not connected yet
                address = str(copy.getpeername()[0])
            self._groups.cut = True
            print(f"{address} has been silent for {GIVEN_UP} s; the connection to it is shut",
                  file=sys.__stderr__, flush=True)  # fmt: skip
            shut(number)


def _keeps_alive(connection: socket.socket) -> bool:
    """Let Linux ask whether the other side lives; False if it is no TCP connection."""
    if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
        keep_alive(connection)
    return True


def _is_unanswered(connection: socket.socket, since: float) -> bool:
    """Whether data is on its way, or a question whether the other side lives or has room, and nothing was answered for
    so many seconds."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    unacked, last_ack = (struct.unpack_from("=I", info, at)[0] for at in (UNACKED_AT, LAST_ACK_AT))
    on_its_way = unacked > 0 or info[PROBES_AT] > 0 or info[STATE_AT] == SYN_SENT
    return on_its_way and last_ack >= since * 1000
