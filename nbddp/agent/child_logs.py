"""Logs of the processes that an agent starts, of bounded size, and the last output of a process that has exited."""

from __future__ import annotations

import os
from contextlib import suppress

LAST_WORDS = 12  # lines
MOST = 8 << 20  # bytes of a log, which may fill no disk; of a longer one a quarter of that stays at its two ends
ABORTS = ("terminate called", "  what():")  # lines by which the C++ library says why it aborts begin so


def last_words(log: str, start: int = 0) -> str:
    """The last output of an ended process in its log, from byte `start`. They say why the C++ library aborts, or why
    and where the interpreter does. Else they are its last lines."""
    try:
        with open(log, encoding="utf-8", errors="replace") as file:
            file.seek(start if start <= os.path.getsize(log) else 0)  # the agent has cut it
            lines = [line.rstrip() for line in file.read().splitlines()]
    except OSError:
        lines = []
    last = {begins: line for line in lines for begins in ABORTS if line.startswith(begins)}
    told = list(last.values())
    lines = lines[next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), 0) :]
    in_thread = ""
    for line in lines:
        if line.startswith(("Thread 0x", "Current thread 0x")):
            in_thread = line
        elif line.startswith("Fatal Python error") or (in_thread.startswith("Current") and line.startswith("  File ")):
            told.append(line)
    return "\n".join(told[:LAST_WORDS] or [line for line in lines if line][-3:])


def cut_log(path: str, most: int = MOST) -> bool:
    """Leave of a log that is too long its beginning and its end. Its writers append, so they are not disturbed; what
    they write at this very moment may be lost."""
    with suppress(FileNotFoundError):
        if os.stat(path).st_size > most:
            _cut_log(path, most // 4)
            return True
    return False


def _cut_log(path: str, part: int) -> None:
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
