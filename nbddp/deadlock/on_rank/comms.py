"""Whether a front end may call a program: callbacks of its widgets, and of other comms.

A rank that has ended its cell hears them. That a widget has a comm says nothing: a progress bar has some too. So what
it holds is looked through for functions of the program's, or of torch's. To be asked in the main thread, since whoever
held a widget elsewhere would let it die there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from IPython import get_ipython

from nbddp.deadlock.on_rank import frames

DISPATCHER = "CallbackDispatcher"  # ipywidgets' class for lists of callbacks


def acts() -> list[str]:
    """What may call, in words."""
    manager = getattr(getattr(get_ipython(), "kernel", None), "comm_manager", None)
    comms = list(manager.comms.values()) if manager is not None else []
    seen: set[int] = set()
    return ["a callback of a widget"] * any(_may_call(one, seen) for comm in comms for one in _direct(comm))


def _may_call(function: Any, seen: set[int]) -> bool:
    """Whether what is called here is the program's or torch's, or belongs to an object that holds such a function."""
    if isinstance(function, functools.partial):
        return any(_may_call(one, seen) for one in (function.func, *function.args) if callable(one))
    call = function if isinstance(function, FunctionType | MethodType) else getattr(type(function), "__call__", None)  # noqa: B004
    code = getattr(call, "__code__", None)
    if isinstance(function, BuiltinMethodType) or (code is not None and _is_programs(code.co_filename)):
        return True
    holder = function.__self__ if isinstance(function, MethodType) else function
    if id(holder) in seen or isinstance(holder, FunctionType | type):
        return False
    seen.add(id(holder))
    return any(_may_call(one, seen) for one in (*_direct(holder), *_observers(holder)))


def _is_programs(file: str) -> bool:
    return frames.is_user(file, {}) or "/torch/" in file


def _held(holder: Any) -> list[Any]:
    return list(getattr(holder, "__dict__", {}).values())


def _direct(holder: Any) -> Iterator[Any]:
    """Functions that an object has, by themselves or in a list of callbacks, which may be a trait."""
    for value in _held(holder):
        if isinstance(value, FunctionType | MethodType | BuiltinMethodType | functools.partial):
            yield value
        for one in (value, *(value.values() if isinstance(value, dict) else ())):
            if type(one).__name__ == DISPATCHER:
                yield from one.callbacks


def _observers(holder: Any) -> Iterator[Any]:
    """What hears of the changes of traits: trait → kind of change → functions."""
    for kinds in (kinds for value in _held(holder) if isinstance(value, dict) for kinds in value.values()):
        for heard in kinds.values() if isinstance(kinds, dict) else ():
            yield from (one for one in heard if callable(one)) if isinstance(heard, list) else ()
