"""A copy of a run's text that outlives the process.

A message of a process that is killed may never leave it. So what is written to stdout and stderr
during a run is also written to a file next to the worker's log, which the kernel of the operating system keeps;
when a rank has died, the client takes from it what has not come (`run.spmd`).

What C++ writes to the descriptors lies in a pipe first, until a thread of this process has read it; a process
that aborts has no time for that. So the agent is asked to hold the pipe's read end too, and the thread
(`ipykernel_seams.watch_pipes`) leaves new text there for a few milliseconds: what was said just before the end is
still in the pipe.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from nbddp.agent.lines import encode
from nbddp.worker import ipykernel_seams

STREAMS = ("stdout", "stderr")


def path(log: str, stream: str) -> str:
    """Where the copy of a stream is, for a worker with this log."""
    return f"{log}.{stream}"


class Kept:
    """The two copies; one per worker. Each holds the text of the current run alone."""

    def __init__(self, log: str):
        self._log = log
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC
        self._files = {s: os.open(path(log, s), flags, 0o600) for s in STREAMS}
        for stream in STREAMS:
            out: Any = getattr(sys, stream)
            out.write = self._copying(out.write, self._files[stream])

    def have_pipes_held(self, agent: str) -> None:
        """Ask the agent at this socket to keep what is left in the pipes of captured descriptors."""
        found = {s: ipykernel_seams.captured_pipe(getattr(sys, s)) for s in STREAMS}
        pipes = [[fd, path(self._log, s)] for s, fd in found.items() if fd is not None]
        if not pipes or not os.path.isdir("/proc/self/fd"):
            return
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(agent)
            connection.sendall(encode({"op": "hold", "pid": os.getpid(), "pipes": pipes, "id": 0}))
            connection.recv(1)  # done

    def begin(self) -> None:
        """A run begins: nothing has been written in it."""
        for file in self._files.values():
            os.ftruncate(file, 0)

    def _copying(self, write: Callable[[str], Any], file: int) -> Callable[[str], Any]:
        def both(text: str) -> Any:
            if isinstance(text, str):
                os.write(file, text.encode("utf-8", "replace"))
            return write(text)

        return both
