"""A process that holds the stores in which ranks meet, one fresh store per run.

torchrun keeps its store outside the workers (TORCHELASTIC_USE_AGENT_STORE), so that no
worker's death takes it along; so do we. It is a process of its own because a TCPStore
starts a thread, and the agent must stay single-threaded to fork.

A store is open to any process of this machine, as torchrun's is, unless a row has a `guard`.
"""

from __future__ import annotations

import functools
import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from nbddp.agent import warning_filters
from nbddp.protocol.agent import OpenedStore, OpenStore
from nbddp.protocol.capability import guard_row, load
from nbddp.protocol.codec import LineBuffer, encode, from_json, to_json

HOST = "127.0.0.1"
BACKLOG = 1024
UNGUARDED = "any process on this machine can reach the ranks' store"


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
    """Serve open and close requests on the socket `request["channel"]` until it ends. The pool's agent is this
    process's parent; its owner is the process `request["owner"]`."""
    warning_filters.put_off()
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
            asked = from_json(OpenStore, message)
            try:
                found = stores[asked.store] = opened(asked, *pool)
                answer = to_json(OpenedStore(asked.store, found.port, found.unguarded, found.outside))
            except Exception as e:
                answer = {"store": asked.store, "error": f"{type(e).__name__}: {e}"}
            channel.sendall(encode(answer))
    return 0


def opened(asked: OpenStore, agent: int, owner: int) -> Served:
    """For the pool of an agent and its owner. Raises OSError."""
    guard = guard_row()
    if guard is not None:
        found: Served = load(guard.store)(asked, agent, owner)
        return found
    if asked.of is not None or asked.outside:
        raise OSError("nothing here leads ranks of several hosts to one store")
    return in_the_open(UNGUARDED)


# -- torch's server ------------------------------------------------------------------------------


def in_the_open(unguarded: str) -> Served:
    store, port = _serve(libuv_takes_listener())
    return Served(store, port, unguarded)


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
    listener = socket.create_server((HOST, 0), backlog=BACKLOG)
    port = int(listener.getsockname()[1])
    return served(listener, port, libuv), port


def served(listener: socket.socket, port: int, libuv: bool) -> Any:
    """torch's server at a listening socket, which is its own from here on."""
    from torch.distributed import TCPStore

    fd = listener.detach()
    try:
        return TCPStore(HOST, port, is_master=True, wait_for_workers=False, use_libuv=libuv, master_listen_fd=fd)
    except RuntimeError:
        os.close(fd)  # a server that was refused has not taken it
        raise
