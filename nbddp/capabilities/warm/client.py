"""Taking a warm process that waits (`capabilities.warm.server`): found, compared, asked.

One is taken only if a child of this process would have begun as it did: the same environment, interpreter, folder,
rights and limits (`fingerprint.inherited`), and the same files of nbddp; so the code that it runs is ours. It looks
itself whether the rest of what it has imported is unchanged. What nobody can use any more is ended.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbddp.agent import runtime_dir
from nbddp.agent.process_id import ProcessId
from nbddp.capabilities.warm import fingerprint, server
from nbddp.compat import system
from nbddp.compat.working_dir import here
from nbddp.launch.units import lasts
from nbddp.protocol.jsonl import LineBuffer, Message, encode

PATIENCE = 5.0  # seconds for a process that waits to say whether it can be taken


@dataclass(frozen=True)
class WaitingProcess:
    """A process that waits: its folder, and what it has written there."""

    place: Path
    facts: Message

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def identity(self) -> ProcessId:
        return ProcessId(self.facts["pid"], self.facts["started"])

    @property
    def left(self) -> float:
        """Seconds until it ends by itself."""
        return max(0.0, float(self.facts["until"]) - server.boot_time())

    def words(self, memory: str) -> str:
        folder = self.facts["inherited"]["folder"]
        return f"warm process {self.name} · waits for a kernel in {folder} · {lasts(self.left)} left · {memory}"

    def connect(self) -> socket.socket | None:
        """A connection to that very process, as the kernel has it; None if it does not listen."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE)
        try:
            connection.connect(str(runtime_dir.socket_of(self.place)))
            if server.peer(connection) == (self.facts["pid"], os.getuid()):
                return connection
        except OSError:
            pass
        connection.close()
        return None

    def end(self) -> None:
        """Have it end, and wait until it has."""
        connection = self.connect()
        if connection is None:
            return
        with connection, suppress(OSError):
            connection.sendall(encode({"op": "end"}))
            while connection.recv(4096):  # the connection ends with the process
                pass
        end = time.monotonic() + PATIENCE
        while self.identity.alive() and time.monotonic() < end:
            time.sleep(0.002)


@dataclass
class AskedProcess:
    """A process that has been asked to be the agent of the pool in `home`, and is looking at its files."""

    home: Path
    connection: socket.socket

    def answer(self) -> socket.socket | None:
        """The connection, if the process is ours now; None if it was no good, or somebody else's."""
        lines = LineBuffer()
        with suppress(OSError):
            while chunk := self.connection.recv(1):  # what follows is the agent's
                for message in lines.feed(chunk):
                    if message.get("taken"):
                        self.connection.settimeout(None)
                        return self.connection
        self.connection.close()
        runtime_dir.remove(self.home, [])
        return None


def waiting() -> list[WaitingProcess]:
    """The processes of this user that wait; what is left of others is swept."""
    place = runtime_dir.runtime() / server.FOLDER
    if not system.is_linux() or not place.exists():
        return []
    found = []
    for path in sorted(server.folder().iterdir()):
        facts = _read(path)
        if facts is None:
            continue
        one = WaitingProcess(path, facts)
        if one.identity.alive():
            found.append(one)
        else:
            server.remove(path)
    return found


def _read(path: Path) -> Message | None:
    """What a process has written of itself; None if it has not yet, or somebody else's folder is there."""
    try:
        facts = path.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
            return None
        with os.fdopen(os.open(path / server.RECORD, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            found: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return None
    return found if {"pid", "started", "until", "own", "inherited"} <= set(found) else None


def ask(inherited: fingerprint.Facts, env: Mapping[str, str]) -> AskedProcess | None:
    """Ask a process that can be taken to be the agent of a new pool; returns at once. None if there is none.

    inherited: as `fingerprint.inherited` gives it here. env: the agent's environment.
    """
    for one in waiting():
        if one.facts["own"] != fingerprint.own_files():
            one.end()
            continue
        connection = None if fingerprint.differing(one.facts["inherited"], inherited) else one.connect()
        if connection is None:
            continue
        asked = AskedProcess(runtime_dir.new_home(), connection)
        with suppress(OSError):
            connection.sendall(encode({"op": "take", "pool": asked.home.name, "env": dict(env), "cwd": here()}))
            return asked
        asked.answer()
    return None
