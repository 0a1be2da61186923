"""The store's gate: who may reach the store of a run (`serve`, in a process of `agent.store_host`).

At the store's port there is a gate (`store_proxy`), on the loopback alone; behind it the store listens on a socket made
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
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress

from nbddp.agent import store_host
from nbddp.agent.keepalive import give_up_silent
from nbddp.agent.store_host import Served
from nbddp.capabilities.private import sock_owner, store_proxy
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
        doors = store_proxy.local_doors()
        judge = store_proxy.PoolMembersOnly(sock_owner.ProcessTree(root, others, roots))
        before.callback(judge.close)
        before.callback(store_proxy.StoreProxy(doors, judge, connect).close)
        connect().close()  # it can be reached
        return Served(None, int(doors[0].getsockname()[1]), before=before.pop_all())


def _gated(
    pool: sock_owner.ProcessTree, listen: Listen, libuv: bool, outside: tuple[str, bytes] | None = None
) -> Served:
    """A store behind a gate; and a second one for other nodes, where an address and a key are given."""
    with ExitStack() as before:
        doors, hidden, connect = _listening(listen, before)
        port = int(doors[0].getsockname()[1])
        judge = store_proxy.PoolMembersOnly(pool)
        before.callback(judge.close)
        before.callback(store_proxy.StoreProxy(doors, judge, connect).close)
        far = 0 if outside is None else _second_gate(*outside, connect, before)
        return Served(store_host.served(hidden, port, libuv), port, outside=far, before=before.pop_all())


def _second_gate(address: str, key: bytes, connect: Connect, before: ExitStack) -> int:
    """Lets in whoever signs; the port. The key is the pool's agents' alone."""
    door = before.enter_context(socket.socket(_family(address)))
    door.bind((address, 0))
    sock_owner.sign(door, "::" if door.family == socket.AF_INET6 else "0.0.0.0", 0, key)
    give_up_silent(door)  # and each connection that it takes
    door.listen(store_proxy.BACKLOG)
    before.callback(store_proxy.StoreProxy([door], lambda came: [""] * len(came), connect).close)
    return int(door.getsockname()[1])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _listening(listen: Listen, before: ExitStack) -> tuple[list[socket.socket], socket.socket, Connect]:
    while True:
        with ExitStack() as refused:
            doors = [refused.enter_context(door) for door in store_proxy.local_doors()]
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
        hidden.listen(store_proxy.BACKLOG)
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
    hidden.listen(store_proxy.BACKLOG)

    def connect() -> socket.socket:
        there = socket.socket(socket.AF_UNIX)
        there.settimeout(SECONDS)
        there.connect(f"/proc/self/fd/{number}")
        return there

    return hidden, connect


def _in_the_open(why: str) -> Served:
    return store_host.in_the_open(sock_owner.exposed("on this machine", why))
