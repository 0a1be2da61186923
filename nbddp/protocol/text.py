"""Text as it is sent and read: a cell's rows, and lone surrogates. Pure."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

# -- lone surrogates --------------------------------------------------------------------------------

# Lone surrogates: a `str` may hold them and UTF-8 does not. Python makes them of a file's name that is no UTF-8 (PEP
# 383), and a program may cut a pair in two.


NAME, FILE = 500, 4096  # characters of a name and of a file's path; Linux has no longer paths


def plain(text: str) -> str:
    """`text` as it can be sent and shown: each lone surrogate as its escape."""
    return str.encode(text, "utf-8", "backslashreplace").decode()


def name_of(text: str) -> str:
    """What a program calls something, such as a function or a thread, as it can be sent and shown: it may be of any
    size."""
    return plain(text if len(text) <= NAME else f"{text[:NAME]}…")


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


# -- rows of a cell ---------------------------------------------------------------------------------

WORD = re.compile(r"\s*(\w*)")
SILENCED = re.compile(r"#\s*nbddp:\s*ok\b", re.IGNORECASE)


def is_silenced(text: str) -> bool:
    """Whether a line of a text has the comment `# nbddp: ok`, which silences findings."""
    return SILENCED.search(text) is not None


def program_rows(text: str) -> list[int]:
    """Which rows of a text are neither empty nor comments."""
    rows = enumerate(map(str.strip, text.splitlines()))
    return [i for i, row in rows if row and not row.startswith("#")]


def first_word(row: str) -> str:
    """What IPython takes for the name of a magic whose % is left out."""
    found = WORD.match(row)
    return found[1] if found else ""
