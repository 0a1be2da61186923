"""Modules of the user's own that a worker has imported, and whose files are others now: an import reads them once."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable
from typing import Any

Mark = tuple[int, int]  # when a file was written (ns), and its size


class Modules:
    """is_user: whether a file is neither the standard library's nor an installed package's."""

    def __init__(self, is_user: Callable[[str], bool]):
        self._is_user = is_user
        self._known: dict[str, tuple[str, Mark | None]] = {}
        self._read: dict[str, int] = {}  # by which spec each was read: a reload makes a new one
        self._count = 0

    def note(self) -> None:
        """After a run: what its imports, and reloads, have read."""
        names = list(self._known) if len(sys.modules) == self._count else list(sys.modules)
        self._count = len(sys.modules)
        for name in names:
            module = sys.modules.get(name)
            read = id(getattr(module, "__spec__", None))
            if self._read.get(name) != read:
                self._read[name] = read
                file = getattr(module, "__file__", None)
                if isinstance(file, str) and file.endswith(".py") and name != "__main__" and self._is_user(file):
                    self._known[name] = (os.path.abspath(file), _mark(file))

    def others(self) -> list[tuple[str, str]]:
        """Before a run: (module, "changed" or "moved") since they were imported; each change is told once."""
        found = []
        for name, (file, mark) in list(self._known.items()):
            if name not in sys.modules:
                del self._known[name], self._read[name]
                continue
            now, there = _mark(file), _found(name)
            if there is not None and there != file:
                found.append((name, "moved"))
                self._known[name] = (there, _mark(there))
            elif now is not None and now != mark:
                found.append((name, "changed"))
                self._known[name] = (file, now)
        return found


def _mark(file: str) -> Mark | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _found(name: str) -> str | None:
    """The file that an import of a top-level module would read now."""
    if "." in name:
        return None
    spec: Any = importlib.machinery.PathFinder.find_spec(name)
    origin = None if spec is None else spec.origin
    return os.path.abspath(origin) if isinstance(origin, str) and os.path.exists(origin) else None
