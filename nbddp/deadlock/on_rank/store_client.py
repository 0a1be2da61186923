"""A store's client waits for its server here and not in torch, which hears no Stop while it waits and looks a name up.

torch's `TCPStore` tries an unknown host, or a port without a server, until its timeout. It does so in C++, and goes on
after an interrupt: such a rank could only be replaced. Here Python tries whether somebody listens. torch then connects,
for some seconds at a time, since a server may speak another language. A frame of `until_there` or `serve` says for
which server a rank waits (`deadlock.on_rank.position`).
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

from nbddp.deadlock.on_rank import child_waits

AT_ONCE = timedelta(seconds=2)  # that torch tries to connect without hearing Stop
USUAL = timedelta(minutes=5)  # torch's default
FIRST, MOST = 0.01, 0.5  # seconds between two tries, the first and the longest
UNKNOWN, SILENT = "an unknown host name", "where no process answers"
OURSELVES = "127.0.0.1"
PARAMETERS = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant",
              "master_listen_fd", "use_libuv")  # fmt: skip
INHERITED = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun's word that the launcher serves
ADVICE = (
    f"{INHERITED}=True is inherited by started processes: each of them expects a store of the launcher at its "
    f"MASTER_PORT. Keep the launcher's MASTER_PORT, or set {INHERITED}=False in them"
)
Given = dict[str, Any]  # arguments of a call of torch's, as a program gives them
SERVING: list[str] = []  # addresses of servers that wait for their clients: they ask themselves, over a socket

_pools_port: int | None = None  # MASTER_PORT, as programs are given it


def make(original: Callable[..., None], store: Any, args: tuple[Any, ...], kwargs: Given, known: bool) -> None:
    """`original(store, *args, **kwargs)` of a TCPStore. known: its server is known to be there."""
    given = {**dict(zip(PARAMETERS, args, strict=False)), **kwargs}
    host, port, limit = given.get("host_name"), given.get("port"), given.get("timeout", USUAL)
    whole = len(args) <= len(PARAMETERS) and isinstance(limit, timedelta)
    if known or not whole or not isinstance(host, str) or not isinstance(port, int):
        original(store, *args, **kwargs)
    elif given.get("is_master"):
        serve(original, store, given, address(host, port))
    else:
        join(original, store, given, monotonic() + limit.total_seconds())


def address(host: str, port: int) -> str:
    """As the program has it; the pool's own port it has not chosen."""
    return host if port == _pools_port else f"{host}:{port}"


def programs_have(port: int | None) -> None:
    """The MASTER_PORT of programs from here on."""
    global _pools_port
    _pools_port = port


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


def serve(original: Callable[..., None], store: Any, given: Given, where: str) -> None:
    """A server's own client needs no name for it, which may be wrong."""
    host = given["host_name"]
    local = is_local(host)
    SERVING.append(where)
    try:
        with child_waits.told(f"waiting for others to connect to its store at {where}"):
            original(store, **given if local else {**given, "host_name": OURSELVES})
    except RuntimeError as e:
        if local:
            raise
        raise type(e)(
            f"a store for {where} cannot start here, and {host} is not an address of this machine: {e}"
        ) from e
    finally:
        SERVING.remove(where)


def join(original: Callable[..., None], store: Any, given: Given, until: float) -> None:
    limit = given.get("timeout", USUAL)
    until_there(given["host_name"], given["port"], until)
    while True:
        try:
            original(store, **{**given, "timeout": min(limit, AT_ONCE)})
        except RuntimeError as e:
            if monotonic() < until:
                until_there(given["host_name"], given["port"], until)
                continue
            this_time, asked = (f"{t.total_seconds() * 1000:.0f}ms" for t in (min(limit, AT_ONCE), limit))
            raise type(e)(str(e).replace(this_time, asked)) from None
        if limit > AT_ONCE:
            store.set_timeout(limit)
        return


def until_there(host: str, port: int, until: float) -> None:
    """Returns when somebody listens, or when it is too late for that (`monotonic`)."""
    pause, why = FIRST, _lacks(host, port)
    if not why:
        return
    with child_waits.told(f"connecting to a store at {address(host, port)}, {why}", _advice()):
        while why and monotonic() < until:
            sleep(pause)
            pause, why = min(pause * 2, MOST), _lacks(host, port)


def _advice() -> str:
    return ADVICE if os.environ.get(INHERITED) == "True" else ""


def _lacks(host: str, port: int) -> str:
    """Why nobody can connect; empty if somebody listens."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return UNKNOWN
    try:
        socket.create_connection((host, port), timeout=AT_ONCE.total_seconds()).close()
    except OSError:
        return SILENT
    return ""
