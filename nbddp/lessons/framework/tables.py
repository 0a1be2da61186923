"""Judging a function by a table: its answers for many arguments, against the right ones and the known mistakes.

A wrong answer is explained by the mistake that would give exactly the learner's whole table; only if none does, by
the first case that differs. Pure: imports only the standard library and `nbddp.lessons.framework.answer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbddp.lessons.framework.answer import OK, mismatch, not_written

ADVICE = {  # Python's message → advice
    "slice indices must be integers": "/ gives a float, // a whole number",
    "'float' object cannot be interpreted as an integer": "/ gives a float, // a whole number",
    "not float": "/ gives a float, // a whole number",
    "EOF when reading a line": "input() does not work on a rank; the arguments contain all that is needed",
    "Default process group has not been initialized": "no communication is needed; the arguments contain everything",
    "but 2 were given": "keep the arguments as the lesson has them",
    "but 3 were given": "keep the arguments as the lesson has them",
}
Case = tuple[Any, ...]
Mistakes = Mapping[str, Callable[..., Any]]  # what to say → what a wrong way to do it gives for a case
Outcome = tuple[str, Any]  # ("value", plain data), ("unwritten", None) or ("raised", "ValueError: text")


@dataclass(frozen=True)
class TableExercise:
    """An exercise of this kind. `right(*case)` is the right answer; `why_wrong(case, answer)` explains a single
    answer that no known mistake gives, or is empty. exact: whether 6.0 is wrong where 6 is right."""

    name: str
    cases: Sequence[Case]
    right: Callable[..., Any]
    mistakes: Mistakes = field(default_factory=dict)
    why_wrong: Callable[[Case, Any], str] = lambda case, answer: ""
    exact: bool = True

    def judge(self, by_rank: Mapping[int, Sequence[Outcome]]) -> str:
        """The line for what every rank answered; one outcome per case."""
        ranks = sorted(by_rank)
        first = by_rank[ranks[0]]
        return unwritten(self.name, first) or depends(self.name, self.cases, by_rank) or self._line(first)

    def _line(self, outcomes: Sequence[Outcome]) -> str:
        for case, outcome in zip(self.cases, outcomes, strict=True):
            kind, value = outcome
            if kind != "value":
                return f"{self.call(case)} {_gave(outcome)}"
            right = self.right(*case)
            if not (same(value, right) or (not self.exact and type(value) is float and value == right)):
                why = self._mistake(outcomes) or nothing(value) or self.why_wrong(case, value)
                return f"{self.call(case)}: {mismatch(repr(right), repr(value), why)}"
        return OK

    def _mistake(self, outcomes: Sequence[Outcome]) -> str:
        for words, would in self.mistakes.items():
            if all(k == "value" and same(v, would(*c)) for c, (k, v) in zip(self.cases, outcomes, strict=True)):
                return words
        return ""

    def call(self, case: Case) -> str:
        return call(self.name, case)


def unwritten(name: str, outcomes: Sequence[Outcome]) -> str:
    """The line for a function that answers no case; empty if it answers one."""
    if all(kind != "raised" and value is None for kind, value in outcomes):
        return not_written(name, outcomes[0][0] == "unwritten")
    return ""


def call(name: str, case: Case) -> str:
    """`gpus_of(4, 4, 1)`."""
    return f"{name}({', '.join(map(repr, case))})"


def depends(name: str, cases: Sequence[Case], by_rank: Mapping[int, Sequence[Outcome]]) -> str:
    """The line for a function that answers otherwise on another rank; empty if all ranks answer alike."""
    (one, ones), *others = sorted(by_rank.items())
    for other, theirs in others:
        for case, a, b in zip(cases, ones, theirs, strict=True):
            if not same(a, b):
                return (
                    f"{call(name, case)} {_gave(a)} on rank {one} and {_gave(b)} on rank {other}: the result "
                    "must depend only on the arguments, not on the rank or on random numbers"
                )
    return ""


def same(a: object, b: object) -> bool:
    """Equal plain data of equal types: 1, 1.0 and True are three things."""
    return repr(a) == repr(b)


def raised(text: Any) -> str:
    """`raised EOFError: ...`, with what to do where the error does not say it."""
    advice = next((advice for says, advice in ADVICE.items() if says in str(text)), "")
    return f"raised {str(text).rstrip('.!')}; {advice}" if advice else f"raised {text}"


def nothing(value: Any) -> str:
    """What to add where a function that does answer other cases gave no value; else empty."""
    return "here the function ends without a value to return" if value is None else ""


def _gave(outcome: Outcome) -> str:
    kind, value = outcome
    return f"is {value!r}" if kind == "value" else raised(value)
