"""Processes that were started by others and belong to this one: found, counted and ended.

On Linux a process can adopt the orphans of its descendants (`children.adopt_orphans`). One that forked twice and made a
session of its own is still among our children. A child that has not been reaped keeps its pid, so ending children,
level by level, never hits a stranger.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

import psutil

from nbddp.agent.process_id import ProcessId

HELD = ("RssAnon:", "RssShmem:", "VmSwap:")  # of /proc/PID/status
START_OF_STACK = 25  # of the fields in /proc/PID/stat behind the name
CLOCK = 0.02  # seconds by which start times may differ
PATIENCE = 10.0  # seconds; a killed process ends only after its system call


def end(spare: Collection[int] = (), patience: float = PATIENCE) -> list[int]:
    """Kill and reap all children but `spare`, then the children that they leave, until there are none.

    Those that are still there after `patience` seconds, or new ones then; empty as a rule.
    """
    until = time.monotonic() + patience
    while left := [pid for pid in children() if pid not in spare]:
        for pid in left:
            with suppress(ProcessLookupError):  # whoever started it has reaped it
                kill(pid)
        reaped = sum(map(_reaped, left))
        if time.monotonic() > until:
            return left
        if not reaped:
            time.sleep(0.001)
    return []


def end_sessions(leaders: Collection[ProcessId]) -> None:
    """Kill what is left of the sessions of processes that have just ended, and those if they are about to. As long as a
    session has a member no new process gets its leader's pid, so what is in it belongs to it."""
    until, by_pid = time.monotonic() + PATIENCE, {leader.pid: leader for leader in leaders}
    while (found := _in_sessions(by_pid)) and time.monotonic() < until:
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)


def _in_sessions(leaders: Mapping[int, ProcessId]) -> list[psutil.Process]:
    found = []
    for pid in psutil.pids() if leaders else ():
        with suppress(OSError, psutil.NoSuchProcess):  # it has ended meanwhile
            if os.getsid(pid) in leaders:
                process = psutil.Process(pid)
                began = leaders[os.getsid(pid)].started - CLOCK
                if process.create_time() >= began and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def kill(pid: int) -> None:
    """Kill a child, and its group at once if that is in a session that we are not in. It began below us, so all in it
    is ours, and forking does not escape a group. (One by one, a few that go on forking outnumber us.)"""
    if os.getsid(pid) != os.getsid(0):
        os.killpg(os.getpgid(pid), signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # who started it has reaped it
        return True


def children(pid: int | None = None) -> list[int]:
    """The pids of a process's children (this one's, if None), those among them that have ended but are not reaped."""
    folder = f"/proc/{'self' if pid is None else pid}/task"
    try:
        return [int(child) for task in os.listdir(folder) for child in _read(f"{folder}/{task}/children").split()]
    except FileNotFoundError:  # it has ended; or not Linux, or a kernel that does not list children
        return _by_psutil(pid)


def _by_psutil(pid: int | None) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:  # a process gives itself any name
            return file.read()
    except ProcessLookupError:  # the thread has ended
        return ""


def tree(spare: Collection[int] = ()) -> Iterator[int]:
    """The pids of this process's descendants, less children in `spare` and theirs."""
    found = [pid for pid in children() if pid not in spare]
    while found:
        pid = found.pop()
        yield pid
        found += children(pid)


def memory(pid: int) -> int:
    """Bytes that a process holds, in memory or swapped out, and that no file on disk has. Bytes that it shares with
    other processes count, also with its parent; 0 if it has ended."""
    lines = facts(pid, "status").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(HELD)) << 10


def stack(pid: int) -> int:
    """Where a process's stack begins: at the same address in one that was forked, at a random one in a new program; 0
    if it hides that, or has ended."""
    fields = facts(pid, "stat").rpartition(")")[2].split()
    return int(fields[START_OF_STACK]) if fields else 0


def facts(pid: int, name: str) -> str:
    """What /proc has of a process in the file `name`; empty if it has ended."""
    try:
        return _read(f"/proc/{pid}/{name}")
    except FileNotFoundError:
        return ""
