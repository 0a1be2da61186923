"""A process that holds the stores in which ranks meet, one fresh store per run.

torchrun keeps its store outside the workers (TORCHELASTIC_USE_AGENT_STORE), so that no
worker's death takes it along; so do we. It is a process of its own because a TCPStore
starts a thread, and the agent must stay single-threaded to fork. The store listens on
a socket made here, on the loopback address alone and on a port of the kernel's choice.
Where torch's libuv server refuses such a socket, its older server is used.
"""

from __future__ import annotations

import functools
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
    return _serve(libuv=libuv_takes_listener())


@functools.cache
def libuv_takes_listener() -> bool:
    """Whether torch's libuv server accepts a listening socket. Tried once per process: up to torch 2.7 it refuses."""
    try:
        _serve(libuv=True)
    except RuntimeError:  # NotImplementedError is one; so is what a torch without libuv raises
        return False
    return True


def _serve(libuv: bool) -> tuple[Any, int]:
    from torch.distributed import TCPStore

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((HOST, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        fd = os.dup(listener.fileno())
    try:
        store = TCPStore(HOST, port, is_master=True, wait_for_workers=False, use_libuv=libuv, master_listen_fd=fd)
    except RuntimeError:
        os.close(fd)  # a server that was refused has not taken it
        raise
    return store, port
