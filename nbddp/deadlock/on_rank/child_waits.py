"""What processes that a program has started wait for: while one does, it has a file in its pool's folder.

A process that was forked from a worker knows the folder; one that is started by spawn or forkserver gets it
(`capabilities.subprocesses.on_rank`). A file is named by its process, and contains that one's start time. So a file of
a killed process is not read for a later process with the same pid.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator

from nbddp.agent.process_id import ProcessId

FOLDER = "child_waits"
MOST = 4096  # bytes of a file

_folder = ""
_worker = 0  # the process whose frames are looked at instead


def begin(home: str) -> None:
    """In a worker, once. home: the pool's folder."""
    global _folder, _worker
    _folder, _worker = os.path.join(home, FOLDER), os.getpid()
    os.makedirs(_folder, mode=0o700, exist_ok=True)


def folder() -> str:
    """The folder's name, for a process that is started."""
    return _folder


def arrive(told: str) -> None:
    """In a process that was started."""
    global _folder
    _folder = told


@contextlib.contextmanager
def told(words: str, advice: str = "") -> Iterator[None]:
    """While this process waits. It only helps to look: nothing fails for it."""
    path = os.path.join(_folder, str(os.getpid())) if _folder and os.getpid() != _worker else ""
    if path:
        started = ProcessId.of(os.getpid()).started
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump([started, words, advice], file)
    try:
        yield
    finally:
        if path:
            with contextlib.suppress(OSError):
                os.unlink(path)


def of(processes: Iterable[int]) -> tuple[tuple[str, str], ...]:
    """What these wait for, with what would help."""
    found = []
    for process in processes if _folder else ():
        with contextlib.suppress(OSError, ValueError), open(os.path.join(_folder, str(process)), "rb") as file:
            started, words, advice = json.loads(file.read(MOST))
            if ProcessId(process, started).alive():
                found.append((str(words), str(advice)))
    return tuple(found)
