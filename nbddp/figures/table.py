"""A table that shows itself as aligned text and as HTML, and gives its columns and rows to those who count on. Knows
no matplotlib and no pool.

A column of numbers and quantities ("272 MiB", "1.2 s", "–" for none) ends at the right; its units begin on one line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

NOTHING = ("", "–", "?", "none", "no limit")  # in the place of a number
UNITS = r"%|×|ns|µs|ms|s|m|h|(?:[KMGT]i?)?B(?:/s)?|[KMGT]?b/s|[KMGT]bit/s|W|°C"  # of times, sizes, speeds and shares
QUANTITY = re.compile(rf"([<>≤≥~≈±+−-]?(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?)(?: ?({UNITS}))?")


def is_numeric(column: Sequence[object], written: Sequence[str]) -> bool:
    """Whether a column has numbers and quantities alone."""
    return any(text not in NOTHING for text in written) and all(
        isinstance(value, int | float) or text in NOTHING or QUANTITY.fullmatch(text) is not None
        for value, text in zip(column, written, strict=True)
    )


def lined_up(column: Sequence[str]) -> list[str]:
    """Numbers and quantities, all as wide: numbers end on one line, and their units begin on one."""
    found = [QUANTITY.fullmatch(text) for text in column]
    unit = max((len(m[2]) for m in found if m and m[2]), default=0)
    padded = [text + " " * (unit - len(m[2])) if m and m[2] else text for m, text in zip(found, column, strict=True)]
    width = max(map(len, padded), default=0)
    return [text.rjust(width) for text in padded]


@dataclass(frozen=True)
class Table:
    """`rows` has one sequence per row, as long as `columns`. `formats` says how a column's values are written.

    `table["size"]` is a column, `len(table)` the number of rows, iterating gives a dict per row, and
    `to_pandas()` a DataFrame where pandas is installed; the values are those of `rows`, not their words.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    formats: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> list[object]:
        """A column's values. Raises KeyError for a name that is none."""
        if column not in self.columns:
            raise KeyError(f"there is no column {column}; the columns are {', '.join(self.columns)}")
        at = list(self.columns).index(column)
        return [row[at] for row in self.rows]

    def __iter__(self) -> Iterator[dict[str, object]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def to_pandas(self) -> Any:
        """The same as a pandas DataFrame. Raises ImportError where pandas is not installed."""
        import pandas

        return pandas.DataFrame([list(row) for row in self.rows], columns=list(self.columns))

    def _written(self, row: Sequence[object]) -> list[str]:
        return [self.formats.get(name, str)(value) for name, value in zip(self.columns, row, strict=True)]

    def __repr__(self) -> str:
        columns = self._columns()
        parts = []
        for head, column, numeric in zip(self.columns, columns, self._numeric(columns), strict=True):
            body = lined_up(column) if numeric else column
            width = max(map(len, [head, *body]))
            parts.append([text.rjust(width) if numeric else text.ljust(width) for text in [head, *body]])
        lines = ["  ".join(row).rstrip() for row in zip(*parts, strict=True)]
        return "\n".join([self.title] * bool(self.title) + lines)

    def _columns(self) -> list[list[str]]:
        """Every column as it is written."""
        return [[row[i] for row in map(self._written, self.rows)] for i in range(len(self.columns))]

    def _numeric(self, columns: Sequence[Sequence[str]]) -> list[bool]:
        return [is_numeric([row[i] for row in self.rows], column) for i, column in enumerate(columns)]

    def _repr_html_(self) -> str:
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        columns = self._columns()
        numeric = self._numeric(columns)
        head = "".join(map(_cell, self.columns, numeric, ["th"] * len(columns)))
        rows = zip(*columns, strict=True) if columns else []
        body = "".join(f"<tr>{''.join(map(_cell, row, numeric))}</tr>" for row in rows)
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str, numeric: bool, tag: str = "td") -> str:
    side, words = ("right", escape(text).replace(" ", "&nbsp;")) if numeric else ("left", escape(text))
    return f'<{tag} style="text-align: {side}">{words}</{tag}>'
