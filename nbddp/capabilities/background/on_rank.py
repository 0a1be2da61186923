"""Which cell has started the thread or process that prints while no cell runs.

A thread knows the cell that has started it. A process that a cell leaves behind still holds the pipes into which the
descriptors lead (`worker.output`). When the cell has ended, these are known to be that cell's, and the worker goes
on with new ones. Whether anybody else holds a pipe poll says, while the worker itself does not.
"""

from __future__ import annotations

import functools
import os
import select
import threading
import weakref
from collections.abc import Callable

from nbddp.compat import system
from nbddp.protocol.outcome import Outcome
from nbddp.worker.output import Pipe
from nbddp.worker.parts import RankWorker

MOST_LEFT = 32  # cells whose processes are distinguished; of more, nothing is known
CELL = "nbddp_cell"  # attribute of a thread: the cell that has started it


class StartedBy:
    """The worker's part."""

    def __init__(self, worker: RankWorker):
        self._worker, self._captured = worker, worker.printed.captured
        self._cells = weakref.WeakKeyDictionary[Pipe, int]()  # whose processes alone write into a pipe
        self._spare: dict[str, Pipe] = {}  # into which a descriptor leads next
        for stream in self._captured.now if system.has_proc() else ():
            self._add_spare(stream)
        os.register_at_fork(after_in_child=self._in_child)
        worker.printed.cell_of = self._cell_of
        know_threads(worker.cell)

    def _cell_of(self, pipe: Pipe | None) -> int | None:
        known = self._cells.get(pipe) if pipe is not None else None
        return known or getattr(threading.current_thread(), CELL, None)

    def _add_spare(self, stream: str) -> None:
        self._spare[stream] = Pipe(stream)
        self._captured.add(self._spare[stream])

    def _in_child(self) -> None:
        for pipe in self._spare.values():
            if pipe.write != -1:  # or a child of a child
                pipe.close_write()

    def end(self, outcome: Outcome, error: BaseException | None) -> None:
        """Where processes that the cell leaves behind hold a pipe, have the descriptor lead into a new one."""
        cell = self._worker.cell()
        if cell is None:
            return
        try:
            with self._captured.lock:
                moved = [self._cut(stream, spare, cell) for stream, spare in [*self._spare.items()]]
            for hear in self._captured.moved if any(moved) else ():
                hear()
        except OSError as e:  # there are no descriptors: whose later text is, is not known
            self._worker.to_log(f"later text cannot be assigned to its cell ({type(e).__name__}: {e})")

    def _cut(self, stream: str, spare: Pipe, cell: int) -> bool:
        descriptor, pipe = self._captured.DESCRIPTORS[stream], self._captured.now[stream]
        if not _leads_into(descriptor, pipe) or len(self._captured.pipes) > 2 * MOST_LEFT:
            return False  # the program has put something of its own there
        os.dup2(spare.write, descriptor)
        if not _is_held(pipe) and _again(pipe, descriptor):
            return False
        self._cells[pipe] = cell
        self._captured.now[stream] = spare
        spare.close_write()
        del self._spare[stream]
        self._add_spare(stream)  # where there are no descriptors, no other is made
        return True


def _again(pipe: Pipe, descriptor: int) -> bool:
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


def know_threads(cell: Callable[[], int | None]) -> None:
    """Have each thread know the cell that has started it; once. cell: the one that is run, or None."""
    original = threading.Thread.start

    @functools.wraps(original)
    def start(thread: threading.Thread) -> None:
        found = cell()
        if found is None:  # started by one that a cell has started
            found = getattr(threading.current_thread(), CELL, None)
        if found is not None:
            setattr(thread, CELL, found)
        original(thread)

    threading.Thread.start = start  # type: ignore[assignment, method-assign]
