"""A copy of a run's text that survives the process.

A message of a process that is killed may never leave it. So what is written to stdout and stderr during a run is also
written to files (`copies`), which the operating system keeps. When a rank has died, the notebook gets
from its node's agent what has not come (`part`, `on_agent`).

What C++ writes to the descriptors lies in a pipe first, until a thread of this process has read it; a process that
aborts has no time for that. So the agent holds the pipe's read end too. The thread (`worker.output`) leaves new
text there for a few milliseconds, so text from just before the end is still in the pipe.
"""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

from nbddp.agent import runtime_dir
from nbddp.capabilities.spool.copies import StreamCopy
from nbddp.protocol.codec import Message, encode, parsed
from nbddp.worker.parts import RankWorker


def part(worker: RankWorker) -> OutputSpool | None:
    """None without an agent that takes a worker's word: nobody would ask for what is kept."""
    spool = OutputSpool(worker) if worker.log_path else None
    return spool if spool is not None and spool.copies else None


class OutputSpool:
    """The copies of one worker's streams. They hold text of the newest run alone."""

    def __init__(self, worker: RankWorker):
        self._worker, self._captured = worker, worker.printed.captured
        self._run = 0  # whose text is written
        self._agent = str(runtime_dir.socket_of(Path(worker.log_path).parent))
        base = self.have_pipes_held().get("base")
        streams = self._captured.DESCRIPTORS if base else ()
        self.copies = {stream: StreamCopy(f"{base}.{stream}", self._failed) for stream in streams}
        worker.printed.copies = {stream: functools.partial(self._write, stream) for stream in streams}
        if base:
            self._captured.moved.append(self.have_pipes_held)

    def have_pipes_held(self) -> Message:
        """Ask the agent to keep what is left in the pipes of captured descriptors when this process has ended."""
        pipes = self._captured.read_ends()
        asked = encode({"op": "hold", "pid": os.getpid(), "streams": list(pipes), "id": 0})
        with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rb") as answers:
            connection.connect(self._agent)
            if pipes:
                socket.send_fds(connection, [asked], list(pipes.values()))
            else:
                connection.sendall(asked)
            return parsed(answers.readline()) or {}

    def _write(self, stream: str, text: str) -> None:
        if self._worker.spec is not None:
            self._run = self._worker.spec.run
        self.copies[stream].write(self._run, text)

    def _failed(self, why: str, path: str) -> None:
        self._worker.outcome.unsaved = why, path
