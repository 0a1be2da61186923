"""The files with a copy of a rank's output in its newest run, one for each stream.

Only text that may be on its way is of use, so of a long output the newest HALF to two HALFs stay. A full file takes the
number of its first character into its name, and the one before it goes. Each begins with the number of the run.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from contextlib import suppress

HALF = 4 << 20  # bytes
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC


def older(path: str) -> list[str]:
    """Older parts of a copy, the oldest first."""
    found = glob.glob(f"{glob.escape(path)}.*")
    return sorted(found, key=lambda name: int(name.rpartition(".")[2]))


def missing(path: str, run: int, came: int, left: bytes = b"") -> tuple[int, str]:
    """How many characters of a run's text are lost, and all that is kept and has not come. came: characters that have.
    left: what belongs behind the copy."""
    start, found = 0, b""
    for part in older(path):
        found = _read(part, run)
        start = int(part.rpartition(".")[2]) if found else 0
    text = (found + _read(path, run) + left).decode("utf-8", "replace")
    return max(0, start - came), text[max(0, came - start) :]


def unfinished(path: str, most: int = 4096) -> bytes:
    """The line without an end that a copy ends with."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read().rpartition(b"\n")[2]
    return b""


def _read(path: str, run: int) -> bytes:
    """What a file holds of this run."""
    with suppress(FileNotFoundError), open(path, "rb") as file:  # else it has just gone
        if file.readline() == _header(run):
            return file.read()
    return b""


def _header(run: int) -> bytes:
    return b"%d\n" % run


class StreamCopy:
    """The copy of one stream. failed: gets once a run the reason why its text could not be kept, and where."""

    def __init__(self, path: str, failed: Callable[[str, str], None]):
        self.path, self._failed = path, failed
        for part in older(path):  # of the process before
            os.unlink(part)
        self._file = os.open(path, FLAGS, 0o600)
        self._run, self._whole = -1, True
        self._start = self._characters = self._bytes = 0

    def write(self, run: int, text: str) -> None:
        data = text.encode("utf-8", "replace")
        try:
            if run != self._run:
                self._begin(run)
            elif self._bytes and self._bytes + len(data) > HALF:
                self._next()
            if self._whole:
                os.write(self._file, data)
        except OSError as e:  # a full disk: what is printed goes its usual way
            self._whole = False
            self._failed(e.strerror or str(e), self.path)
        self._characters += len(text)
        self._bytes += len(data)

    def _begin(self, run: int) -> None:
        started, self._start = self._start, 0
        self._run, self._characters, self._bytes, self._whole = run, 0, 0, True
        for part in older(self.path) if started else ():
            os.unlink(part)
        os.ftruncate(self._file, 0)
        os.write(self._file, _header(run))

    def _next(self) -> None:
        before = older(self.path)
        os.rename(self.path, f"{self.path}.{self._start}")
        for part in before:
            os.unlink(part)
        fresh = os.open(self.path, FLAGS, 0o600)
        os.dup2(fresh, self._file, inheritable=False)
        os.close(fresh)
        os.write(self._file, _header(self._run))
        self._start, self._characters, self._bytes = self._start + self._characters, 0, 0
