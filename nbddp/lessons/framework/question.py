"""A question that a lesson asks before it shows the answer, and a learner's prediction. Pure.

A lesson's questions are in its `predictions.ini`, a section each. `nbddp.teach.predict` has them all, and
`lessons.framework.prompt` shows them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from configparser import SectionProxy
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from nbddp.errors import BadInput
from nbddp.lessons.framework.folders import sections

EXAMPLE = 8  # the answer to no question of the lessons


@dataclass(frozen=True)
class Question:
    """What is asked, and what came: a section of `predictions.ini`, which has options on one line, with | between them.

    name: under which it is in `predict`. asks: the question, a sentence that ends with "?".
    came: what is seen when the next cell has run, written as one of the options or as what would be typed.
    options: what to choose from; without any, the learner types a number if `came` is one, else any text.
    because: why it came, in a sentence; empty where the lesson's text says it.
    explored: the next cell shows an explorer, in which the learner has yet to look for the answer.
    seen: a regular expression that the output of the solved lesson's next cell matches, which is how the tests know
    that `came` is true; for an explorer, its words. Empty if a test of the lesson's own proves it.
    fails: for a next cell that fails on purpose, a regular expression that its error (`NameError: …`) matches. Any
    other failure is the learner's, and shows no answer.
    """

    name: str
    asks: str
    came: str
    options: Sequence[str] = ()
    because: str = ""
    explored: bool = False
    seen: str = ""
    fails: str = ""

    def __post_init__(self) -> None:
        if self.options and self.came not in self.options:
            raise ValueError(f"{self.name}: {self.came!r} is none of the options")

    @property
    def numeric(self) -> bool:
        """Whether a number is to be typed."""
        return not self.options and _number(self.came) is not None

    def expects(self) -> str:
        """What an answer must be, as a sentence."""
        if self.options:
            return f"Choose one of {', '.join(map(repr, self.options))}"
        return f"Type a number, for example {EXAMPLE}" if self.numeric else "Type a word"

    def read(self, answer: object) -> str:
        """An answer as it is kept. Raises BadInput for one that is none of the options, no number, or empty."""
        text = " ".join(str(answer).split())
        if self.options:
            found = next((option for option in self.options if _plain(option) == _plain(text)), "")
        else:
            found = text if not self.numeric or _number(text) is not None else ""
        if not found:
            raise BadInput(f"predict.{self.name}({answer!r}): {self.expects()}")
        return found

    def meant(self, failure: BaseException | None) -> bool:
        """Whether a next cell that ended with `failure` has shown what it is to show."""
        return failure is None or bool(self.fails and re.search(self.fails, f"{type(failure).__name__}: {failure}"))

    def met(self, answer: str) -> bool:
        """Whether what was predicted came. Numbers are compared as numbers."""
        if self.numeric:
            return _number(answer) == _number(self.came)
        return _plain(answer) == _plain(self.came)

    def describe(self) -> str:
        """The question, and what can be answered."""
        options = "\n".join(f"  ○ {option}" for option in self.options)
        return f"Predict: {self.asks}\n{options}" if options else f"Predict: {self.asks}"

    def verdict(self, answer: str, late: bool = False) -> str:
        """What came beside what was predicted, in a line, and why. late: it was answered after the cell had run, or
        not at all."""
        if not answer:
            return self.shown()
        if late:
            met = f"{'✓' if self.met(answer) else '✗'} {self.came}; after the cell you answered {answer}"
        else:
            met = f"✓ {self.came}, as you predicted" if self.met(answer) else f"✗ {self.came}; you predicted {answer}"
        return "\n".join(filter(None, [met, self.because]))

    def shown(self) -> str:
        """What came, and why, for a reader who predicted nothing."""
        return "\n".join(filter(None, [f"What came: {self.came}", self.because]))

    def compared(self, answer: str, late: bool = False) -> str:
        """The question, and its verdict."""
        return f"{self.asks}\n{self.verdict(answer, late)}"


def questions(path: Path) -> list[Question]:
    """The questions in a file."""
    parser = sections(path)
    return [_question(parser[name]) for name in parser.sections()]


def _question(section: SectionProxy) -> Question:
    lines = {key: text for key, text in section.items() if key not in ("options", "explored")}
    options = tuple(section["options"].split(" | ")) if "options" in section else ()
    return Question(section.name, options=options, explored=section.getboolean("explored", fallback=False), **lines)


def _number(text: str) -> float | None:
    """The finite number that a text is, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
