"""The node agent of another host: as `agent.main`, with an owner at the far end of a connection.

`python -m nbddp.agent.reached` speaks on stdin and stdout, through ssh or whatever has started it. The shell's start-up
files may have printed there before, so it begins with MARK on a line of its own; then its owner says in a line of JSON
in which environment and folder it is to warm up. It makes its own folder here, and tells where that is. Both sides say
every PING_EVERY seconds that they live, since a cut cable closes nothing: an agent that has not heard of its owner for
PATIENCE seconds ends, with all that it has started.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from nbddp import __version__
from nbddp.agent import children, copies, hardware, home
from nbddp.agent.identity import Identity
from nbddp.agent.lines import MARK, Message
from nbddp.agent.main import Agent, Child, Peer

PING_EVERY = 2.0  # seconds
PATIENCE = 20.0  # seconds without a word from the owner; a kernel that a debugger stops is silent, too
FILES = 0o600


class ReachedAgent(Agent):
    """An agent of an owner elsewhere. `said`: what the owner said first."""

    def __init__(self, folder: Path, out: int, said: Message):
        super().__init__(folder)
        self._out = out
        self._wanted_cwd = str(said["cwd"])
        self._patience = PATIENCE
        self._heard = self._pinged = time.monotonic()
        self._kept: dict[int, str] = {}  # pid → where a worker's copies are
        self._written_at: dict[int, str] = {}  # rank → where its last worker's are
        self._log_from: dict[int, int] = {}  # pid → the byte of its log at which its last run began

    def hello(self) -> Message:
        """What the owner needs to know of this host before anything is warm."""
        return {
            **super().hello(),
            "home": str(self.home), "bulk": str(home.bulk(self.home)), "cwd": os.getcwd(), "host": socket.gethostname(),
            "reached": reached_at(), "versions": versions(),
            "moved": "" if self._wanted_cwd in ("", os.getcwd()) else self._wanted_cwd,
        }  # fmt: skip

    def own_descriptors(self) -> set[int]:
        return super().own_descriptors() | {self._out}

    def watch_owner(self) -> None:
        """The end of stdin is the end of the owner; nobody here is its parent."""
        self.peers.append(self.owner)
        self.selector.register(0, 1, self._read_owner)  # selectors.EVENT_READ

    def _write_owner(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._out, data) :]

    def _read_owner(self) -> None:
        self._heard = time.monotonic()
        super()._read_owner()

    def _warm_up(self) -> None:
        super()._warm_up()
        self._heard = time.monotonic()  # what came meanwhile is still to be read

    def each_second(self) -> None:
        super().each_second()
        now = time.monotonic()
        if now - self._heard > self._patience:
            self.stop()
        if now - self._pinged >= PING_EVERY:
            self._pinged = now
            self.tell(self.owner, ev="ping")

    # -- requests ----------------------------------------------------------------------------------

    def _do_ping(self, peer: Peer, message: Message) -> None:
        """The owner lives: `_read_owner` has noted it."""

    def _do_put(self, peer: Peer, message: Message) -> Message:
        """Have a file of the pool here, which only its user may read; where it is."""
        path = self.home / Path(message["name"]).name
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILES), "w") as file:
            file.write(message["text"])
        return {"path": str(path)}

    def _do_route(self, peer: Peer, message: Message) -> Message:
        """This host's address on the way to `to`."""
        return {"address": address_towards(message["to"])}

    def _do_begin_logs(self, peer: Peer, message: Message) -> Message:
        """A run begins on these ranks."""
        workers = self._workers(message["ranks"])
        begun = copies.begun((child.log, self._kept[child.pid]) for child in workers)
        self._log_from |= zip((child.pid for child in workers), begun, strict=True)
        return {}

    def _do_written(self, peer: Peer, message: Message) -> Message:
        """What a rank wrote in its last run, by stream."""
        base = self._written_at.get(message["rank"])
        return {"written": copies.written(base) if base else dict.fromkeys(copies.STREAMS, (0, ""))}

    def _do_status(self, peer: Peer, message: Message) -> Message:
        """As an agent beside its owner, with the memory of each process, in bytes."""
        answer = super()._do_status(peer, message)
        for child in answer["children"]:
            process = Identity(child["pid"], child["started"]).process()
            child["memory"] = hardware.memory_of(process) if process is not None else 0
        return answer

    def _do_start(self, peer: Peer, message: Message) -> Message:
        """As an agent beside its owner, in this host's environment with what the owner adds."""
        here = {"env": {**os.environ, **message["env"]}, "cwd": os.getcwd(), "path": list(sys.path)}
        if "profile_dir" in message:
            os.makedirs(message["profile_dir"], mode=0o700, exist_ok=True)
        started = super()._do_start(peer, {**message, **here})
        if "kept" in message:
            self._kept[started["pid"]] = self._written_at[message["rank"]] = message["kept"]
        return started

    def exit_facts(self, child: Child) -> Message:
        """What the process said last; its owner cannot read its files."""
        kept, start = self._kept.pop(child.pid, ""), self._log_from.pop(child.pid, 0)
        printed = copies.text(kept, "stderr")[1] if kept else ""
        return {"last_words": copies.last_words(child.log, start, printed)}

    def _workers(self, ranks: list[int]) -> list[Child]:
        return [c for c in self.children.values() if c.pid in self._kept and c.rank in ranks]

    REQUESTS: ClassVar[dict[str, Callable[[Any, Peer, Message], Message | None]]] = {
        **Agent.REQUESTS,
        "ping": _do_ping,
        "status": _do_status,
        "put": _do_put,
        "begin_logs": _do_begin_logs,
        "written": _do_written,
        "route": _do_route,
        "start": _do_start,
    }


def address_towards(to: str) -> str:
    """The address from which packets to a host go; nothing is sent. Raises OSError where there is no way."""
    family, kind, _, _, address = socket.getaddrinfo(to, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def versions() -> dict[str, str]:
    """What has to be the same on all hosts, as it is here, without importing it."""
    found = {"nbddp": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("torch", "ipyparallel"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def reached_at() -> str:
    """This host's address, as ssh's client has reached it; else that of its name."""
    there = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    return there[0] if there else socket.gethostbyname(socket.gethostname())


def first_line() -> Message:
    """What the owner says first; no byte beyond it is read."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("nobody said in which environment to begin")
        line += byte
    message: Message = json.loads(line)
    return message


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to the log
    os.set_inheritable(out, False)
    children.die_with_parent(os.getppid(), signal.SIGTERM)
    children.adopt_orphans()
    os.write(out, b"\n" + MARK + b"\n")
    said = first_line()
    os.environ.update({**home.private_caches(), **said["env"], "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})
    with suppress(OSError):  # the folder is told, and that it is another
        os.chdir(said["cwd"])
    home.running()  # sweeps what a killed agent left
    ReachedAgent(home.new_home(), out, said).serve()
    os._exit(0)  # torch's own clean-up at exit takes longer than everything else


if __name__ == "__main__":
    main()
