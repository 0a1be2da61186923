"""A prompt on a run that failed: the frames of the rank that failed first, with what their names held. Pure.

What failed on the rank was let go of, so a name of a function has the words that were written down when it failed. What
the cell itself has set is still on the rank, and expressions of it are evaluated there (`evaluate`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nbddp.capabilities.debugger.transcript import ENDS, HELPS, last_word
from nbddp.errors import Cause, Frame
from nbddp.execution import report

HELP = """\
w               all frames, the newest last
u, d            a frame up or down
l               source around the line
p x, x + 1      a name of this frame, or an expression of the cell's names, which the rank still has
a               all names of this frame
q               leave; %%ddp --ranks {rank} runs code on the rank"""
CELL = ("<module>", "<cell line")  # frames of a cell's own level, whose names the rank keeps
FIRST = "h for help, q to leave"


class PostMortem:
    """Of one cause. `at`: the frame that is looked at. evaluate: an expression → its value in words, on the rank."""

    def __init__(self, cause: Cause, evaluate: Callable[[str], str]):
        self.rank, self._evaluate = cause.rank, evaluate
        self.frames: Sequence[Frame] = [f for raised in cause.chain for f in raised.frames if f.user]
        self.at = len(self.frames) - 1

    @property
    def frame(self) -> Frame:
        return self.frames[self.at]

    def answer(self, typed: str) -> str | None:
        """What a line says; None if it ends the prompt."""
        command, _, rest = typed.strip().partition(" ")
        rest = rest.strip()
        if command in ENDS:
            return None
        if command in HELPS:
            return HELP.format(rank=self.rank)
        if command in ("u", "up", "d", "down"):
            return self._move(-1 if command[0] == "u" else 1)
        if command in ("w", "where", "bt"):
            return "\n".join(self._place(i) for i in range(len(self.frames)))
        if command in ("l", "ll", "list", "longlist"):
            return self._source()
        if command in ("a", "args", "locals") and not rest:
            return self._names()
        expression = rest if command in ("p", "pp", "print") and rest else typed.strip()
        return self._value(expression) if expression else ""

    def names(self, typed: str) -> list[str]:
        """What may stand in the place of the last word of a line."""
        word = last_word(typed)
        return [name for name, _ in self.frame.values if word and name.startswith(word)]

    def _move(self, by: int) -> str:
        if not 0 <= self.at + by < len(self.frames):
            return "this is the oldest frame" if by < 0 else "this is the newest frame"
        self.at += by
        return self._source()

    def _place(self, number: int) -> str:
        frame = self.frames[number]
        mark = ">" if number == self.at else " "
        return f"{mark} {report.place(frame.file, frame.line, frame.name)}: {_text(frame)}"

    def _source(self) -> str:
        return "\n".join(report.frames_text([self.frame]))

    def _names(self) -> str:
        return "\n".join(f"{name} = {words}" for name, words in self.frame.values) or "no names of this frame are known"

    def _value(self, expression: str) -> str:
        held = dict(self.frame.values)
        if self.frame.name.startswith(CELL):
            return self._evaluate(expression)
        if expression in held:
            return held[expression]
        gone = [name for name in _names_in(expression) if name in held]
        if not gone:
            return self._evaluate(expression)
        name = gone[0]
        return f"{name} was {held[name]}; its value was released with the frame, so expressions cannot use it"


def _text(frame: Frame) -> str:
    return next((text.strip() for number, text in frame.context if number == frame.line), "")


def _names_in(expression: str) -> Sequence[str]:
    try:
        return compile(expression, "<expression>", "eval").co_names
    except (SyntaxError, ValueError):  # the rank says why
        return ()
