"""The text of the notebook's cells that functions come from. Ranks have no file of it: without its text a traceback
there shows no lines, and calls the cell by a path."""

from __future__ import annotations

import functools
import linecache
import os
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

MOST = 500  # objects that are looked at


def sources_of(values: Iterable[Any], shell: Any = None) -> list[tuple[str, str, str]]:
    """File, name and text of each cell that has code of these functions, or of others that they use. The name is empty
    if the shell knows none."""
    found: dict[str, tuple[str, str, str]] = {}
    for code in _codes(values):
        file = code.co_filename
        if file not in found:
            text = "".join(linecache.getlines(file))
            found[file] = file, _name(file, shell), text
    return [source for source in found.values() if source[2]]


def _name(file: str, shell: Any) -> str:
    named = getattr(getattr(shell, "compile", None), "format_code_name", None)  # IPython 7 has none
    return " ".join(named(file) or ()) if named is not None else ""


def _codes(values: Iterable[Any]) -> Iterator[CodeType]:
    """The code that has no file: of the functions, then of what their globals, closures and classes lead to."""
    left = list(values)
    seen = set(map(id, left))
    while left and len(seen) < MOST:
        at = left.pop()
        if isinstance(at, FunctionType) and not os.path.exists(at.__code__.co_filename):
            yield at.__code__
        for other in _used(at):
            if id(other) not in seen and isinstance(other, FunctionType | MethodType | type | functools.partial):
                seen.add(id(other))
                left.append(other)


def _used(at: Any) -> Iterator[Any]:
    """What an object of a cell leads to; what lies in a file on disk leads nowhere."""
    if isinstance(at, MethodType):
        yield at.__func__
    elif isinstance(at, functools.partial):
        yield at.func
    elif isinstance(at, type):
        if at.__module__ == "__main__":
            yield from (getattr(value, "__func__", value) for value in vars(at).values())
            yield from at.__bases__
    elif not isinstance(at, FunctionType):
        yield type(at)
    elif not os.path.exists(at.__code__.co_filename):
        yield getattr(at, "__wrapped__", None)
        yield from (at.__globals__.get(name) for name in _names(at.__code__))
        for cell in at.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # it has no value yet
                continue


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
