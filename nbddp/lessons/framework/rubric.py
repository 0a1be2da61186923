"""An exercise with several marks: each line of its rubric is met or not, for its own points, with the reason.

The answer is `ok` if every line is met. Otherwise its line has the points and all lines. `lines_of` takes them apart
again, so that a grader can show them one below the other. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nbddp.lessons.framework.answer import OK, Exercise, Wrong, one_line

MET, MISSED = "✓", "✗"
BETWEEN = " | "  # the lines of a rubric in one line


@dataclass(frozen=True)
class RubricItem:
    """One line: what is asked, the points it is worth, and why it is not met; empty if it is."""

    asks: str
    points: int
    why: str = ""

    @property
    def got(self) -> int:
        return 0 if self.why else self.points

    def describe(self) -> str:
        """`✓ 2/2 same weights on all ranks`."""
        why = f": {one_line(self.why).replace(BETWEEN, ' / ')}" if self.why else ""
        return f"{MISSED if self.why else MET} {self.got}/{self.points} {self.asks}{why}"


def summed(marks: Sequence[RubricItem]) -> str:
    """`13 of 16 points`."""
    return f"{sum(m.got for m in marks)} of {sum(m.points for m in marks)} points"


def line_of(marks: Sequence[RubricItem]) -> str:
    """All of it in one line; `ok` if every line is met."""
    if all(not m.why for m in marks):
        return OK
    return BETWEEN.join([summed(marks), *(m.describe() for m in marks)])


def lines_of(line: str) -> list[str]:
    """What `line_of` put into one line, line by line; empty if the line is no rubric's."""
    head, *rest = line.split(BETWEEN)
    return [*rest, head] if rest and head.endswith(" points") else []


class Rubric(Exercise):
    """An exercise whose `mark` gives the marks of what was handed in; it may raise Wrong, and then none is met."""

    def __init__(
        self, name: str, mark: Callable[[Any], Sequence[RubricItem]], asks: Sequence[RubricItem],
        takes: str = "function", verifies: str = "",
    ):  # fmt: skip
        self.mark, self.asks = mark, tuple(asks)
        super().__init__(name, self._marked, (), takes, f"{summed(asks)}{f', {verifies}' * bool(verifies)}")

    def _marked(self, handed_in: Any) -> str:
        try:
            return line_of(self.mark(handed_in))
        except Wrong as wrong:
            return line_of(none_met(self.asks, str(wrong)))

    def parts(self, line: str) -> tuple[str, ...]:
        """The marks one below the other, and their sum."""
        return tuple(lines_of(line))


def none_met(asks: Sequence[RubricItem], why: str) -> list[RubricItem]:
    """No line is met, for one reason: the first line has it."""
    first, *others = asks
    return [RubricItem(first.asks, first.points, why), *(RubricItem(m.asks, m.points, "not reached") for m in others)]
