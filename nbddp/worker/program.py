"""A cell as a program with a file: `__file__`, and what `inspect` finds of its classes.

A script's `__file__` names its folder, and libraries look there (Hydra for its configuration). They take a program
without one for a person who types, and they read classes' sources from it. A cell's is `In[3].py` in the working
directory. No such file is written: Python reads the lines from `linecache`, where IPython keeps them.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import linecache
import os
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any


class CellFiles:
    """The names of a worker's cells as files; `shown` holds what reports call them: `Cell In[3]`."""

    def __init__(self) -> None:
        self.shown: dict[str, str] = {}
        self._codes: dict[str, str] = {}
        self._namespace: dict[str, Any] = {}
        self._named = True

    def install(self, shell: Any) -> None:
        self._namespace = shell.user_ns
        shell.compile.get_code_name = self._name
        reader: Any = inspect
        reader.getfile = _finding(inspect.getfile, self)

    def begin(self) -> None:
        """The next code that is compiled is a cell of its own, not a part that a magic runs."""
        self._named = False

    def is_one(self, path: object) -> bool:
        return path in self.shown

    def of_class(self, cls: type) -> str:
        """In which cell a class was defined; empty if that is not known."""
        for value in vars(cls).values():
            function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
            if isinstance(function, FunctionType) and function.__qualname__.startswith(f"{cls.__qualname__}."):
                file = function.__code__.co_filename
                if not file.startswith("<"):  # as what a dataclass makes
                    return file
        defines = re.compile(rf"\s*class\s+{re.escape(cls.__name__)}\b")
        found = (file for file in reversed(self.shown) if any(map(defines.match, linecache.getlines(file))))
        return next(found, "")

    def _name(self, raw_code: str, transformed_code: str, number: int) -> str:
        """The file of a piece of code, for IPython's compiler."""
        name, digest = f"In[{number}]", hashlib.sha256(transformed_code.encode("utf-8", "replace")).hexdigest()
        if self._codes.setdefault(name, digest) != digest:  # outside of notebooks cells have no numbers
            name = f"{name}.{digest[:8]}"
        try:
            path = os.path.join(os.getcwd(), f"{name}.py")
        except FileNotFoundError:  # the working directory is gone
            path = f"{name}.py"
        self.shown.pop(path, None)
        self.shown[path] = f"Cell In[{number}]"  # the newest is last
        if not self._named:
            self._namespace["__file__"], self._named = path, True
        return path


def _finding(getfile: Callable[[Any], str], files: CellFiles) -> Callable[[Any], str]:
    """`inspect.getfile` that knows in which cell a class was defined: Python asks `__main__`, which is the last one."""

    @functools.wraps(getfile)
    def in_cells(object: Any) -> str:  # noqa: A002  # as its caller may name it
        found = getfile(object)
        if inspect.isclass(object) and files.is_one(found):
            return files.of_class(object) or found
        return found

    return in_cells
