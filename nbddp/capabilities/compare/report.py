"""The answer of `%ddp compare`: in words, with a table of what differs, and usable in code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from nbddp.capabilities.compare.replicas import Compared, Difference, agreeing_words, largest_words, shown_words
from nbddp.output.table import Table

MOST_ROWS = 20


@dataclass(frozen=True, repr=False)
class Report(Table):
    """`equal`: True if all names are equal on all ranks. `compared` has each name's details.

    `rows` are those of the first 20 differences; `title` is the words above them, `more` those below.
    """

    compared: Sequence[Compared] = field(default_factory=tuple)
    more: str = ""

    @property
    def equal(self) -> bool:
        return all(c.equal for c in self.compared)

    def __repr__(self) -> str:
        if not self.rows:
            return self.title
        return "\n".join([self.title, "", repr(Table(self.columns, self.rows)), *([self.more] if self.more else [])])

    def _repr_html_(self) -> str:
        words = "<br>".join(escape(line) for line in self.title.splitlines())
        if not self.rows:
            return f"<div>{words}</div>"
        return f"<div>{words}</div>{Table(self.columns, self.rows)._repr_html_()}<div>{escape(self.more)}</div>"


def report(compared: Sequence[Compared]) -> Report:
    """The report on some names."""
    found = [(c, d) for c in compared for d in c.differences()]
    references = {d.reference for _, d in found}
    columns, rows = _columns(found, references), [_row(c, d, len(compared), references) for c, d in found[:MOST_ROWS]]
    left = len(found) - len(rows)
    words = "\n".join(c.words() for c in compared)
    return Report(columns, rows, words, compared=tuple(compared), more=f"and {left} more" if left else "")


def _columns(found: Sequence[tuple[Compared, Difference]], references: set[int]) -> list[str]:
    agree = f"agree with rank {min(references)}" if len(references) == 1 else "agree"
    tensors = all(d.leaf.norm is not None for _, d in found)
    return ["name", "shape", agree, "largest difference", "norms" if tensors else "norms or values"]


def _row(compared: Compared, d: Difference, names: int, references: set[int]) -> list[str]:
    """One difference under `_columns`. Parts of sharded tensors have references of their own, which are told."""
    name = f"{compared.name}{'.' * (not d.path.startswith('['))}{d.path}" if d.path and names > 1 else d.path
    agree = agreeing_words(d) if len(references) == 1 else f"with rank {d.reference}: {agreeing_words(d)}"
    if d.why:
        return [name or compared.name, d.why, agree, "", ""]
    measured = d.leaf.norm is not None or d.largest is not None
    apart = largest_words(d.largest) if measured else ""
    return [name or compared.name, d.leaf.words, agree, apart, shown_words(d.shown)]
