"""What a worker has written, as its files have it: the copies of its two streams (`worker.output_spool` writes them),
its log, and what it said last.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from contextlib import suppress

STREAMS = ("stdout", "stderr")
LAST_WORDS = 12  # lines
MOST = 8 << 20  # bytes of a log, which may fill no disk; of a longer one a quarter of that stays at its two ends


def path(base: str, stream: str) -> str:
    """Where the copy of a stream is, for a worker that keeps it at `base`."""
    return f"{base}.{stream}"


def text(base: str, stream: str) -> tuple[int, str]:
    """How many characters of a stream are kept no more, and all since."""
    start, found = 0, b""
    for part in older(path(base, stream)):
        start = int(part.rpartition(".")[2])
        with suppress(FileNotFoundError):  # it has just gone
            found = _read(part)
    with suppress(FileNotFoundError):
        found += _read(path(base, stream))
    return start, found.decode("utf-8", "replace")


def clear(bases: Iterable[str]) -> None:
    """A run begins: nothing has been written in it by the workers that keep their text at `bases`."""
    copies = {path(base, stream) for base in bases for stream in STREAMS}
    for folder in {os.path.dirname(copy) for copy in copies}:
        with os.scandir(folder) as entries:
            for entry in entries:
                whole, _, number = entry.path.rpartition(".")
                with suppress(FileNotFoundError):  # it has just gone
                    if entry.path in copies and entry.stat().st_size:
                        os.truncate(entry.path, 0)
                    elif whole in copies and number.isdigit():
                        os.unlink(entry.path)


def older(path: str) -> list[str]:
    """Older parts of a copy, the oldest first."""
    found = glob.glob(f"{glob.escape(path)}.*")
    return sorted(found, key=lambda name: int(name.rpartition(".")[2]))


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def begun(workers: Iterable[tuple[str, str]]) -> list[int]:
    """A run begins: what earlier ones wrote is none of its last words. workers: of each its log, and where its copies
    are. The byte of each log at which the run begins."""
    found = [*workers]
    clear(kept for _, kept in found)  # a worker does so too, if it lives to begin
    return [os.path.getsize(log) if os.path.exists(log) else 0 for log, _ in found]


def written(base: str) -> dict[str, tuple[int, str]]:
    """What a rank wrote in its last run, by stream: how many characters are kept no more, and all since."""
    return {stream: text(base, stream) for stream in STREAMS}


def last_words(log: str, start: int = 0, printed: str = "") -> str:
    """What a process that has ended said last: why the C++ library aborts (in what it printed to stderr), why
    and where the interpreter does (in its log, from byte `start`), or else the last lines of the log."""
    try:
        with open(log, errors="replace") as file:
            file.seek(start if start <= os.path.getsize(log) else 0)  # the agent has cut it
            lines = [line.rstrip() for line in file.read().splitlines()]
    except OSError:
        lines = []
    told = [line.rstrip() for line in printed.splitlines() if line.startswith(("terminate called", "  what():"))]
    lines = lines[next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), 0) :]
    in_thread = ""
    for line in lines:
        if line.startswith(("Thread 0x", "Current thread 0x")):
            in_thread = line
        elif line.startswith("Fatal Python error") or (in_thread.startswith("Current") and line.startswith("  File ")):
            told.append(line)
    return "\n".join(told[:LAST_WORDS] or [line for line in lines if line][-3:])


# -- logs, kept small ------------------------------------------------------------------------------


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
