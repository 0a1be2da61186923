"""What is written to a worker's descriptors 1 and 2: by C++, by subprocesses, by forked processes.

Each leads into a pipe, which a thread reads; whoever prints in Python reads it first (`take`), so what was written
before comes before. When a cell has ended, a process that it leaves behind still holds the pipes: then these are known
to be that cell's, and the worker goes on with new ones (`cut`). Whether anybody else holds a pipe poll says, while the
worker itself does not.

New text is left in the pipe for a few milliseconds: of a process that dies just then whoever holds the read ends too
can read the last words.
"""

from __future__ import annotations

import codecs
import ctypes
import functools
import os
import select
import threading
from collections.abc import Callable, Mapping

from nbddp.compat import system
from nbddp.compat.clock import clock

LEAVE_SECONDS = 0.005
LARGEST = 1 << 16  # bytes: a pipe holds no more
MOST_LEFT = 32  # cells whose processes are told apart; of more, nothing is known
LINE_BUFFERED, BUFFER = 1, 0  # setvbuf's _IOLBF, and its own size

Put = Callable[[str, str, "int | None"], None]  # stream, text, the cell whose processes wrote it


class Pipe:
    """A pipe, and the stream as which its text appears. cell: whose processes alone write into it, if that is known."""

    def __init__(self, stream: str):
        self.stream = stream
        self.cell: int | None = None
        self.read, self.write = os.pipe()
        self.inode = os.fstat(self.read).st_ino
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def close_write(self) -> None:
        os.close(self.write)
        self.write = -1


class CapturedFds:
    """Descriptors of a worker as pipes. echo: stream → the descriptor where its own led before, to which the text goes
    too: the worker's log. `lock`: held while text is taken. Makes a thread."""

    DESCRIPTORS = {"stdout": 1, "stderr": 2}

    def __init__(self, echo: Mapping[str, int], put: Put, waits: Callable[[float], bool]):
        """waits: whether text that comes at this time (time.monotonic()) is left in the pipe for a moment more."""
        self.lock = threading.RLock()
        self.moved: list[Callable[[], object]] = []  # called when the descriptors lead into other pipes
        self._echo, self._put, self._waits = echo, put, waits
        self._now = {stream: Pipe(stream) for stream in echo}
        self._spare = {stream: Pipe(stream) for stream in echo} if system.has_proc() else {}
        self._pipes: dict[int, Pipe] = {}
        self._poll = select.poll()
        self._woken, self._wake = os.pipe()
        for stream, pipe in self._now.items():
            os.dup2(pipe.write, self.DESCRIPTORS[stream])
            pipe.close_write()
        for pipe in (*self._now.values(), *self._spare.values()):
            self._add(pipe)
        os.register_at_fork(after_in_child=self._in_child)
        _buffer_lines()
        if echo:
            threading.Thread(target=self._watch, name="nbddp-captured", daemon=True).start()

    def read_ends(self) -> dict[str, int]:
        """Of the pipes into which the descriptors lead."""
        return {stream: pipe.read for stream, pipe in self._now.items()}

    def _in_child(self) -> None:
        for pipe in self._spare.values():
            if pipe.write != -1:  # or a child of a child
                pipe.close_write()

    def _add(self, pipe: Pipe) -> None:
        self._pipes[pipe.read] = pipe
        self._poll.register(pipe.read, select.POLLIN)

    def _end(self, pipe: Pipe) -> None:
        """Nobody writes into it any more."""
        del self._pipes[pipe.read]
        self._poll.unregister(pipe.read)
        if pipe is not self._now[pipe.stream]:
            os.close(pipe.read)

    # -- reading -------------------------------------------------------------------------------------

    def take(self) -> None:
        """Take all that has been written by now; with the lock held."""
        for read, _ in self._poll.poll(0):
            pipe = self._pipes[read]
            data = os.read(read, LARGEST)
            if not data:
                self._end(pipe)
                continue
            self._put(pipe.stream, pipe.decoder.decode(data), pipe.cell)
            with_log = memoryview(data)
            while with_log:
                with_log = with_log[os.write(self._echo[pipe.stream], with_log) :]

    def _watch(self) -> None:
        """The reader thread."""
        while True:
            poll = select.poll()
            with self.lock:
                for read in (*self._pipes, self._woken):
                    poll.register(read, select.POLLIN)
            ready = poll.poll()
            if any(read == self._woken for read, _ in ready):
                os.read(self._woken, LARGEST)
            clock.sleep(LEAVE_SECONDS)
            with self.lock:
                if not self._waits(clock.monotonic()):
                    self.take()

    # -- whose it is ---------------------------------------------------------------------------------

    def cut(self, cell: int) -> None:
        """The cell has ended. Where processes that it leaves behind hold a pipe, the descriptors lead into new ones."""
        left = False
        with self.lock:
            for stream, spare in list(self._spare.items()):
                left |= self._cut(stream, spare, cell)
        if left:
            os.write(self._wake, b"\n")
            for hear in self.moved:
                hear()

    def _cut(self, stream: str, spare: Pipe, cell: int) -> bool:
        descriptor, pipe = self.DESCRIPTORS[stream], self._now[stream]
        if not _leads_into(descriptor, pipe) or len(self._pipes) > 2 * MOST_LEFT:
            return False  # the program has put something of its own there
        os.dup2(spare.write, descriptor)
        if not _is_held(pipe) and self._again(pipe, descriptor):
            return False
        pipe.cell = cell
        self._now[stream] = spare
        spare.close_write()
        del self._spare[stream]
        self._spare[stream] = Pipe(stream)  # where there are no descriptors, no other is made
        self._add(self._spare[stream])
        return True

    def _again(self, pipe: Pipe, descriptor: int) -> bool:
        """Have a descriptor lead into a pipe that nobody else holds. False where the process may not (`setuid`)."""
        try:
            again = os.open(f"/proc/self/fd/{pipe.read}", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return False
        os.dup2(again, descriptor)
        os.close(again)
        return True


def _leads_into(descriptor: int, pipe: Pipe) -> bool:
    try:
        return os.fstat(descriptor).st_ino == pipe.inode
    except OSError:  # it was closed
        return False


def _is_held(pipe: Pipe) -> bool:
    """Whether anybody can write into it."""
    asked = select.poll()
    asked.register(pipe.read, 0)
    return not any(event & select.POLLHUP for _, event in asked.poll(0))


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
