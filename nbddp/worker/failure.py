"""An exception on a worker → plain data: the chain, its frames, which of them are the user's.

What travels is JSON; the words are made on the client (`run.report`).
"""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import traceback
from types import TracebackType
from typing import Any

CONTEXT = 2  # lines of source on each side of the failing one


def chain(error: BaseException, names: dict[str, str], hide: tuple[str, ...]) -> list[dict[str, Any]]:
    """The exceptions that led to `error`, oldest first.

    names: real file name of a cell → how to show it (`Cell In[3]`).
    hide: path prefixes of the machinery that runs cells; frames before the first frame
        outside them are left out.
    """
    links: list[dict[str, Any]] = []
    seen: set[int] = set()
    current: BaseException | None = error
    relation = ""
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        links.insert(0, {**_one(current, names, hide), "relation": relation})
        if current.__cause__ is not None:
            current, relation = current.__cause__, "direct cause"
        elif current.__suppress_context__:
            current = None
        else:
            current, relation = current.__context__, "while handling"
    for earlier, later in itertools.pairwise(links):
        later["relation"], earlier["relation"] = earlier["relation"], later["relation"]
    return links


def _one(error: BaseException, names: dict[str, str], hide: tuple[str, ...]) -> dict[str, Any]:
    return {
        "type": type(error).__qualname__,
        "message": _message(error),
        "notes": list(getattr(error, "__notes__", ())),
        "frames": frames(error.__traceback__, names, hide),
    }


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as e:
        return f"<message that raises {type(e).__name__}>"


def let_go_of_memory(error: BaseException) -> None:
    """After an out-of-memory error on a GPU: free what the failed calls held, and the allocator's cache.

    The traceback keeps every tensor of the functions it went through alive; the cell's own names stay.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, getattr(torch, "OutOfMemoryError", ())):
        return
    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def frames(tb: TracebackType | None, names: dict[str, str], hide: tuple[str, ...]) -> list[dict[str, Any]]:
    """Frames from the cell inwards; a frame is the user's if it is not from an installed package."""
    entries = traceback.extract_tb(tb)
    while entries and entries[0].filename not in names and entries[0].filename.startswith(hide):
        entries.pop(0)
    return [
        {
            "file": names.get(e.filename, e.filename),
            "line": e.lineno or 0,
            "name": e.name,
            "user": is_user(e.filename, names),
            "context": context(e.filename, e.lineno or 0) if is_user(e.filename, names) else [],
        }
        for e in entries
    ]


def is_user(filename: str, names: dict[str, str]) -> bool:
    """True for cells and the user's own modules: not the standard library, not installed packages."""
    if filename in names:
        return True
    if filename.startswith("<") or "site-packages" in filename or "dist-packages" in filename:
        return False
    return not filename.startswith(_library())


def context(filename: str, line: int) -> list[tuple[int, str]]:
    first = max(1, line - CONTEXT)
    rows = [(n, linecache.getline(filename, n).rstrip("\n")) for n in range(first, line + CONTEXT + 1)]
    while rows and not rows[-1][1].strip() and rows[-1][0] != line:
        rows.pop()
    return rows


def _library() -> tuple[str, ...]:
    roots = {os.path.dirname(os.__file__), sys.prefix + "/lib", os.path.dirname(os.path.dirname(__file__))}
    return tuple(sorted(roots))
