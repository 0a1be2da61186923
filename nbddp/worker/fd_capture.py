"""Captures the text that C++, subprocesses and forked processes write to a worker's descriptors 1 and 2.

Each leads into a pipe, which a thread reads; whoever prints in Python reads it first (`take`), so what was written
before comes before.

New text is left in the pipe for a few milliseconds. If a process dies just then, whoever else holds the read ends can
still read its last output.
"""

from __future__ import annotations

import codecs
import ctypes
import functools
import os
import select
import threading
from collections.abc import Callable, Mapping

from nbddp.compat.clock import clock

LEAVE_SECONDS = 0.005
LARGEST = 1 << 16  # bytes: a pipe holds no more
LINE_BUFFERED, BUFFER = 1, 0  # setvbuf's _IOLBF, and its own size

Put = Callable[[str, str, "Pipe"], None]  # stream, text, where that was written to


class Pipe:
    """A pipe, and the stream as which its text appears."""

    def __init__(self, stream: str):
        self.stream = stream
        self.read, self.write = os.pipe()
        self.inode = os.fstat(self.read).st_ino
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def close_write(self) -> None:
        os.close(self.write)
        self.write = -1


class CapturedFds:
    """Descriptors of a worker as pipes. echo: stream → the descriptor where its own led before, to which the text goes
    too: the worker's log. `now`: the pipes into which they lead; `pipes`: all that are read, by their read ends.
    `lock`: held while text is taken. Makes a thread."""

    DESCRIPTORS = {"stdout": 1, "stderr": 2}

    def __init__(self, echo: Mapping[str, int], put: Put, waits: Callable[[float], bool]):
        """waits: whether text that comes at this time (time.monotonic()) is left in the pipe for a moment more."""
        self.lock = threading.RLock()
        self.moved: list[Callable[[], object]] = []  # called when the descriptors lead into other pipes
        self._echo, self._put, self._waits = echo, put, waits
        self.now = {stream: Pipe(stream) for stream in echo}
        self.pipes: dict[int, Pipe] = {}
        self._poll = select.poll()
        self._woken, self._wake = os.pipe()
        for stream, pipe in self.now.items():
            os.dup2(pipe.write, self.DESCRIPTORS[stream])
            pipe.close_write()
            self.add(pipe)
        _buffer_lines()
        if echo:
            threading.Thread(target=self._watch, name="nbddp-captured", daemon=True).start()

    def read_ends(self) -> dict[str, int]:
        """Of the pipes into which the descriptors lead."""
        return {stream: pipe.read for stream, pipe in self.now.items()}

    def add(self, pipe: Pipe) -> None:
        """Read this one too."""
        with self.lock:
            self.pipes[pipe.read] = pipe
            self._poll.register(pipe.read, select.POLLIN)
        os.write(self._wake, b"\n")

    def _end(self, pipe: Pipe) -> None:
        """Nobody writes into it any more."""
        del self.pipes[pipe.read]
        self._poll.unregister(pipe.read)
        if pipe is not self.now[pipe.stream]:
            os.close(pipe.read)

    # -- reading -------------------------------------------------------------------------------------

    def take(self) -> None:
        """Take all that has been written by now; with the lock held."""
        for read, _ in self._poll.poll(0):
            pipe = self.pipes[read]
            data = os.read(read, LARGEST)
            if not data:
                self._end(pipe)
                continue
            self._put(pipe.stream, pipe.decoder.decode(data), pipe)
            with_log = memoryview(data)
            while with_log:
                with_log = with_log[os.write(self._echo[pipe.stream], with_log) :]

    def _watch(self) -> None:
        """The reader thread."""
        while True:
            poll = select.poll()
            with self.lock:
                for read in (*self.pipes, self._woken):
                    poll.register(read, select.POLLIN)
            ready = poll.poll()
            if any(read == self._woken for read, _ in ready):
                os.read(self._woken, LARGEST)
            clock.sleep(LEAVE_SECONDS)
            with self.lock:
                if not self._waits(clock.monotonic()):
                    self.take()


def _buffer_lines() -> None:
    """Have C's stdout hand on each line as it is ended, as to a terminal: into a pipe, blocks of 4 KiB come, late."""
    found = _c_stdout()
    if found is not None:
        found[0].setvbuf(found[1], None, LINE_BUFFERED, BUFFER)


def flush_c() -> None:
    """Have C's stdout hand on what it holds."""
    found = _c_stdout()
    if found is not None:
        found[0].fflush(found[1])


def _c_stdout() -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    library = _c_library()
    for name in ("stdout", "__stdoutp"):  # the second is macOS's
        try:
            return library, ctypes.c_void_p.in_dll(library, name)
        except ValueError:
            continue
    return None


@functools.cache
def _c_library() -> ctypes.CDLL:
    """Once: ctypes makes a class of functions for each library object."""
    return ctypes.CDLL(None)
