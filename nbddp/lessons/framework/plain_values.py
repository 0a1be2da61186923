"""A value as plain data, which any process can read without the value's classes: numbers, text, lists and dicts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from numbers import Real
from typing import Any

from nbddp.protocol import pickling

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
TOLD = 200  # characters of a repr


@dataclass(frozen=True)
class Strange:
    """Stands for a value that is no plain data: its repr."""

    text: str

    def __repr__(self) -> str:
        return self.text


def plain(value: Any) -> Any:
    """None, bool, int, float, str, and lists and dicts of them; tensors and arrays as nested lists; tuples and ranges
    as lists; other real numbers as floats; anything else as Strange. Its text is the same in every run: no address in
    memory, sets in order."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple | range):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {plain(k) if isinstance(k, str | int) else pickling.describe(k): plain(v) for k, v in value.items()}
    if callable(getattr(value, "tolist", None)):
        return plain(value.tolist())
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, set | frozenset) and value:
        return Strange(f"{{{', '.join(sorted(repr(plain(v)) for v in value))}}}")
    return Strange(_told(value))


def _told(value: Any) -> str:
    """The same in every run, and short: without addresses, and nothing of what is in the environment."""
    if value is os.environ:
        return "os.environ"
    text = ADDRESS.sub("", pickling.describe(value))
    return text if len(text) <= TOLD else f"{text[:TOLD]}…"
