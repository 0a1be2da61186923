"""Why a process has ended, read from its log: the error of Python's last traceback, on one line, and the user's file in
it; else its last line. Pure."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterable

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
