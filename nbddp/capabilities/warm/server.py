"""A warm process that has outlived its owner, and waits for the next one.

An agent's owner has gone, and everything that it started has ended. Then a fresh copy of its process (`go_on`) waits in
`<runtime>/warm/<id>/` for as long as it was asked to. It holds nothing but its imports. It answers who has the same
user id, whichever comes first, and becomes that one's agent; before that it looks whether what it has imported is still
what is on disk. The other end is `capabilities.warm.client`.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nbddp.agent import children, runtime_dir
from nbddp.agent.process_id import ProcessId, peer
from nbddp.capabilities.warm import fingerprint
from nbddp.compat import system
from nbddp.errors import AgentFailed
from nbddp.protocol.codec import LineBuffer, Message, encode

FOLDER, RECORD = "warm", "warm.json"
PATIENCE = 1.0  # seconds for a client to say what it wants
LONGEST = 1 << 22  # bytes of what it says; an environment may be large
LOOK_EVERY = 5.0  # seconds; `select` does not count what a machine sleeps


@dataclass
class NewOwner:
    """Who has taken the process, and what it is to become: the agent of the pool in `home`."""

    pid: int
    home: Path
    env: dict[str, str]
    cwd: str
    connection: socket.socket

    def enter(self) -> int:
        """Have this owner's log, environment and folder; the descriptor on which to talk to it."""
        log = os.open(self.home / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.connection.settimeout(None)
        for standard in (1, 2):
            os.dup2(log, standard)
        os.close(log)
        os.environ.clear()
        os.environ.update(self.env)
        os.chdir(self.cwd)
        return self.connection.detach()


class EndedUnused(Exception):
    """Nobody came in time, or a message ended it."""


def why_not() -> str:
    """Empty if this process can be kept, else the reason."""
    if not system.is_linux():
        return f"no process can be kept warm on {system.name()}, where each worker imports torch itself"
    if not hasattr(os, "pidfd_open"):
        return "this Python lacks os.pidfd_open, which reports the end of a process"
    return children.why_not_fork()


def boot_time() -> float:
    """Seconds since the machine's start, also those in which it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def folder() -> Path:
    """Where those who wait are found. Raises AgentFailed if it is not the user's own."""
    return runtime_dir.private(runtime_dir.runtime() / FOLDER)


def go_on() -> None:
    """Return in a fresh copy of this process, which nobody is the parent of; the old one ends here. From here on
    SIGTERM raises Ended."""
    signal.signal(signal.SIGTERM, _end)
    signal.set_wakeup_fd(-1)
    if os.fork():
        os._exit(0)
    os.setsid()
    children.adopt_orphans()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    sys.stdout.flush()  # what the old owner did not read is not for the next one
    sys.stderr.flush()
    os.chdir("/")


def wait(seconds: float, imports: fingerprint.Imports, inherited: fingerprint.Facts) -> NewOwner:
    """Wait for an owner. Raises Ended.

    inherited: what this process began with, for those who look for one to take.
    """
    until = boot_time() + seconds
    imports.take()
    if imports.changed():
        raise EndedUnused
    with _listening() as (listener, place):
        log = os.open(place / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 2)
        os.close(log)
        _record(place, {"inherited": inherited, "until": until, "own": fingerprint.own_files()})
        while (left := until - boot_time()) > 0:
            if select.select([listener], [], [], min(left, LOOK_EVERY))[0]:
                connection = listener.accept()[0]
                owner = _heard(connection, imports, place)
                if owner is not None:
                    return owner
                connection.close()
    raise EndedUnused


def _end(*_: Any) -> NoReturn:
    raise EndedUnused


@contextmanager
def _listening() -> Iterator[tuple[socket.socket, Path]]:
    """A socket in a folder of its own, which is gone afterwards."""
    place = runtime_dir.fresh(folder())
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(str(runtime_dir.socket_of(place)))
            listener.listen()
            yield listener, place
        finally:
            remove(place)


def remove(place: Path) -> None:
    """Remove the folder of a process that waits no more."""
    runtime_dir.check_name(place)
    runtime_dir.socket_of(place).unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)


def _record(place: Path, facts: Message) -> None:
    identity = ProcessId.of(os.getpid())
    fresh = place / f"{RECORD}.new"
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({**facts, "pid": identity.pid, "started": identity.started}, file)
    fresh.replace(place / RECORD)


def _heard(connection: socket.socket, imports: fingerprint.Imports, place: Path) -> NewOwner | None:
    """Who takes this process; None if this client does not. Raises Ended if a message ends it, or it is no longer
    usable."""
    connection.settimeout(PATIENCE)
    pid, uid = peer(connection)
    message = _asked(connection) if uid == os.getuid() else {}
    if not message:
        return None
    try:
        taking = {"take": True, "end": False}[message["op"]]
        pool = runtime_dir.named(message["pool"]) if taking else None
    except (KeyError, AgentFailed):  # no question of `capabilities.warm.client`'s
        return None
    stale = imports.changed() if taking else ""
    if pool is None or stale:
        remove(place)
        _answer(connection, {"stale": stale})
        raise EndedUnused
    remove(place)  # it is nobody else's from here on
    if not _answer(connection, {"taken": True}):
        raise EndedUnused
    return NewOwner(pid, pool, message["env"], message["cwd"], connection)


def _asked(connection: socket.socket) -> Message:
    """The client's one message; empty if none came in time."""
    lines, length = LineBuffer(), 0
    with suppress(OSError, ValueError):
        while chunk := connection.recv(65536):
            for message in lines.feed(chunk):
                return message
            length += len(chunk)
            if length > LONGEST:
                break
    return {}


def _answer(connection: socket.socket, message: Message) -> bool:
    try:
        connection.sendall(encode(message))
    except OSError:
        return False
    return True
