"""A file of bounded size, with the beginning and the end of the written text.

The second half of the file is written round and round. When the file is closed, it is put in order, with a line in
between that says what is missing. A disk that is full, or any other error, ends the file and not its writer's run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from nbddp.errors import BadInput
from nbddp.launch.units import amount

LIMIT, LEAST = 16 << 20, 4096  # bytes of one rank's output in one run
SETTING = "NBDDP_OUTPUT_LIMIT"


def limit(env: Mapping[str, str]) -> int:
    """Bytes of a rank's output that are kept. Raises BadInput for a setting that is no size."""
    text = env.get(SETTING, "")
    try:
        found = amount(text) if text else LIMIT
    except ValueError as e:
        raise BadInput(f"{SETTING}: {e}") from None
    if found < LEAST:
        raise BadInput(f"{SETTING}={text} is too small; set {LEAST} bytes or more, such as {SETTING}=16MiB")
    return found


class LogFile:
    """`path` once something is written; `why` says why no more is. held: whether it stays open between two writes; a
    process may have 1,024 files open, which many ranks would use up."""

    def __init__(self, path: Path, most: int = LIMIT, held: bool = True):
        self.path, self.most, self.written, self.why, self.held = path, most, 0, "", held
        self._file: int | None = None
        self._begun = False
        self._head = most // 2

    def write(self, data: bytes) -> None:
        if self.why:
            return
        try:
            self._write(self._open(), memoryview(data))
        except OSError as e:
            self.why = e.strerror or str(e)
        finally:
            if not self.held:
                self._let_go()

    def _open(self) -> int:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            anew = 0 if self._begun else os.O_TRUNC
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | anew | os.O_CLOEXEC, 0o600)
            self._begun = True
        return self._file

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _write(self, file: int, data: memoryview) -> None:
        while data:
            at, end = self.written, self._head
            if at >= self._head:
                ring = self.most - self._head
                at = self._head + (self.written - self._head) % ring
                end = self.most
            done = os.pwrite(file, data[: end - at], at)
            self.written += done
            data = data[done:]

    def close(self) -> None:
        """Put what is kept in order."""
        try:
            if self._begun and self.written > self.most:
                self._put_in_order(self._open())
        except OSError as e:
            self.why = self.why or e.strerror or str(e)
        finally:
            self._let_go()
            self._begun = False

    def _put_in_order(self, file: int) -> None:
        ring = self.most - self._head
        start = (self.written - self._head) % ring
        tail = os.pread(file, ring - start, self._head + start) + os.pread(file, start, self._head)
        tail = tail[tail.find(b"\n") + 1 :]  # from a whole line on
        missing = self.written - self._head - len(tail)
        between = f"\n… {missing} bytes omitted ({SETTING} sets how many are kept) …\n".encode()
        os.ftruncate(file, self._head)
        os.pwrite(file, between + tail, self._head)
