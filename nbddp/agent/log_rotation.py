"""The logs of an agent's processes, kept small: a process that goes on complaining fills no disk."""

from __future__ import annotations

import os
from contextlib import suppress

MOST = 8 << 20  # bytes of one log; of a longer one a quarter of that stays at its beginning and at its end


def cut(path: str, most: int = MOST) -> bool:
    """Leave of a log that is too long its beginning and its end. Its writers append, so they are not disturbed; what
    they write at this very moment may be lost."""
    with suppress(FileNotFoundError):
        if os.stat(path).st_size > most:
            _cut(path, most // 4)
            return True
    return False


def _cut(path: str, part: int) -> None:
    with open(path, "rb") as file:
        head = file.read(part)
        size = os.fstat(file.fileno()).st_size
        file.seek(size - part)
        tail = file.read()
    own = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.ftruncate(own, 0)
        between = f"\n… {size - 2 * part} bytes omitted …\n"
        os.write(own, head + between.encode() + tail)
    finally:
        os.close(own)
