"""Warnings that are errors (`-W error`, PYTHONWARNINGS) are so in the user's program, and not in what begins before it.

A process of ours puts them off as soon as it begins: what it imports ahead of a program, a plain process might never
import. A worker puts them back when its program can begin. A module of its own: what starts processes is run as
`__main__` in those that are spawned, and the worker imports it once more.
"""

from __future__ import annotations

import warnings
from typing import Any

ERROR, SHOWN = "error", "default"
_put_off: list[tuple[Any, ...]] = []


def put_off() -> None:
    """Have this process, and those that are forked from it, show what would be raised."""
    strict = [found for found in warnings.filters if found[0] == ERROR]
    _put_off.extend(strict)
    _replace({found: (SHOWN, *found[1:]) for found in strict})


def put_back() -> None:
    """Have raised again what `put_off` has found to be."""
    _replace({(SHOWN, *found[1:]): found for found in _put_off})
    _put_off.clear()


def _replace(by: dict[tuple[Any, ...], tuple[Any, ...]]) -> None:
    filters: Any = warnings.filters
    filters[:] = [by.get(found, found) for found in filters]
    with warnings.catch_warnings():  # has every module forget what it has shown
        pass
