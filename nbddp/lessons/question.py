"""A question that a lesson asks before it shows the answer, and what a learner predicted. Pure.

A lesson's questions are in its `predictions.py`; `nbddp.teach.predict` has them all, `lessons.asking` shows them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nbddp.errors import BadInput

NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Question:
    """What is asked, and what came.

    name: under which it is in `predict`. asks: the question, a sentence that ends with "?".
    came: what is seen when the next cell has run, written as one of the options or as what would be typed.
    options: what to choose from; without any, the learner types a number or a word.
    because: why it came, in a sentence; empty where the lesson's text says it.
    explored: the next cell shows an explorer, in which the learner has yet to look for the answer.
    seen: a regular expression that the output of the solved lesson's next cell matches, which is how the tests know
    that `came` is true; for an explorer, its words. Empty if a test of the lesson's own proves it.
    """

    name: str
    asks: str
    came: str
    options: Sequence[str] = ()
    because: str = ""
    explored: bool = False
    seen: str = ""

    def __post_init__(self) -> None:
        if self.options and self.came not in self.options:
            raise ValueError(f"{self.name}: {self.came!r} is none of the options")

    def read(self, answer: object) -> str:
        """An answer as it is kept. Raises BadInput for one that is none of the options, or empty."""
        text = " ".join(str(answer).split())
        if not self.options and text:
            return text
        same = [option for option in self.options if _plain(option) == _plain(text)]
        if not same:
            choices = f"one of {', '.join(map(repr, self.options))}" if self.options else "a number or a word"
            raise BadInput(f"predict.{self.name}({answer!r}): the answer is {choices}")
        return same[0]

    def met(self, answer: str) -> bool:
        """Whether what was predicted came. Numbers are compared as numbers."""
        if NUMBER.fullmatch(answer) and NUMBER.fullmatch(self.came):
            return float(answer) == float(self.came)
        return _plain(answer) == _plain(self.came)

    def words(self) -> str:
        """The question, and what can be answered."""
        options = "\n".join(f"  ○ {option}" for option in self.options)
        return f"Predict: {self.asks}\n{options}" if options else f"Predict: {self.asks}"

    def verdict(self, answer: str) -> str:
        """What came beside what was predicted, in a line, and why."""
        met = f"✓ {self.came}, as you predicted" if self.met(answer) else f"✗ {self.came}; you predicted {answer}"
        return "\n".join(filter(None, [met, self.because]))

    def compared(self, answer: str) -> str:
        """The question, and its verdict."""
        return f"{self.asks}\n{self.verdict(answer)}"


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
