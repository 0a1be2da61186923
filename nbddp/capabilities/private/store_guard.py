"""The store's gate: who may reach the store of a run (`serve`, in a process of `agent.store_host`).

At the store's port there is a gate (`Gate`), on the loopback alone; behind it the store listens on a socket made
here, in one of two ways. torch's libuv server listens on another address of the loopback, where Linux answers only
connections that are signed by a key of this process. Its older server listens on a unix socket whose name is gone as
soon as it is bound; it is used where libuv takes no socket (up to torch 2.7) or Linux signs nothing, and has no
queues (`Store.queue_push`). Without a kernel that reports a connection's owner (not Linux), or a torch that takes
either, there is no gate. Then anybody on this machine reaches the store, and the answer to the agent says why.
"""

from __future__ import annotations

import errno
import functools
import os
import resource
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress

from nbddp.agent import store_host
from nbddp.agent.store_host import Served
from nbddp.capabilities.private import sock_owner
from nbddp.capabilities.private.sock_owner import ProcessTree, SockDiag, SocketOwner, ends
from nbddp.compat.extra.system import give_up_silent
from nbddp.protocol.agent import KEY_BYTES, OpenStore

BEHIND = "127.0.0.2"
IN_NO_NAME = (0, ord("/"))  # bytes
SECONDS = 1.0  # to connect to a store in this process
FAR_SECONDS = 4.0  # and on another node: a packet that is lost is sent again after 1 s and after 3 s

Connect = Callable[[], socket.socket]
# a listening socket for a port whose number torch gets, and how to connect to it; None if the port will not do
Listen = Callable[[int, ExitStack], tuple[socket.socket, Connect] | None]


def serve(asked: OpenStore, agent: int, owner: int) -> Served:
    """Open what is asked for, for the pool of an agent and its owner."""
    threading.excepthook = _end
    if asked.of is not None:
        return lead_to(asked.of, bytes.fromhex(asked.key), agent, owner, roots=asked.roots)
    if asked.outside:
        return open_to_nodes(asked.outside, bytes.fromhex(asked.key), agent, owner, roots=asked.roots)
    return open_store(agent, owner, roots=asked.roots)


def _end(failed: threading.ExceptHookArgs) -> None:
    """A gate that has failed answers nobody: the agent starts another process."""
    sys.__excepthook__(failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
    os._exit(1)


def open_store(root: int, *others: int, roots: Iterable[int] = ()) -> Served:
    """A fresh store on the loopback for the process `root`, all that descend from it or from `roots`, and the
    others."""
    unguarded = sock_owner.unavailable()
    if unguarded:
        return _in_the_open(unguarded)
    pool = sock_owner.ProcessTree(root, others, roots)
    if store_host.libuv_takes_listener():
        with suppress(OSError, RuntimeError):  # Linux signs nothing, or torch wants another address
            return _gated(pool, _signed, libuv=True)
    try:
        return _gated(pool, _unix, libuv=False)
    except (OSError, RuntimeError) as e:
        return _in_the_open(f"torch cannot listen where other processes cannot reach it ({e})")


def open_to_nodes(address: str, key: bytes, root: int, *others: int, roots: Iterable[int] = ()) -> Served:
    """As `open_store`, for this node's processes; gates of other nodes come to a second port, on `address`, where Linux
    answers only who signs with `key`. Raises OSError where Linux cannot do that, or there is no gate."""
    why = sock_owner.unavailable()
    if why:
        raise OSError(f"the store cannot be guarded between nodes: {why}")
    pool = sock_owner.ProcessTree(root, others, roots)
    if store_host.libuv_takes_listener():
        with suppress(RuntimeError):
            return _gated(pool, _signed, libuv=True, outside=(address, key))
    return _gated(pool, _unix, libuv=False, outside=(address, key))


def lead_to(store: tuple[str, int], key: bytes, root: int, *others: int, roots: Iterable[int] = ()) -> Served:
    """A gate for this node's processes that leads to another node's store. Raises OSError."""
    why = sock_owner.unavailable()
    if why:
        raise OSError(f"the store cannot be guarded between nodes: {why}")

    def connect() -> socket.socket:
        there = _connected(store, key, FAR_SECONDS)
        give_up_silent(there)
        return there

    with ExitStack() as before:
        doors = local_doors()
        judge = PoolMembersOnly(sock_owner.ProcessTree(root, others, roots))
        before.callback(judge.close)
        before.callback(StoreProxy(doors, judge, connect).close)
        connect().close()  # it can be reached
        return Served(None, int(doors[0].getsockname()[1]), before=before.pop_all())


def _gated(
    pool: sock_owner.ProcessTree, listen: Listen, libuv: bool, outside: tuple[str, bytes] | None = None
) -> Served:
    """A store behind a gate; and a second one for other nodes, where an address and a key are given."""
    with ExitStack() as before:
        doors, hidden, connect = _listening(listen, before)
        port = int(doors[0].getsockname()[1])
        judge = PoolMembersOnly(pool)
        before.callback(judge.close)
        before.callback(StoreProxy(doors, judge, connect).close)
        far = 0 if outside is None else _second_gate(*outside, connect, before)
        return Served(store_host.served(hidden, port, libuv), port, outside=far, before=before.pop_all())


def _second_gate(address: str, key: bytes, connect: Connect, before: ExitStack) -> int:
    """Lets in whoever signs; the port. The key is the pool's agents' alone."""
    door = before.enter_context(socket.socket(_family(address)))
    door.bind((address, 0))
    sock_owner.sign(door, "::" if door.family == socket.AF_INET6 else "0.0.0.0", 0, key)
    give_up_silent(door)  # and each connection that it takes
    door.listen(BACKLOG)
    before.callback(StoreProxy([door], lambda came: [""] * len(came), connect).close)
    return int(door.getsockname()[1])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _listening(listen: Listen, before: ExitStack) -> tuple[list[socket.socket], socket.socket, Connect]:
    while True:
        with ExitStack() as refused:
            doors = [refused.enter_context(door) for door in local_doors()]
            found = listen(int(doors[0].getsockname()[1]), before)
            if found is not None:
                refused.pop_all()
                return doors, *found


def _signed(port: int, before: ExitStack) -> tuple[socket.socket, Connect] | None:
    """On another address, where Linux answers only who signs."""
    key = os.urandom(KEY_BYTES)
    hidden = socket.socket()
    try:
        hidden.bind((BEHIND, port))
        sock_owner.sign(hidden, "0.0.0.0", 0, key)
        hidden.listen(BACKLOG)
    except OSError as e:
        hidden.close()
        if e.errno == errno.EADDRINUSE:
            return None
        raise

    return hidden, functools.partial(_connected, (BEHIND, port), key)


def _connected(to: tuple[str, int], key: bytes, seconds: float = SECONDS) -> socket.socket:
    """A connection that is signed with `key`, both ways."""
    there = socket.socket(_family(to[0]))
    try:
        there.settimeout(seconds)
        sock_owner.sign(there, to[0], 128 if there.family == socket.AF_INET6 else 32, key)
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        there.connect(to)
    except OSError:
        there.close()
        raise
    return there


def _unix(port: int, before: ExitStack) -> tuple[socket.socket, Connect] | None:
    """On a unix socket. torch compares the port with the first two bytes of its name; the name itself is gone at once,
    and the descriptor by which it is reached is this process's alone."""
    start = port.to_bytes(2, "big")
    if any(byte in start for byte in IN_NO_NAME):
        return None
    name, hidden = start + b"-store", socket.socket(socket.AF_UNIX)
    here = os.open(".", os.O_RDONLY)
    with tempfile.TemporaryDirectory() as folder:  # 0700
        os.chdir(folder)
        try:
            hidden.bind(name)
            number = os.open(name, os.O_PATH)
        finally:
            os.fchdir(here)
            os.close(here)
    before.callback(os.close, number)
    hidden.listen(BACKLOG)

    def connect() -> socket.socket:
        there = socket.socket(socket.AF_UNIX)
        there.settimeout(SECONDS)
        there.connect(f"/proc/self/fd/{number}")
        return there

    return hidden, connect


def _in_the_open(why: str) -> Served:
    return store_host.in_the_open(sock_owner.exposed("on this machine", why))


# -- the way between a rank and the store ------------------------------------------------------------

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
