"""Lone surrogates: a `str` may hold them and UTF-8 does not. Python makes them of a file's name that is no UTF-8 (PEP
383), and a program may cut a pair in two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def plain(text: str) -> str:
    """`text` as it can be sent and shown: each lone surrogate as its escape."""
    return str.encode(text, "utf-8", "backslashreplace").decode()


def plain_in(value: Any) -> Any:
    """What a message holds, with all its text plain."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain_in(key): plain_in(each) for key, each in value.items()}
    return [plain_in(each) for each in value] if isinstance(value, list | tuple) else value


def shown(pack: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """`pack`, which makes bytes of a message, for one that somebody will read: it is sent whatever text is in it."""

    @functools.wraps(pack)
    def packed(message: Any) -> bytes:
        try:
            return pack(message)
        except UnicodeEncodeError:
            return pack(plain_in(message))

    return packed
