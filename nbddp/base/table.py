"""A table that shows itself as aligned text and as HTML, and gives its columns and rows to those who count on. Knows
no matplotlib and no pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any


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
        cells = [self._written(row) for row in self.rows]
        widths = [max([len(h), *(len(row[i]) for row in cells)]) for i, h in enumerate(self.columns)]
        lines = [self.title] if self.title else []
        for row in [list(self.columns), *cells]:
            padded = (
                text.rjust(w) if self._numeric(i) else text.ljust(w)
                for i, (text, w) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  ".join(padded).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        head = "".join(self._cell(i, h, "th") for i, h in enumerate(self.columns))
        body = "".join(
            f"<tr>{''.join(self._cell(i, c) for i, c in enumerate(self._written(row)))}</tr>" for row in self.rows
        )
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _cell(self, column: int, text: str, tag: str = "td") -> str:
        side = "right" if self._numeric(column) else "left"
        return f'<{tag} style="text-align: {side}">{escape(text)}</{tag}>'

    def _numeric(self, column: int) -> bool:
        return bool(self.rows) and all(isinstance(row[column], int | float) for row in self.rows)
