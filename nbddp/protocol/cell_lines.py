"""A cell's text as rows."""

from __future__ import annotations

import re

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
