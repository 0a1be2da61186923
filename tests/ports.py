"""TCP ports: one for programs that listen on a port they are told, and those that a process has."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from nbddp.agent.controller import quiet_ports

connections = psutil.Process.net_connections if psutil.version_info >= (6,) else psutil.Process.connections


def quiet_port(host: str = "127.0.0.1", count: int = 1) -> int:
    """The first of so many ports in a row that are free at an address, and that the system gives no connection."""
    claim, ports = quiet_ports(count, host)
    claim.close()
    return ports[0]


@contextmanager
def held_port() -> Iterator[int]:
    """A port of the loopback that is free, and stays free for who listens there with SO_REUSEADDR, as torch does.

    A port that is chosen, let go and bound later is taken by somebody's connection now and then; the system gives no
    connection a port on which a socket is bound.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
