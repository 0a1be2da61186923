"""Logs of the processes that an agent starts, of bounded size, and the last output of a process that has exited."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterable
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


# -- why a process has ended, by its log ------------------------------------------------------------

# Why a process has ended, read from its log: the error of Python's last traceback, on one line, and the user's file in
# it; else its last line. Pure.

TRACEBACK = "Traceback (most recent call last):"
FRAME = re.compile(r'  File "([^"<]+)", line (\d+)')
LINES, LONGEST = 4, 400  # of a message
RULE = re.compile(r"^-{20,}$", re.MULTILINE)
OWN_WARNING = re.compile(r"\[[^\]\s]+:\d+\] .*\bWarning: ")  # of Open MPI about itself: [host:pid] plm:rsh: Warning: …
# what is imported before a program, besides Python's own modules
IMPORTED = {
    "IPython", "cloudpickle", "ipykernel", "ipyparallel", "numpy", "psutil", "pynvml", "tornado", "torch", "traitlets",
    "zmq",
}  # fmt: skip


def cause(log: str, folder: str = "", entries: Iterable[str] = ()) -> str:
    """The error that a log ends with, or its last line; empty if it has none. folder: the working directory, with these
    entries; a file there is named if it raised the error, or hides a module that the error is about."""
    lines = log.rstrip().splitlines()
    start = next((i for i in range(len(lines) - 1, -1, -1) if lines[i].strip() == TRACEBACK), None)
    if start is None:
        return lines[-1].strip() if lines else ""
    frames = [*itertools.takewhile(lambda line: line.startswith(" "), lines[start + 1 :])]
    error = lines[start + 1 + len(frames) :]
    message = [error[0], *itertools.takewhile(str.strip, error[1:])] if error else []
    said = " ".join(" ".join(message[:LINES]).split())[:LONGEST] or lines[-1].strip()
    return said + _place(frames, folder) + _hiding("\n".join([*frames, *error]), folder, entries)


def _place(frames: list[str], folder: str) -> str:
    """Where it was raised, if that is a file of the folder."""
    files = [found for found in map(FRAME.match, frames) if found]
    if not files or not folder or os.path.dirname(files[-1][1]) != folder:
        return ""
    return f" ({files[-1][1]} line {files[-1][2]})"


def _hiding(text: str, folder: str, entries: Iterable[str]) -> str:
    """A file that is imported in place of a module with its name, since the folder comes first."""
    for entry in sorted(entries):
        name, ending = os.path.splitext(entry)
        if ending in ("", ".py") and name in {*sys.stdlib_module_names, *IMPORTED}:
            path = os.path.join(folder, entry)
            if path in text or f"'{name}'" in text:
                return f"; rename {path}, which hides the module {name}"
    return ""


def last_line(said: str) -> str:
    """The last line that is not empty; before what Open MPI adds between two rules and warns of, unless that is all."""
    parts = RULE.split(said)
    lines = [line.strip() for part in parts[::2] for line in part.splitlines() if line.strip()]
    lines = [line for line in lines if not OWN_WARNING.match(line)] or ([] if parts[1::2] else lines)
    boxes = [" ".join(part.split()) for part in parts[1::2]]
    return (lines[-1:] or boxes[:1] or ["it printed nothing"])[0]
