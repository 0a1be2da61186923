"""Answers to the lessons' exercises as data, a module per lesson: which line a wrong one gets, and which are right.

`tests/lessons/test_exercises.py` runs them all on real ranks.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """Answers to the exercise `name`.

    write: makes the source of each row that does not define `name` itself.
    wrong: row → what its line says, or several such texts. right: rows that pass, as the lesson's solution does.
    unwritten: what the line says of the exercise as the lesson gives it.
    every, marker: each nth wrong answer always runs, the others run with the marker.
    verified: what a right answer is compared with.
    """

    name: str
    write: Callable[[str], str] = str
    wrong: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    right: Sequence[str] = ()
    unwritten: str = "have not written"
    every: int = 1
    marker: str = "more"
    nproc: int = 2
    verified: str = ""

    def source(self, row: str) -> str:
        """The whole answer."""
        defines = re.search(rf"^\s*(def|class) {self.name}\b", row, re.MULTILINE)
        return row if defines else self.write(row)

    def says(self, row: str) -> tuple[str, ...]:
        """What the line of a wrong answer must say."""
        texts = self.wrong[row]
        return (texts,) if isinstance(texts, str) else texts

    @property
    def slow(self) -> bool:
        """Whether only one other right answer always runs."""
        return self.every > 9


def within(code: str) -> Callable[[str], str]:
    """Rows stand in place of the last `...` of some code."""
    before, _, after = code.rpartition("...")
    return lambda row: f"{before}{row}{after}"


def tables() -> dict[str, list[Table]]:
    """Lesson, such as "01" → its tables."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        values = vars(importlib.import_module(f"{__name__}.{module.name}")).values()
        found[module.name[1:3]] = [value for value in values if isinstance(value, Table)]
    return found
