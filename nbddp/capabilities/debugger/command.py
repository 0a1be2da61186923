"""`%ddp debug`, and `%debug` and `%pdb on` after a cell that failed on a rank. They show the rank's frames with their
variables, and none of our own frames; a prompt where somebody can type, else all of it as text.

What failed is let go of at once (a frame would keep process groups and GPU memory alive). So the values were worded on
the rank when it failed (`worker.failure`); what the cell has set is still there. After any other error `%debug` is
IPython's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbddp.capabilities.debugger import stdin
from nbddp.capabilities.debugger.prompt import STOPS, Keyboard
from nbddp.capabilities.debugger.transcript import post_mortem
from nbddp.errors import BadInput, Cause, NbddpError, RunFailed, place
from nbddp.execution import report
from nbddp.launch.options import Parser
from nbddp.notebook.commands import Asked, CommandLine

if TYPE_CHECKING:
    from nbddp.pool.pool import WorkerPool


from collections.abc import Sequence

from nbddp.capabilities.debugger.transcript import ENDS, HELPS, last_word
from nbddp.errors import Frame

HELP = """\
w               list all frames, the newest last
u, d            go up or down a frame
l               show the source around the line
p x, x + 1      print a variable of this frame, or an expression of the cell's variables
a               print all variables of this frame
q               leave; %%ddp --ranks {rank} runs code on the rank"""
CELL = ("<module>", "<cell line")  # frames of a cell's own level, whose names the rank keeps
FIRST = "h for help, q to leave"


def arguments(parser: Parser) -> None:
    parser.epilog = (
        "In a %%ddp cell, breakpoint() stops the ranks and opens a prompt for all of them. n, s, r and c step them "
        "together, p x shows x on every rank, and @1 p x on rank 1. q stops the cell, and h lists all commands. If a "
        "panel is open (%ddp panel), its Debugger page is the prompt. After a failure, %ddp debug shows the frames of "
        "the rank that failed first. Its commands are w, u, d, l, p x, a and q. Without a prompt, it prints the frames."
    )


def show(asked: Asked, line: CommandLine) -> None:
    Debug(asked.shell, lambda: asked.pool).last()


class Debug:
    """Replaces one shell's `debugger`, which `%debug` and, under `%pdb on`, each error call. pool: the shell's."""

    def __init__(self, shell: Any, pool: Callable[[], WorkerPool]):
        self._shell, self._pool = shell, pool
        self._original: Callable[[bool], None] = shell.debugger

    def install(self) -> None:
        self._shell.debugger = self._debugger

    def remove(self) -> None:
        if self._shell.debugger == self._debugger:
            self._shell.debugger = self._original

    def last(self) -> None:
        """`%ddp debug`: of the last run. Raises BadInput if no rank failed in it."""
        run = self._pool().last_run
        error = run.error() if run is not None else None
        if not isinstance(error, RunFailed):
            raise BadInput("no rank failed in the last cell; breakpoint() in a %%ddp cell stops its ranks")
        self._show(error)

    def _debugger(self, force: bool = False) -> None:
        """After a %%ddp cell that failed: the failing rank's frames, with the values of their names. Else IPython's."""
        error = getattr(sys, "last_value", None)
        if not isinstance(error, RunFailed):
            self._original(force)
        elif force or self._shell.call_pdb:
            self._show(error)

    def _show(self, error: RunFailed) -> None:
        cause, typed = getattr(error, "cause", None), stdin.for_ranks(self._shell)
        if typed is None or not isinstance(cause, Cause):
            print(post_mortem(error))
            return
        dead = PostMortem(cause, lambda text: self._value(cause.rank, text))
        if not dead.frames:
            print(post_mortem(error))
            return
        print(error, dead.answer("l"), FIRST, sep="\n", flush=True)
        _converse(dead, typed)

    def _value(self, rank: int, expression: str) -> str:
        """Of an expression on a rank, in words; or why there is none."""
        try:
            return bytes(self._pool().answers("evaluate", [rank], text=expression)[rank][0]).decode()
        except NbddpError as e:
            return str(e)


def _converse(dead: PostMortem, typed: Keyboard) -> None:
    while True:
        try:
            answer = dead.answer(stdin.line(typed, f"rank {dead.rank} post-mortem> ", dead.names))
        except STOPS:
            return
        if answer is None:
            return
        print(answer, flush=True)


# -- the prompt, pure --------------------------------------------------------------------------------


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
        return f"{mark} {place(frame.file, frame.line, frame.name)}: {_text(frame)}"

    def _source(self) -> str:
        return "\n".join(report.frames_text([self.frame]))

    def _names(self) -> str:
        return (
            "\n".join(f"{name} = {words}" for name, words in self.frame.values)
            or "no variables of this frame are known"
        )

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
