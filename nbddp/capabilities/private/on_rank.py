"""The guard of a rank. Stores of its programs listen where the pool alone can connect. The peers of a new group are
checked before it is used (`peer_check`).

While all ranks are on this machine, stores that a program makes itself listen on the loopback alone. Else they listen
on the address that joins this node to the others (`listen`). torch's `TCPStore(host, port, is_master=True)` listens on
all interfaces, whatever the host. Here it gets a listening socket on 127.0.0.1, or on a given address 127.x.y.z or ::1.
Clients of a host that is this machine go there, under any of its names. `localhost` is looked up as ::1 first, where
anybody could listen.

Forked processes have it as they are. One that is started by spawn or forkserver gets it when it imports torch
(`capabilities.subprocesses.on_rank`); a program that a cell runs as a subprocess does not.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from nbddp.capabilities.private import peer_check
from nbddp.deadlock.on_rank.store_client import PARAMETERS, is_local
from nbddp.protocol.run_spec import Rendezvous
from nbddp.worker.rank_guard import Making, RankGuard

HOST = "127.0.0.1"
BACKLOG = 1024
Place = tuple[str, int]

_address: str | None = HOST  # where a server for all ranks listens
_store: tuple[Place, Place] | None = None  # MASTER_ADDR and MASTER_PORT, and where this node reaches that store


def listen(address: str | None, store: tuple[Place, Place] | None = None) -> None:
    """From here on a program's own server is to listen at this address of the node; empty: on the loopback; None: where
    torch has it. store: the address of the pool's store as programs know it, and as this node reaches it."""
    global _address, _store
    _address = None if address is None else address or HOST
    _store = store


def on_loopback(original: Callable[..., None]) -> Callable[..., None]:
    """What `TCPStore.__init__` becomes, once in a process."""

    @functools.wraps(original)
    def __init__(store: Any, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(PARAMETERS, args, strict=False)), **kwargs}
        host, port = given.get("host_name"), given.get("port")
        if not given.get("is_master") and _store is not None and (host, port) == _store[0]:
            original(store, **{**given, "host_name": _store[1][0], "port": _store[1][1]})
            return
        address = None if len(args) > len(PARAMETERS) else _address
        if address is None or not isinstance(host, str) or not isinstance(port, int) or not is_local(host):
            original(store, *args, **kwargs)
            return
        given["host_name"] = host = host if host.startswith("127.") or host == "::1" else address
        own = given.get("is_master") and given.get("master_listen_fd") is None
        listening = _listening(host, port) if own else None
        if listening is None:
            original(store, **given)
        else:
            _serve(original, store, listening, given)

    return __init__


def _listening(host: str, port: int) -> socket.socket | None:
    """None if the port is taken: by a server of this process's that torch shares, or torch raises an error."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(BACKLOG)
    except OSError as e:
        made.close()
        if e.errno == errno.EADDRINUSE:
            return None
        raise
    return made


def _serve(original: Callable[..., None], store: Any, listening: socket.socket, given: dict[str, object]) -> None:
    """Make the store its socket's server. A server that was refused has not taken the descriptor."""
    given |= {"port": listening.getsockname()[1], "master_listen_fd": (number := listening.detach())}
    try:
        try:
            original(store, **given)
        except NotImplementedError:  # libuv's, up to torch 2.7
            original(store, **{**given, "use_libuv": False})
    except NotImplementedError:
        os.close(number)
        raise


class Guard:
    def begin(self, here: Rendezvous) -> None:
        listen(here.listen, (here.master, here.store))

    def belong_to(self, roots: Sequence[int]) -> None:
        peer_check.belong_to(roots)

    def store_made(self, original: Making) -> Making:
        return on_loopback(original)

    def group_made(self, descriptors: Sequence[int], store: Any, rank: int, size: int) -> bool:
        return peer_check.check(descriptors, store, rank, size)

    def rest(self) -> None:
        listen(None)
        peer_check.belong_to([])


def guard() -> RankGuard:
    return Guard()
