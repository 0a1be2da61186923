"""The process for which salloc holds nodes: as long as it runs, they are the pool's.

`salloc … python -m nbddp.capabilities.slurm.holder PID STARTED` says on stdout, after MARK, which job it holds and on
which nodes. It ends, and salloc gives the nodes back, when its owner has ended: the process PID, or the other end of
its stdin. Told to `keep`, it then waits for so long for another owner of the same user, at a socket in
`<runtime>/jobs/<job>/`. `capabilities.slurm.allocation` is the other end. If salloc itself is killed, nobody would give
the nodes back: then it cancels the job.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from nbddp.agent import runtime_dir
from nbddp.agent.process_id import ProcessId, peer
from nbddp.capabilities.slurm import commands
from nbddp.protocol.codec import MARK, LineBuffer, Message, encode, log_unknown

FOLDER, RECORD = "jobs", "job.json"
LOOK_EVERY = 2.0  # seconds between two looks whether the owner lives, where Linux does not report it
LONGEST = 1 << 16  # bytes of a message


class NotNeeded(Exception):
    """Nobody needs the nodes any more."""


class Holder:
    """What holds one job."""

    def __init__(self, job: int, nodes: str):
        self.job, self.nodes = job, nodes
        self.keep, self.what = 0.0, dict[str, Any]()  # seconds after the owner; what the owner has said of the pool
        self.parent = os.getppid()

    def serve(self, owner: ProcessId) -> None:
        """Until nobody needs the nodes."""
        read = 0
        with suppress(NotNeeded):
            while True:
                self._serve(read, owner)
                if not self.keep:
                    raise NotNeeded
                with self._door() as door:
                    read, owner = self._wait(door)

    def _serve(self, read: int, owner: ProcessId) -> None:
        """As long as this owner lives. Raises Over if it ends the job."""
        lines = LineBuffer()
        while owner.alive():
            if not self._ready([read]):
                continue
            chunk = os.read(read, LONGEST)
            if not chunk:
                return
            for message in lines.feed(chunk):
                if message.get("op") == "end":
                    raise NotNeeded
                if message.get("op") == "keep":
                    self.keep, self.what = float(message["seconds"]), message["what"]
                else:
                    log_unknown(encode(message))

    def _ready(self, fds: list[Any], seconds: float = LOOK_EVERY) -> list[Any]:
        """Which of these can be read now. Raises Over if salloc has ended."""
        found = select.select(fds, [], [], seconds)[0]
        if os.getppid() != self.parent:
            subprocess.run(["scancel", str(self.job)], check=False, env=commands.outside(os.environ))
            raise NotNeeded
        return found

    @contextmanager
    def _door(self) -> Iterator[socket.socket]:
        """Where another owner comes."""
        place = folder() / str(self.job)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(mode=0o700)
        try:
            with socket.socket(socket.AF_UNIX) as door:
                door.bind(str(runtime_dir.socket_of(place)))
                door.listen()
                own = ProcessId.of(os.getpid())
                facts = {"pid": own.pid, "started": own.started, "job": self.job, "nodes": self.nodes,
                         "until": time.time() + self.keep, "what": self.what}  # fmt: skip
                (place / f"{RECORD}.new").write_text(json.dumps(facts))
                (place / f"{RECORD}.new").replace(place / RECORD)
                yield door
        finally:
            runtime_dir.socket_of(place).unlink(missing_ok=True)
            shutil.rmtree(place, ignore_errors=True)

    def _wait(self, door: socket.socket) -> tuple[int, ProcessId]:
        """The next owner, and the descriptor on which it speaks. Raises Over if none comes in time."""
        end = time.monotonic() + self.keep
        while time.monotonic() < end:
            if not self._ready([door], min(LOOK_EVERY, max(0.0, end - time.monotonic()))):
                continue
            connection, _ = door.accept()
            pid, uid = peer(connection)
            if uid != os.getuid():
                connection.close()
                continue
            connection.settimeout(LOOK_EVERY)
            said = _first(connection)
            if said.get("op") == "end":
                raise NotNeeded
            if said.get("op") == "take":
                with suppress(OSError, psutil.Error):  # it has gone again
                    taker = ProcessId.of(pid)
                    connection.sendall(encode({"taken": self.job}))
                    connection.settimeout(None)
                    return connection.detach(), taker
            connection.close()
        raise NotNeeded


def _first(connection: socket.socket) -> Message:
    """A client's first message; empty if it has none that is read."""
    lines, found = LineBuffer(), list[Message]()
    with suppress(OSError, ValueError):
        while not found:
            chunk = connection.recv(LONGEST)
            if not chunk:
                break
            found += lines.feed(chunk)
    return found[0] if found else {}


def folder() -> Path:
    """Where holders that wait are found. Raises AgentFailed if it is not the user's own."""
    return runtime_dir.private(runtime_dir.runtime() / FOLDER)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = ProcessId(int(sys.argv[1]), float(sys.argv[2]))
    holder = Holder(int(os.environ["SLURM_JOB_ID"]), os.environ["SLURM_JOB_NODELIST"])
    said = encode({"job": holder.job, "nodes": holder.nodes})
    os.write(1, b"\n" + MARK + b"\n" + said)
    os.dup2(2, 1)  # nobody reads on
    holder.serve(owner)


if __name__ == "__main__":
    main()
