"""Stores that a program makes itself listen on the loopback alone while all ranks are on this machine, else on the
address of this node that joins it to the others (`listen`).

torch's `TCPStore(host, port, is_master=True)` listens on all interfaces, whatever the host. Here it gets a listening
socket on 127.0.0.1 (or on the address 127.x.y.z or ::1 that it is given), and clients of a host that is this machine go
there, under whichever of its names: `localhost` is looked up as ::1 first, where anybody could listen.

Forked processes have it as they are. One that is started by spawn or forkserver gets it with its first object
(`capabilities.subprocesses.on_rank`), before or when it imports torch; a program that a cell runs as a subprocess does
not.
"""

from __future__ import annotations

import errno
import functools
import importlib.abc
import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

HOST = "127.0.0.1"
LIBRARY = "torch.distributed"
BACKLOG = 1024
PARAMETERS = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant",
              "master_listen_fd", "use_libuv")  # fmt: skip


_address: str | None = HOST  # where a server for all ranks listens


Place = tuple[str, int]
_store: tuple[Place, Place] | None = None  # MASTER_ADDR and MASTER_PORT, and where this node reaches that store


def listen(address: str | None, store: tuple[Place, Place] | None = None) -> None:
    """From here on a program's own server is to listen at this address of the node; empty: on the loopback; None: where
    torch has it. store: the address of the pool's store as programs know it, and as this node reaches it."""
    global _address, _store
    _address = None if address is None else address or HOST
    _store = store


def is_port_of_pool(port: int) -> bool:
    """Whether this is the MASTER_PORT that programs are given."""
    return _store is not None and port == _store[0][1]


Making = Callable[..., None]


def install(within: Callable[[Making], Making] = lambda original: original) -> None:
    """Have TCPStore do so in this process; once. within: what else is to be done when one is made."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.TCPStore.__init__, "on_loopback"):
        dist.TCPStore.__init__ = _on_loopback(within(dist.TCPStore.__init__))


def install_with_torch(within: Callable[[Making], Making]) -> None:
    """As `install`, and not before this process imports torch."""
    if LIBRARY in sys.modules:
        install(within)
    else:
        sys.meta_path.insert(0, _Finder(within))


@functools.cache
def is_local(host: str) -> bool:
    """Whether this is a name or an address of this machine."""
    if host in ("localhost", "::1", "0.0.0.0", "::", socket.gethostname()) or host.startswith("127."):
        return True
    try:
        return any(_can_bind(family, place) for family, *_, place in socket.getaddrinfo(host, 0))
    except OSError:  # nobody knows it
        return False


def _can_bind(family: int, place: Any) -> bool:
    try:
        with socket.socket(family) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def _on_loopback(original: Callable[..., None]) -> Callable[..., None]:
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

    __init__.on_loopback = True  # type: ignore[attr-defined]
    return __init__


def _listening(host: str, port: int) -> socket.socket | None:
    """None if the port is taken: by a server of this process's that torch shares, or torch says so."""
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


def _serve(original: Callable[..., None], store: Any, listening: socket.socket, given: dict[str, Any]) -> None:
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


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch.distributed as ever, once, and has its store do so as soon as it is imported."""

    def __init__(self, within: Callable[[Making], Making]) -> None:
        self._within = within

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name != LIBRARY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                install(self._within)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
