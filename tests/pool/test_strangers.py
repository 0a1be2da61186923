"""What strangers' code may leave behind is counted in full, and ended, and holds up nobody."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from nbddp.agent import orphans
from nbddp.deadlock.on_rank import threads
from nbddp.grading.sandbox import forkserver

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory of other processes is told on Linux alone")
SIZE = 64 << 20


@contextmanager
def child(work: Callable[[], object]) -> Iterator[int]:
    """The pid of a forked process that has done `work`, and waits."""
    done, end = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            kept = work()
            os.write(done[1], b"x")
            os.close(end[1])
            os.read(end[0], 1)
            del kept
        finally:
            os._exit(0)
    os.read(done[0], 1)
    yield pid
    for fd in (*done, *end):
        os.close(fd)
    os.waitpid(pid, 0)


def mapped(flags: int) -> mmap.mmap:
    """Pages that are new for certain; malloc may give what this process has freed, which its forks hold anyway."""
    made = mmap.mmap(-1, SIZE, flags)
    for page in range(0, SIZE, mmap.PAGESIZE):
        made[page] = 1
    return made


@linux
@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.MAP_SHARED], ids=["its own", "shared"])
def test_memory_counts_whether_it_is_shared_or_not(flags: int) -> None:
    with child(lambda: None) as idle, child(lambda: mapped(flags)) as busy:
        assert SIZE <= orphans.memory(busy) - orphans.memory(idle) < 2 * SIZE


@linux
def test_who_was_forked_is_told_from_a_new_program() -> None:
    program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child(lambda: None) as forked:
        assert orphans.stack(forked) == orphans.stack(os.getpid()) != 0
        assert orphans.stack(program.pid) not in (0, orphans.stack(os.getpid()))
    program.communicate()
    assert orphans.stack(program.pid) == orphans.memory(program.pid) == 0


@linux
def test_a_process_may_have_any_name() -> None:
    named = "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff) Z 1', 0, 0, 0); print(flush=True); input()"
    program = subprocess.Popen([sys.executable, "-c", named], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdout is not None
    program.stdout.readline()
    assert orphans.stack(program.pid) not in (0, orphans.stack(os.getpid()))
    assert orphans.memory(program.pid) > 1 << 20
    assert program.pid in threads.children()[0]
    program.communicate()


ENDS = """
import os
from nbddp.agent import children
from nbddp.agent import orphans
children.adopt_orphans()
for _ in range(3):
    if not os.fork():
        while True:
            if os.fork():
                os._exit(0)
print(orphans.end(), orphans.children())
"""


@linux
def test_processes_that_fork_and_leave_for_ever_are_caught() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["[]", "[]"]


def test_a_group_below_us_is_killed_at_once() -> None:
    """A child alone would leave its own children time to fork."""
    ends = os.pipe()
    pid = os.fork()
    if not pid:
        os.setsid()
        made = os.fork()
        if made:
            os.write(ends[1], str(made).encode())
        signal.pause()
    below = psutil.Process(int(os.read(ends[0], 99)))
    try:
        orphans.kill(pid)
        os.waitpid(pid, 0)
        below.wait(10)
    finally:
        if below.is_running():
            below.kill()
        for fd in ends:
            os.close(fd)


def test_a_folder_goes_whatever_is_forbidden_in_it(tmp_path: Path) -> None:
    (tmp_path / "own" / "closed").mkdir(parents=True)
    (tmp_path / "own" / "closed" / "file").touch()
    (tmp_path / "own" / "closed").chmod(0)
    (tmp_path / "own").chmod(0o500)
    forkserver.remove(str(tmp_path / "own"))
    assert list(tmp_path.iterdir()) == []
