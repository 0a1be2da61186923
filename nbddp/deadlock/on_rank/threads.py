"""The threads of a worker: which one speaks for the rank, what it waits in, and whether anything moves."""

from __future__ import annotations

import functools
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from nbddp.agent import orphans
from nbddp.compat import system
from nbddp.deadlock.on_rank.frames import SeenFrame

THREADING = threading.__file__
SHORT = 4096  # bytes of a file in /proc/self/task
ENDED = "ZX"  # states of a process that nobody has waited for
# command lines of the tracker of multiprocessing's resources, and of its server that forks
SERVES = re.compile(r"from multiprocessing\.(resource_tracker|forkserver) import main")
SPINS = "TP_"  # how names of the threads of RPC's transport begin
JOINS = 8  # threads that join threads, followed so far

# system calls by number, x86-64 first, then 64-bit Arm (and POWER, 32-bit): a thread that waits for another ...
FUTEX = ("202", "98", "221", "240", "422")
# ... and one that sleeps, or waits for a descriptor, a child, or a signal
SLEEPS = ("7", "271", "23", "270", "61", "247", "73", "72", "260", "232", "281", "22", "95", "0", "63", "45", "207",
          "43", "288", "242", "42", "203", "47", "212", "441",  # accept, connect, recvmsg, epoll_pwait2
          "34", "130", "133", "137",  # pause, sigsuspend, sigtimedwait
          "219", "128")  # fmt: skip  # the last are of one that goes on after it was disturbed
NAPS = ("230", "35", "115", "101")  # it goes on by itself

_machinery: set[str] = set()  # Linux's numbers of the threads that were there before the first run

Stacks = dict[int, list[SeenFrame]]
Asks = Callable[[SeenFrame], bool]


def speaker(of_all: Stacks) -> int:
    """The thread that the main thread joins without a time limit, and so on; else the main thread. One that has been
    called out of its join, by a signal, speaks for itself."""
    ident = threading.main_thread().ident or 0
    for _ in range(JOINS):
        within = itertools.takewhile(lambda f: f.file == THREADING, of_all.get(ident, ()))
        joined = next((j for f in within if (j := _joined(f)) is not None), None)
        if joined is None or joined not in of_all:
            break
        ident = joined
    return ident


def _joined(frame: SeenFrame) -> int | None:
    if frame.file != THREADING or frame.name != "join":
        return None
    timeout, thread = frame.get("timeout", "self")
    return thread.ident if timeout is None and isinstance(thread, threading.Thread) else None


def waits(thread: int | None) -> str:
    """How a thread waits, by Linux: "futex", "sleep" (for a descriptor or a child), "nap" (for a time), "busy", or ""
    if unknown."""
    if not system.has_proc():
        return ""
    try:
        number = short(f"/proc/self/task/{thread}/syscall").split()[0].decode()
    except (OSError, IndexError):
        return ""
    if number in FUTEX:
        return "futex"
    return "sleep" if number in SLEEPS else "nap" if number in NAPS else "busy"


def ran(thread: int | None) -> int | None:
    """Nanoseconds that a thread, by Linux's number, has run on a core; None where it does not say."""
    try:
        return int(short(f"/proc/self/task/{thread}/schedstat").split()[0])
    except (OSError, IndexError):
        return None


def spun() -> float:
    """Seconds of CPU time of the threads of torch's that look at shared memory again and again."""
    return sum((ran(thread) or 0) / 1e9 for thread in map(int, tasks()) if name(thread).startswith(SPINS))


def name(thread: int | str) -> str:
    """What Linux calls a thread; empty if it has ended."""
    with suppress(OSError):
        return short(f"/proc/self/task/{thread}/comm").decode(errors="replace").strip()
    return ""


def native(ident: int) -> int | None:
    """Linux's number of a Python thread."""
    if ident == threading.main_thread().ident:
        return main_native()
    return next((t.native_id for t in threading.enumerate() if t.ident == ident), None)


def main_native() -> int | None:
    """Linux's number of the main thread. After a fork Python still has that of the parent's (up to 3.13)."""
    return os.getpid() if system.is_linux() else threading.main_thread().native_id


def before_first_run() -> None:
    """Note the threads that are there, but for the main one: they carry questions and output, and are no program's."""
    if not _machinery:
        _machinery.update(set(tasks()) - {str(main_native())})


def machinery() -> set[str]:
    """Linux's numbers of the threads that were there before the first run."""
    return _machinery


def tasks() -> list[str]:
    """Linux's numbers of all threads of this process, C++'s too; none where it does not say."""
    return os.listdir("/proc/self/task") if system.has_proc() else []


def children() -> tuple[list[int], int]:
    """The processes that this one and those have started and that run, and the CPU time that they have used, in Linux's
    ticks; none where it does not say. Without what serves multiprocessing alone."""
    found, ticks = [], 0
    for process in _below(os.getpid(), forked=False) if system.has_proc() else ():
        state, *numbers = orphans.facts(process, "stat").rpartition(")")[2].split() or (ENDED,)
        if state not in ENDED:
            found.append(process)
            ticks += sum(map(int, numbers[10:12]))
    return found, ticks


def _below(process: int, *, forked: bool) -> Iterator[int]:
    """What a process has started. forked: whether a server of multiprocessing has; its forks have its command line."""
    found: list[int] = []
    with suppress(OSError):  # it has ended, or is hidden
        found = orphans.children(process)
    for child in found:
        serves = not forked and SERVES.search(orphans.facts(child, "cmdline")) is not None
        if not serves:
            yield child
        yield from _below(child, forked=forked or serves)


def bytes_moved() -> int | None:
    """Bytes that the threads of this process's programs have read and written so far: gloo's transfers are among
    them. None where Linux does not report them.

    Linux's counters of sockets would be more exact, and are locked for up to 0.4 s while 1 GB is sent.
    """
    if not _tells_bytes():
        return None
    return _moved_by(set(tasks()) - _machinery - {str(threading.get_native_id())})


@functools.cache
def _tells_bytes() -> bool:
    with suppress(OSError):  # some containers' kernels do not
        return system.has_proc() and _io(f"/proc/self/task/{os.getpid()}/io") >= 0
    return False


def native_work() -> tuple[int, int, int]:
    """What gloo's threads, which are not Python's, have done: bytes read and written, and nanoseconds on a core or
    waiting for one; last the main thread's bytes."""
    if not system.has_proc():
        return 0, 0, 0
    main = str(main_native())
    pythons = {str(t.native_id) for t in threading.enumerate()} | {str(threading.get_native_id())}
    of = set(tasks()) - _machinery - pythons
    return _moved_by(of - {main}), _busy(of - {main}), _moved_by({main})


def _busy(of: Iterable[str]) -> int:
    total = 0
    for thread in of:
        with suppress(OSError):
            on_a_core, waiting, *_ = short(f"/proc/self/task/{thread}/schedstat").split()
            total += int(on_a_core) + int(waiting)
    return total


def _moved_by(of: Iterable[str]) -> int:
    total = 0
    for thread in of:
        with suppress(OSError):  # it has ended
            total += _io(f"/proc/self/task/{thread}/io")
    return total


def _io(path: str) -> int:
    _, read, _, written, *_ = short(path).split()  # rchar: …, wchar: …
    return int(read) + int(written)


def short(path: str) -> bytes:
    """A short file of Linux's: a file object would take three times as long, and these are read in every rank."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, SHORT)
    finally:
        os.close(descriptor)
