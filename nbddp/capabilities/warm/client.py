"""Taking a warm process that waits (`capabilities.warm.server`): found, compared, asked.

`WarmProcesses` is the table's `AgentSource`. One is taken only if a child of this process would have begun as it did.
It must have the same environment, interpreter, folder, rights and limits (`fingerprint.inherited`), and the same files
of nbddp; so the code that it runs is ours. It looks itself whether the rest of what it has imported is unchanged. What
nobody can use any more is ended.
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
from nbddp.agent.client import AgentClient, own_env
from nbddp.agent.hardware import memory_of
from nbddp.agent.process_id import ProcessId, peer
from nbddp.capabilities.warm import fingerprint, server
from nbddp.compat import system
from nbddp.compat.system import existing_working_dir
from nbddp.launch.units import lasts
from nbddp.protocol.codec import LineBuffer, Message, encode

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

    def describe(self, prog: str) -> str:
        folder = self.facts["inherited"]["folder"]
        process = self.identity.process()
        memory = f"{memory_of(process) / 2**20:.0f} MiB" if process is not None else "–"
        return (
            f"warm process {self.name} · waits for a kernel in {folder} · {lasts(self.left)} left · {memory}; "
            f"{prog} stop {self.name} ends it"
        )

    def connect(self) -> socket.socket | None:
        """A connection to that very process, as the operating system has it; None if it does not listen."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE)
        try:
            connection.connect(str(runtime_dir.socket_of(self.place)))
            if peer(connection) == (self.facts["pid"], os.getuid()):
                return connection
        except OSError:
            pass
        connection.close()
        return None

    def end(self) -> str:
        """Have it end, and wait until it has."""
        connection = self.connect()
        if connection is not None:
            with connection, suppress(OSError):
                connection.sendall(encode({"op": "end"}))
                while connection.recv(4096):  # the connection ends with the process
                    pass
            end = time.monotonic() + PATIENCE
            while self.identity.alive() and time.monotonic() < end:
                time.sleep(0.002)
        return f"warm process {self.name} ended"


@dataclass
class AskedProcess:
    """A process that has been asked to be the agent of the pool in `home`, and is looking at its files."""

    home: Path
    connection: socket.socket

    def take(self, env: Mapping[str, str]) -> AgentClient | None:
        connection = self.answer()
        if connection is None:
            return None
        agent = AgentClient.at(connection, self.home, env)
        agent.outlives = True
        return agent

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


class WarmProcesses:
    """An `AgentSource`."""

    def ask(self, env: Mapping[str, str]) -> AskedProcess | None:
        found = waiting()
        inherited = self.facts(env) if found else {}
        for one in found:
            if one.facts["own"] != fingerprint.own_files():
                one.end()
                continue
            connection = None if fingerprint.differing(one.facts["inherited"], inherited) else one.connect()
            if connection is None:
                continue
            asked = AskedProcess(runtime_dir.new_home(), connection)
            message = {"op": "take", "pool": asked.home.name, "env": own_env(env), "cwd": existing_working_dir()}
            with suppress(OSError):
                connection.sendall(encode(message))
                return asked
            asked.answer()
        return None

    def facts(self, env: Mapping[str, str]) -> fingerprint.Facts:
        return fingerprint.inherited(env) if system.is_linux() else {}

    def keep(self, agent: AgentClient, seconds: float) -> None:
        agent.outlives = seconds > 0
        agent.tell("keep", seconds=seconds, inherited=agent.facts)

    def why_not(self, agent: AgentClient) -> str:
        return str(agent.warm.more.get("unkept", "") if agent.warm is not None else "")
