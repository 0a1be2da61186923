"""A process that holds the stores in which ranks meet, one fresh store per run.

torchrun keeps its store outside the workers (TORCHELASTIC_USE_AGENT_STORE), so that no
worker's death takes it along; so do we. It is a process of its own because a TCPStore
starts a thread, and the agent must stay single-threaded to fork.

At the store's port there is a gate (`capabilities.private.store_proxy`), on the loopback alone; behind it the store
listens on a socket made here, in one of two ways. torch's libuv server listens on another address of the loopback,
where the kernel answers only connections that are signed by a key of this process. Its older server listens on a unix
socket whose name is gone as soon as it is bound; it is used where libuv takes no socket (up to torch 2.7) or the kernel
signs nothing, and has no queues (`Store.queue_push`). Where the kernel does not report whose a connection is (not
Linux), or torch takes neither, there is no gate, anybody on this machine reaches the store, and the answer to the agent
says why.
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
from dataclasses import dataclass, field
from typing import Any

from nbddp.agent import warning_filters
from nbddp.agent.keepalive import give_up_silent
from nbddp.capabilities.private import sock_owner, store_proxy
from nbddp.protocol.jsonl import LineBuffer, Message, encode

HOST, BEHIND = "127.0.0.1", "127.0.0.2"
IN_NO_NAME = (0, ord("/"))  # bytes
SECONDS = 1.0  # to connect to a store in this process
FAR_SECONDS = 4.0  # and on another node: a packet that is lost is sent again after 1 s and after 3 s

Connect = Callable[[], socket.socket]
# a listening socket for a port of whose number torch is told, and how to connect to it; None if the port will not do
Listen = Callable[[int, ExitStack], tuple[socket.socket, Connect] | None]


@dataclass
class Served:
    """A store that is open at `port`. `unguarded` says who else reaches it, and why; empty if nobody does."""

    store: Any
    port: int
    unguarded: str = ""
    outside: int = 0  # the port at which gates of other nodes reach it; 0: at none
    before: ExitStack = field(default_factory=ExitStack)  # what is to be closed before the store is

    def close(self) -> None:
        self.before.close()
        self.store = None


def main(request: dict[str, Any]) -> int:
    """Serve open and close requests on the socket `request["channel"]` until it ends, for the pool whose agent is this
    process's parent and whose owner is the process `request["owner"]`."""
    warning_filters.put_off()
    threading.excepthook = _end
    channel = socket.socket(fileno=request["channel"])
    stores: dict[int, Served] = {}
    lines = LineBuffer()
    pool = (os.getppid(), request["owner"])
    while chunk := channel.recv(65536):
        for message in lines.feed(chunk):
            if message["op"] == "close":
                for key in set(message["stores"]) & set(stores):
                    stores.pop(key).close()
                continue
            answer = {"store": message["store"]}
            try:
                served = stores[message["store"]] = _opened(message, pool)
                answer |= {"port": served.port, "unguarded": served.unguarded, "outside": served.outside}
            except Exception as e:
                answer["error"] = f"{type(e).__name__}: {e}"
            channel.sendall(encode(answer))
    return 0


def _opened(message: Message, pool: tuple[int, int]) -> Served:
    """`of`: where another node's store is; this one's gate leads there. `outside`: the address at which gates of other
    nodes reach this one's store. Both know `key`. `roots`: processes that belong to the pool, with all that descend
    from them, though the agent has not started them."""
    roots = message.get("roots", ())
    if "of" in message:
        return lead_to(tuple(message["of"]), bytes.fromhex(message["key"]), *pool, roots=roots)
    if message.get("outside"):
        return open_to_nodes(message["outside"], bytes.fromhex(message["key"]), *pool, roots=roots)
    return open_store(*pool, roots=roots)


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
    if libuv_takes_listener():
        with suppress(OSError, RuntimeError):  # the kernel signs nothing, or torch wants another address
            return _gated(pool, _signed, libuv=True)
    try:
        return _gated(pool, _unix, libuv=False)
    except (OSError, RuntimeError) as e:
        return _in_the_open(f"torch cannot listen where other processes cannot reach it ({e})")


def open_to_nodes(address: str, key: bytes, root: int, *others: int, roots: Iterable[int] = ()) -> Served:
    """As `open_store`, for this node's processes; gates of other nodes come to a second port, on `address`, where the
    kernel answers only who signs with `key`. Raises OSError where the kernel cannot do that, or there is no gate."""
    why = sock_owner.unavailable()
    if why:
        raise OSError(f"the store cannot be guarded between nodes: {why}")
    pool = sock_owner.ProcessTree(root, others, roots)
    if libuv_takes_listener():
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
        return Served(_served(hidden, port, libuv), port, outside=far, before=before.pop_all())


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
    """On another address, where the kernel answers only who signs."""
    key = os.urandom(sock_owner.KEY_BYTES)
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


# -- torch's server ------------------------------------------------------------------------------


def _in_the_open(why: str) -> Served:
    store, port = _serve(libuv_takes_listener())
    return Served(store, port, sock_owner.exposed("on this machine", why))


@functools.cache
def libuv_takes_listener() -> bool:
    """Whether torch's libuv server accepts a listening socket. Tried once per process: up to torch 2.7 it refuses."""
    try:
        _serve(libuv=True)
    except RuntimeError:  # NotImplementedError is one; so is what a torch without libuv raises
        return False
    return True


def _serve(libuv: bool) -> tuple[Any, int]:
    """A store that anybody on this machine reaches, and its port."""
    listener = socket.create_server((HOST, 0), backlog=store_proxy.BACKLOG)
    port = int(listener.getsockname()[1])
    return _served(listener, port, libuv), port


def _served(listener: socket.socket, port: int, libuv: bool) -> Any:
    """torch's server at a listening socket, which is its own from here on."""
    from torch.distributed import TCPStore

    fd = listener.detach()
    try:
        return TCPStore(HOST, port, is_master=True, wait_for_workers=False, use_libuv=libuv, master_listen_fd=fd)
    except RuntimeError:
        os.close(fd)  # a server that was refused has not taken it
        raise
