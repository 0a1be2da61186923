"""How long each lesson takes with a class: `python notebooks/minutes.py` prints the minutes, and those of writing.

An estimate, made the same way for every lesson and from its source alone; no class was timed. INSTRUCTORS.md has the
numbers and these rates in words, and a test compares them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import jupytext
from nbformat import NotebookNode

HERE = Path(__file__).parent
WORDS_A_MINUTE = 120  # a technical text, read or spoken with care
CELL, QUESTION = 1.0, 1.5  # minutes: run it and read its output; think, answer, compare
EXERCISE, LINE = 4.0, 1.0  # minutes: understand an exercise and its check; each line to write
ASK = re.compile(r"predict\.\w+\(")


@dataclass(frozen=True)
class Contents:
    """What takes time. lines: those that the solutions have and the exercises' stubs have not."""

    words: int
    cells: int
    questions: int
    exercises: int
    lines: int

    @property
    def writing(self) -> float:
        return self.exercises * EXERCISE + self.lines * LINE

    @property
    def whole(self) -> float:
        return self.words / WORDS_A_MINUTE + self.cells * CELL + self.questions * QUESTION + self.writing


def contents(book: NotebookNode) -> Contents:
    text = [c.source for c in book.cells if c.cell_type == "markdown"]
    code = [c for c in book.cells if c.cell_type == "code"]
    solutions, stubs = (sum(_lines(c.source) for c in code if tag in _tags(c)) for tag in ("solution", "exercise"))
    exercises = sum("exercise" in _tags(c) for c in code)
    return Contents(
        words=sum(len(t.split()) for t in text),
        cells=sum(not _tags(c) & {"prediction", "solution"} for c in code),
        questions=sum(len(ASK.findall(c.source)) for c in code if "prediction" in _tags(c)),
        exercises=exercises,
        lines=solutions - stubs + exercises,  # each stub has a line `...`
    )


def lessons() -> dict[str, Contents]:
    """By number: `"04"`."""
    paths = [HERE / "00-quickstart.ipynb", *sorted((HERE / "source").glob("*.py"))]
    return {path.name[:2]: contents(jupytext.read(path)) for path in paths}


def rounded(minutes: float) -> int:
    """To five minutes."""
    return 5 * round(minutes / 5)


def _tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", ()))


def _lines(source: str) -> int:
    return sum(bool(line.strip()) for line in source.splitlines())


if __name__ == "__main__":
    for number, found in lessons().items():
        print(number, rounded(found.whole), rounded(found.writing))
