"""An exercise and the answer to it: one line that says `ok`, or names the mistake and its cause.

An exercise never raises for what a learner hands in. Whatever stops its judge (a function that raises, hangs or
does not return) reaches it as `Wrong`, whose text is the line. Pure: no torch, no IPython.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from nbddp.lessons.framework.folders import hints

OK = "ok"


class Wrong(Exception):
    """The mistake in a submission, as one line for the learner."""


@dataclass(frozen=True)
class Answer:
    """The result of a check. It is true if the answer is right.

    - `ok` (bool); `line` (str): `ok`, or the mistake. `hint` (str): the hint that `hint=True` adds, or empty.
    - `cost` (str): the variables that ranks have lost by the check, and the cells that create them again; or empty.
    - `verified` (str): of a right answer, the reference that it was compared with.
    """

    ok: bool
    line: str
    hint: str = ""
    cost: str = ""
    verified: str = ""
    parts: tuple[str, ...] = ()

    def describe(self) -> str:
        """The shown text: `ok: ` and the reference, or the line, its cost, and the hint."""
        line = f"{self.line}: {self.verified}" if self.ok and self.verified else self.line
        return "\n".join(filter(None, [*(self.parts or [line]), self.cost, self.hint]))

    def __bool__(self) -> bool:
        return self.ok

    def _ipython_display_(self) -> None:
        """Shows nothing: the check has shown it."""


Watch = Callable[[str], AbstractContextManager[list[str]]]
_watch: list[Watch] = [lambda words: nullcontext([])]


def watched_by(watch: Watch) -> None:
    """Have `watch` show that a check runs: it is entered with words for it, and left when there is an answer. The list
    that it gives has what the check has cost, in sentences."""
    _watch[:] = [watch]


Show = Callable[[Answer], None]
_show: list[Show] = [lambda answer: print(answer.describe())]


def shown_by(show: Show) -> None:
    """Have `show` put answers where a learner sees them."""
    _show[:] = [show]


class Exercise:
    """Something a learner writes, and the check of it.

    judge: what was handed in → the line, `ok` if it is right; it may raise Wrong.
    hints: from the first nudge to nearly the solution; a lesson has them in its `hints.ini`.
    takes: what is handed in, in a word; `function` must be callable.
    verifies: what a right answer was compared with, in words that are the same in every run.
    """

    def __init__(
        self, name: str, judge: Callable[[Any], str], hints: Sequence[str] = (), takes: str = "function",
        verifies: str = "",
    ):  # fmt: skip
        self.name, self.judge, self.takes, self.verifies = name, judge, takes, verifies
        self._hints, self._given = tuple(hints), 0
        self.__name__ = name

    def __call__(self, handed_in: Any = None, *, hint: bool = False) -> Answer:
        """Run what was handed in, show the answer and return it; `hint=True` adds the next hint."""
        with _watch[-1](f"checking {self.name}") as costs:
            line = one_line(self._line(handed_in))
        hint_line = self._next_hint() if hint and line != OK else ""
        answer = Answer(line == OK, line, hint_line, "; ".join(costs), self.verifies if line == OK else "",
                        self.parts(line))  # fmt: skip
        _show[-1](answer)
        return answer

    def parts(self, line: str) -> tuple[str, ...]:
        """A line taken apart, for an answer that has several."""
        return ()

    def _line(self, handed_in: Any) -> str:
        if self.takes == "function" and not callable(handed_in):
            return f"hand in the function itself, without calling it: check.{self.name}({self.name})"
        try:
            return self.judge(handed_in)
        except Wrong as wrong:
            return str(wrong)

    @property
    def hints(self) -> tuple[str, ...]:
        return self._hints or hints()[self.name]

    def _next_hint(self) -> str:
        self._given = min(self._given + 1, len(self.hints))
        return f"hint {self._given} of {len(self.hints)}: {self.hints[self._given - 1]}"

    def __repr__(self) -> str:
        return f"check.{self.name}(your {self.takes}), with {len(self.hints)} hints: hint=True"


def not_written(name: str, raised: bool = False) -> str:
    """The line for a function that is still as the lesson has it. raised: it raised NotImplementedError."""
    if raised:
        return f"{name} raised NotImplementedError: you have not written it yet"
    return f"{name} returned None: you have not written it yet, or it has no return statement"


def mismatch(expected: object, got: object, why: str = "") -> str:
    """`expected 4, got 8; why`: how every check says that a value is not the right one."""
    return f"expected {expected}, got {got}" + (f"; {why}" if why else "")


def one_line(text: str) -> str:
    """Text without line breaks and runs of blanks."""
    return " ".join(text.split())
