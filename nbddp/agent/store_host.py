"""A process that holds the stores in which ranks meet, one fresh store per run.

torchrun keeps its store outside the workers (TORCHELASTIC_USE_AGENT_STORE), so that no
worker's death takes it along; so do we. It is a process of its own because a TCPStore
starts a thread, and the agent must stay single-threaded to fork. The store listens on
a socket made here, on the loopback address alone and on a port of the kernel's choice.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from nbddp.agent.lines import LineBuffer, encode

HOST = "127.0.0.1"


def main(request: dict[str, Any]) -> int:
    """Serve open and close requests on the socket `request["channel"]` until it ends."""
    channel = socket.socket(fileno=request["channel"])
    stores: dict[int, Any] = {}
    lines = LineBuffer()
    while chunk := channel.recv(65536):
        for message in lines.feed(chunk):
            if message["op"] == "close":
                for key in message["stores"]:
                    stores.pop(key, None)
                continue
            answer = {"store": message["store"]}
            try:
                stores[message["store"]], answer["port"] = open_store()
            except Exception as e:
                answer["error"] = f"{type(e).__name__}: {e}"
            channel.sendall(encode(answer))
    return 0


def open_store() -> tuple[Any, int]:
    """A TCPStore server on a fresh loopback port, and that port."""
    from torch.distributed import TCPStore

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((HOST, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    fd = os.dup(listener.fileno())
    listener.close()
    store = TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    return store, port
