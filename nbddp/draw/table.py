"""A table that shows itself as aligned text and as HTML. Knows no matplotlib and no pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Table:
    """`rows` has one sequence per row, as long as `columns`."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""

    def __repr__(self) -> str:
        cells = [[str(c) for c in row] for row in self.rows]
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
        head = "".join(f"<th>{escape(h)}</th>" for h in self.columns)
        body = "".join(f"<tr>{''.join(self._cell(i, c) for i, c in enumerate(row))}</tr>" for row in self.rows)
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _cell(self, column: int, value: object) -> str:
        side = "right" if self._numeric(column) else "left"
        return f'<td style="text-align: {side}">{escape(str(value))}</td>'

    def _numeric(self, column: int) -> bool:
        return bool(self.rows) and all(isinstance(row[column], int | float) for row in self.rows)
