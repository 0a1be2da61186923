"""The gate before a run's store: who may connect to it, and the passing on of bytes.

TCPStore answers whoever connects. So the store itself listens where nobody but this process reaches it, and what
listens at MASTER_PORT is the gate. Before it reads a byte of a connection, it asks whether a process of the pool is at
the other end (`PoolMembersOnly`). If not, it closes the connection; else it passes on what the two send each other.
Ordinary clients of the ranks see no difference.

A gate knows two functions and nothing of who runs where: `refusals`, which judges connections, and `connect`, which
reaches the store. So every node can have a gate of its own that asks its own kernel; for a store on another node,
`connect` is to return a channel to it, on which the two agents have proved who they are.

A gate is one thread that waits in epoll: only Linux says whose a connection is, so only there is there one.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence

from nbddp.capabilities.private.sock_owner import ProcessTree, SockDiag, SocketOwner, ends

CHUNK = 1 << 18  # bytes that are read at once, and the most that wait for a slow reader
AT_ONCE = 64  # connections judged together: one look into /proc answers for all of them
FILES_EACH = 8  # descriptors kept for a connection and what it is joined to, in a process of two gates
BACKLOG = 1024
BREATHER = 0.01  # seconds until the next try where the machine has no descriptor left

Judge = Callable[[Sequence[socket.socket]], Sequence[str]]


class PoolMembersOnly:
    """Why each of some connections is refused; empty for those whose other end a process of the pool holds.

    Where /proc hides a process of the pool, nobody can say of another connection of this user that it is a stranger's.
    """

    def __init__(self, family: ProcessTree):
        self._family, self._kernel = family, SockDiag()

    def __call__(self, connections: Sequence[socket.socket]) -> list[str]:
        owners = [self._owner(connection) for connection in connections]
        mine = {o.inode for o in owners if o is not None and o.holds and o.uid == os.geteuid()}
        pids, hidden = self._family.holders(mine) if mine else ({}, False)
        return [self._refusal(owner, hidden or (owner is not None and owner.inode in pids)) for owner in owners]

    def close(self) -> None:
        self._kernel.close()

    def _owner(self, connection: socket.socket) -> SocketOwner | None:
        try:
            near, far = ends(connection)
            return self._kernel.owner(far, near)
        except OSError:  # it has gone
            return None

    def _refusal(self, owner: SocketOwner | None, in_pool: bool) -> str:
        if owner is None or not owner.holds:
            return "from a process that has exited"
        if owner.uid != os.geteuid():
            return f"from uid {owner.uid}"
        return "" if in_pool else "from a process outside the pool"


class _End:
    """One half of a joined connection; what the other half reads is written here."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self.socket, self.number = connection, connection.fileno()
        self.other: _End | None = None
        self.unsent = b""


class StoreProxy:
    """Listens at `doors`, judges who comes, and joins those who may pass to what `connect` returns."""

    def __init__(self, doors: Sequence[socket.socket], refusals: Judge, connect: Callable[[], socket.socket]):
        self.refused = 0
        self._refusals, self._connect = refusals, connect
        self._doors = {door.fileno(): door for door in doors}
        self._ends: dict[int, _End] = {}
        self._most = 2 * resource.getrlimit(resource.RLIMIT_NOFILE)[0] // FILES_EACH
        self._epoll, self._closing = select.epoll(), os.eventfd(0)
        for door in doors:
            door.setblocking(False)
        for number in (*self._doors, self._closing):
            self._epoll.register(number, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name="nbddp-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut all connections and let nobody in any more; returns when that is done."""
        os.eventfd_write(self._closing, 1)
        self._thread.join()

    def _serve(self) -> None:
        try:
            while True:
                for number, events in self._epoll.poll():
                    if number == self._closing:
                        return
                    if number in self._doors:
                        self._let_in(self._doors[number])
                    elif number in self._ends:
                        self._pass_on(self._ends[number], events)
        finally:
            for end in list(self._ends.values()):
                end.socket.close()
            for door in self._doors.values():
                door.close()
            self._epoll.close()
            os.close(self._closing)

    # -- who comes -------------------------------------------------------------------------------

    def _let_in(self, door: socket.socket) -> None:
        came = self._come(door)
        for connection, why in zip(came, self._refusals(came) if came else (), strict=True):
            if not why and len(self._ends) >= self._most:
                why = "one too many"
            if why or not self._join(connection):
                self._refuse(connection, why or "while the store accepted no connections")

    def _come(self, door: socket.socket) -> list[socket.socket]:
        came: list[socket.socket] = []
        try:
            while len(came) < AT_ONCE:
                came.append(door.accept()[0])
        except BlockingIOError:
            pass
        except ConnectionError:  # it has gone already
            pass
        except OSError:  # no descriptors
            time.sleep(BREATHER)
        return came

    def _refuse(self, connection: socket.socket, why: str) -> None:
        connection.close()
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:  # 1, 2, 4, …: a flood does not fill the log
            print(f"refused connection number {self.refused}, {why}", file=sys.stderr, flush=True)

    def _join(self, connection: socket.socket) -> bool:
        """Connect it to the store; False if the store takes nobody."""
        try:
            there = self._connect()
        except OSError:
            return False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        near, far = _End(connection), _End(there)
        near.other, far.other = far, near
        for end in (near, far):
            self._ends[end.number] = end
            self._epoll.register(end.number, select.EPOLLIN)
        return True

    # -- what they say ---------------------------------------------------------------------------

    def _pass_on(self, end: _End, events: int) -> None:
        if events & select.EPOLLOUT:
            self._send(end, b"")
        elif end.other is not None and not end.other.unsent:
            self._read(end, end.other)
        elif events & (select.EPOLLHUP | select.EPOLLERR):  # it is not read for the moment, and says it has gone
            self._drop(end)

    def _read(self, end: _End, other: _End) -> None:
        try:
            data = end.socket.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._send(other, data)
        else:
            self._drop(end)

    def _send(self, end: _End, data: bytes) -> None:
        """Write what is left and this. What does not go waits, and nothing is read for it meanwhile."""
        waited, data = bool(end.unsent), end.unsent + data
        try:
            end.unsent = data[end.socket.send(data) :]
        except BlockingIOError:
            end.unsent = data
        except OSError:
            end.unsent = b""
            self._drop(end)
            return
        if end.other is None and not end.unsent:
            self._drop(end)
        elif waited != bool(end.unsent):
            self._watch(end)
            if end.other is not None:
                self._watch(end.other)

    def _watch(self, end: _End) -> None:
        reads = end.other is not None and not end.other.unsent
        self._epoll.modify(end.number, (select.EPOLLIN if reads else 0) | (select.EPOLLOUT if end.unsent else 0))

    def _drop(self, end: _End) -> None:
        """Close a half; the other follows as soon as it has been sent what is left for it."""
        del self._ends[end.number]
        self._epoll.unregister(end.number)
        end.socket.close()
        other, end.other = end.other, None
        if other is None:
            return
        other.other = None
        if other.unsent:
            self._watch(other)
        else:
            self._drop(other)


def local_doors() -> list[socket.socket]:
    """Listening sockets at a free port of the loopback's addresses, which are all that `localhost` can mean.

    The second is taken so that nobody else listens there: who looks `localhost` up tries it first.
    """
    while True:
        first = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        try:
            second = [socket.create_server(("::1", first.getsockname()[1]), family=socket.AF_INET6, backlog=BACKLOG)]
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                first.close()
                continue
            second = []  # no IPv6
        return [first, *second]
