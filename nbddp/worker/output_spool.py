"""A copy of a run's text that outlives the process.

A message of a process that is killed may never leave it. So what is written to stdout and stderr
during a run is also written to files next to each other, which the kernel of the operating system keeps;
when a rank has died, the client takes from them what has not come (`execution.execution`). Only what may be on its way
is of use, so of a long output the newest HALF to two HALFs stay: a file that is full takes the number of its first
character into its name, and the one before it goes.

What C++ writes to the descriptors lies in a pipe first, until a thread of this process has read it; a process
that aborts has no time for that. So the agent is asked to hold the pipe's read end too, and the thread
(`worker.fd_capture`) leaves new text there for a few milliseconds: what was said just before the end is
still in the pipe.
"""

from __future__ import annotations

import os
import socket

from nbddp.agent.spool_files import STREAMS, older, path
from nbddp.protocol.jsonl import encode
from nbddp.worker.output import PrintedOutput

HALF = 4 << 20  # bytes
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC


class StreamCopy:
    """The copy of one stream. `why` says why the current run's is not whole."""

    def __init__(self, path: str):
        self.path, self.why = path, ""
        self._file = os.open(path, FLAGS, 0o600)
        self._start = self._characters = self._bytes = 0

    def begin(self) -> None:
        if self._start:
            for part in older(self.path):
                os.unlink(part)
        os.ftruncate(self._file, 0)
        self.why, self._start, self._characters, self._bytes = "", 0, 0, 0

    def write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        try:
            if self._bytes and self._bytes + len(data) > HALF:
                self._next()
            if not self.why:
                os.write(self._file, data)
        except OSError as e:  # a full disk: what is printed goes its usual way
            self.why = e.strerror or str(e)
        self._characters += len(text)
        self._bytes += len(data)

    def _next(self) -> None:
        before = older(self.path)
        os.rename(self.path, f"{self.path}.{self._start}")
        for part in before:
            os.unlink(part)
        fresh = os.open(self.path, FLAGS, 0o600)
        os.dup2(fresh, self._file, inheritable=False)
        os.close(fresh)
        self._start, self._characters, self._bytes = self._start + self._characters, 0, 0


class OutputSpool:
    """The two copies; one per worker. Each holds text of the current run alone."""

    def __init__(self, base: str, printed: PrintedOutput, agent: str):
        """agent: the socket of the agent that is asked to hold pipes."""
        self._base, self._printed, self._agent = base, printed, agent
        self._copies = {s: StreamCopy(path(base, s)) for s in STREAMS}
        printed.copies = {stream: copy.write for stream, copy in self._copies.items()}

    def have_pipes_held(self) -> None:
        """Ask the agent to keep what is left in the pipes of captured descriptors."""
        pipes = {path(self._base, s): fd for s, fd in self._printed.captured.read_ends().items()}
        if not pipes:
            return
        asked = encode({"op": "hold", "pid": os.getpid(), "files": list(pipes), "id": 0})
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._agent)
            socket.send_fds(connection, [asked], list(pipes.values()))
            connection.recv(1)  # done

    def begin(self) -> None:
        """A run begins: nothing has been written in it."""
        for copy in self._copies.values():
            copy.begin()

    def unsaved(self) -> tuple[str, str] | None:
        """Why text of this run could not be kept, and where; None if it could."""
        return next(((copy.why, copy.path) for copy in self._copies.values() if copy.why), None)
