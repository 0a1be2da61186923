"""Connections to other hosts end when the host does not answer: a cut cable closes none.

The operating system asks on a connection where nothing is on its way (SO_KEEPALIVE). What is on its way it sends again
for a quarter of an hour, unless TCP_USER_TIMEOUT sets an earlier limit; since Linux 5.11 it then also gives up a side
that answers that it has no room. So use it for connections whose other side always reads.
"""

from __future__ import annotations

import socket
from typing import Any

IDLE, EVERY, TIMES = 2, 1, 4  # seconds, seconds, questions: 6 s until a silent host is given up
GIVEN_UP = IDLE + EVERY * TIMES  # seconds
# times as long for what must outlast the owner's own patience with a host (`capabilities.hosts.remote_client.SILENT`)
SLOWER = 2


def keep_alive(connection: socket.socket) -> None:
    """Let the operating system ask whether the other side lives."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE), ("TCP_KEEPINTVL", EVERY), ("TCP_KEEPCNT", TIMES)):
        if hasattr(socket, name):  # macOS has other names before Python 3.10
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def give_up_silent(connection: socket.socket) -> None:
    """The same, and have what is on its way be given up, too."""
    keep_alive(connection)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GIVEN_UP * 1000)


def keep_context_alive(context: Any) -> None:
    """As `keep_alive`, for all sockets that a context of zmq's makes from now on. Nobody is hurried: what zmq has sent
    is lost with the connection, and a host may be silent for less than the owner bears."""
    import zmq

    for option, value in (
        (zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, IDLE * SLOWER), (zmq.TCP_KEEPALIVE_INTVL, EVERY * SLOWER),
        (zmq.TCP_KEEPALIVE_CNT, TIMES),
    ):  # fmt: skip
        context.setsockopt(option, value)
