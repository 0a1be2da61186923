"""An attacker on the same machine: `python -m tests.pool.intruder UID` becomes that user and does what it is told.

It reads lines of JSON, an attack's name and a port, and answers each with a line: what came of it, or why nothing did,
and the seconds that it took. If UID is the user's own, it is a process that is none of the pool's.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests import places

ROOT = places.ROOT
PATIENCE = 1.0  # seconds for a connection
NUMBERS = 8  # gloo's pairs of a new group have the numbers 0, 1, …
held: list[socket.socket] = []


class Refused(Exception):
    """The attack did not come through."""


def client(port: int) -> Any:
    import torch.distributed as dist

    try:
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE))
    except RuntimeError as e:
        raise Refused(f"{type(e).__name__}: {str(e).splitlines()[0]}") from None


def lists_keys(port: int) -> Any:
    """Of what the ranks have put into their store."""
    store = client(port)
    return [str(k) for k in store.list_keys()] if hasattr(store, "list_keys") else store.num_keys()


def adds_a_key(port: int) -> Any:
    client(port).set("intruder", "was here")
    return True


def joins_as_rank_0(port: int) -> Any:
    """Of runs to come: what the other ranks gather from it, they unpickle."""
    import torch.distributed as dist

    store = client(port)
    for run in range(1, 100):
        dist.PrefixStore(f"nbddp/run{run}/port{port}/init1/default_pg/0//cpu//0/0", store).set("0", "an address")
    return True


def floods(port: int) -> Any:
    """Connect again and again and keep all; how many the other side keeps as well."""
    mine = []
    for _ in range(1500):
        with contextlib.suppress(OSError):
            mine.append(connected(port))
    return kept_open(mine) or refused("all were closed")


def begins_a_message(port: int) -> Any:
    """And never ends it: half of them say two bytes, the others nothing."""
    mine = [connected(port) for _ in range(10)]
    for one in mine[::2]:
        with contextlib.suppress(OSError):
            one.sendall(b"\0\0")
    return kept_open(mine) or refused("all were closed")


def goes_round(port: int) -> Any:
    """To all other addresses of this machine at which anybody listens at that port."""
    reached = []
    for host in others_at(port):
        with contextlib.suppress(OSError):
            connected(port, host).close()
            reached.append(host)
    return reached or refused("nobody answers")


def takes_a_place(port: int) -> Any:
    """Among the ranks of a group that is being made: say each number that gloo may be waiting for, and stay."""
    came = 0
    for number in range(NUMBERS):
        try:
            one = connected(port)
        except OSError:
            break
        one.sendall(struct.pack("=q", number))
        held.append(one)
        came += 1
    return came or refused("nobody answers")


def hears(port: int) -> Any:
    """What has come on the connections that were kept so far; how many bytes."""
    heard = 0
    for one in held:
        one.setblocking(False)
        with contextlib.suppress(OSError):
            heard += len(one.recv(1 << 20))
        one.close()
    held.clear()
    return heard


def knocks(port: int) -> Any:
    """At the door of a group that is being made: say numbers that no rank has, less than a number, and nothing."""
    for words in (b"\xff" * 8, b"GET / HTTP/1.0\r\n\r\n", b"\0\0", b""):
        held.append(connected(port))
        held[-1].sendall(words)
    return len(held)


AT_THE_STORE = (lists_keys, adds_a_key, joins_as_rank_0, floods, begins_a_message, goes_round)
AT_A_GROUP = (takes_a_place, knocks, hears)
ATTACKS: dict[str, Callable[[int], Any]] = {f.__name__: f for f in (*AT_THE_STORE, *AT_A_GROUP)}


def refused(why: str) -> Any:
    raise Refused(why)


def connected(port: int, host: str = "127.0.0.1") -> socket.socket:
    one = socket.socket()
    one.settimeout(PATIENCE)
    one.connect((host, port))
    return one


def kept_open(some: list[socket.socket], patience: float = 5.0) -> int:
    """How many of these the other side has not closed by then."""
    end = time.monotonic() + patience
    while (left := sum(map(is_open, some))) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def is_open(one: socket.socket) -> bool:
    try:
        return one.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def others_at(port: int) -> set[str]:
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state = line.split()[:4]
        host, at = local.split(":")
        if state == "0A" and int(at, 16) == port:
            found.add(socket.inet_ntoa(struct.pack("=I", int(host, 16))))
    return found - {"127.0.0.1"}


def become(uid: int) -> None:
    if uid != os.getuid():
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def main() -> None:
    import torch.distributed as dist

    dist.PrefixStore("", dist.HashStore()), "x".encode("idna")  # what is imported late another user may not read
    become(int(sys.argv[1]))
    print(json.dumps({"uid": os.getuid()}), flush=True)
    for line in sys.stdin:
        what, port = json.loads(line)
        said, began = {"came": None, "refused": ""}, time.monotonic()
        try:
            said["came"] = ATTACKS[what](port)
        except (Refused, OSError) as e:
            said["refused"] = str(e)
        print(json.dumps({**said, "seconds": time.monotonic() - began}), flush=True)


class Intruder:
    """Such a process, as a test sees it."""

    def __init__(self, uid: int):
        self.uid = uid
        command = [sys.executable, "-m", "tests.pool.intruder", str(uid)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def attacks(self, what: str, port: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, port]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    main()
