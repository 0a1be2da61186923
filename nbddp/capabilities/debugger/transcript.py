"""Transcripts of ranks that are stopped in their debuggers, and the meaning of a line that a reader types. Pure: the
panel and the prompt of a terminal are views on it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nbddp.capabilities.debugger.messages import Stopped
from nbddp.errors import BadInput, RunFailed, place
from nbddp.execution import report
from nbddp.launch.options import rank_set
from nbddp.launch.topology import rank_words

PROMPT = "ddp> "  # before a line that was sent
MOST = 500  # lines of a transcript
ENDS = ("q", "quit", "exit", "EOF")  # lines that end the cell, as Stop does
CONTINUES = ("c", "cont", "continue")
HELPS = ("h", "help", "?")
HELP = """\
LINE            send LINE to all stopped ranks, and show their answers together
@1 LINE         send LINE only to rank 1; @0,2-3 LINE sends it to several ranks
@1              send the following lines to rank 1; @all sends them to all ranks again
n, s, r, c      go to the next line, step into a call, finish the function, continue
w, u, d, l, a   show the stack, go up or down a frame, show the source, show the arguments
p x, x + 1      print the value of an expression; b 12 sets a breakpoint at line 12
q               stop the cell, as Stop does; the variables on the ranks are kept
h COMMAND       show pdb's help on a command; an empty line repeats the last command"""


@dataclass(frozen=True)
class Talk:
    """One rank's. `stopped`: it waits for a line; `where`: at this place; `asked`: a line was sent, and its answer has
    not come; `lines`: what was said, with PROMPT before what was sent; `answer`: what was said to the last line.
    `line`, `source`, `variables`: the number of the line where it stands, the lines around, names and their values."""

    rank: int
    stopped: bool = False
    where: str = ""
    asked: bool = False
    lines: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    line: int = 0
    source: tuple[tuple[int, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class TypedLine:
    """A line as a reader types it. ranks: who gets it, as `@1 p x` says; None: nobody is named; empty: all (`@all`).
    text: what they get; empty where only ranks are named."""

    text: str
    ranks: tuple[int, ...] | None = None

    @property
    def ends(self) -> bool:
        """Whether it ends the cell."""
        return self.text in ENDS

    @property
    def goes_on(self) -> bool:
        """Whether who gets it goes on to the next breakpoint, if there is one."""
        return self.text in CONTINUES

    @property
    def asks_help(self) -> bool:
        return self.text in HELPS


def read(typed: str) -> TypedLine:
    """A typed line → what it asks for. Raises BadInput if it does not name ranks as `--ranks` does."""
    text = typed.strip()
    if not text.startswith("@"):
        return TypedLine(text)
    named, _, text = text[1:].partition(" ")
    if named == "all":
        return TypedLine(text.strip(), ())
    try:
        ranks = rank_set(named)
    except argparse.ArgumentTypeError:
        ranks = ()
    if not ranks:
        raise BadInput(f"@{named} names no ranks; write @1 p x, @0,2-3 p x or @all p x")
    return TypedLine(text.strip(), ranks)


def last_word(text: str) -> str:
    """What of a line is completed: a name, with its dots."""
    at = len(text)
    while at and (text[at - 1].isidentifier() or text[at - 1] in ".0123456789"):
        at -= 1
    return text[at:]


def folded(answers: Mapping[int, Sequence[str]]) -> list[tuple[list[int], Sequence[str]]]:
    """Ranks with equal answers together, in the order of the lowest of each; those that said nothing are left out."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, lines in sorted(answers.items()):
        if lines:
            groups.setdefault(tuple(lines), []).append(rank)
    return [(ranks, lines) for lines, ranks in groups.items()]


def chosen(stopped: Sequence[int], ranks: Sequence[int] | None) -> list[int]:
    """Who gets a line: those of these ranks (none or None: of all) that wait for one. Raises BadInput if none does."""
    found = [r for r in stopped if not ranks or r in ranks]
    if found:
        return found
    if not stopped:
        raise BadInput("no rank waits in a debugger")
    raise BadInput(f"{rank_words(ranks or ())} cannot take a line; stopped in the debugger: {rank_words(stopped)}")


class Transcripts:
    """All ranks of a run that have stopped. Changed in the run's own thread, and read in any. `views`: by name, what is
    called with a rank and the lines that it has said."""

    def __init__(self) -> None:
        self.talks: Mapping[int, Talk] = {}
        self.views: dict[str, Callable[[int, Sequence[str]], None]] = {}

    @property
    def stopped(self) -> list[int]:
        """Ranks that wait for a line."""
        return sorted(r for r, talk in self.talks.items() if talk.stopped)

    def heard(self, rank: int, message: Stopped) -> None:
        """A rank has stopped, has answered, or goes on."""
        where = place(*message.place) if message.place else ""
        talk = replace(
            self.talks.get(rank, Talk(rank)), stopped=message.stopped, where=where,
            line=message.place[1] if message.place else 0, source=message.source, variables=message.variables,
        )  # fmt: skip
        self._said(talk, tuple(message.said.splitlines()))

    def _said(self, talk: Talk, said: tuple[str, ...]) -> None:
        again = replace(talk, asked=False, lines=(*talk.lines, *said)[-MOST:], answer=(*talk.answer, *said))
        self.talks = {**self.talks, talk.rank: again}
        for told in list(self.views.values()):
            told(talk.rank, said)

    def sent(self, ranks: Sequence[int], line: str) -> None:
        """These ranks were sent a line."""
        for rank in ranks:
            talk = self.talks[rank]
            again = replace(talk, asked=True, answer=(), lines=(*talk.lines, f"{PROMPT}{line}")[-MOST:])
            self.talks = {**self.talks, rank: again}

    def refused(self, rank: int, line: str) -> None:
        """The rank no longer stood in its debugger when the line came: it was not read."""
        self._said(self.talks[rank], (f"rank {rank} continued before it read {line!r}",))


def post_mortem(error: RunFailed) -> str:
    """What `%debug` shows of a run that failed: the first failing rank's frames, and what its names held there."""
    cause = getattr(error, "cause", None)
    if cause is None or not cause.chain:
        return f"{error}\nNo rank raised an exception; %ddp stacks shows where the ranks were."
    lines = [str(error), ""]
    for frame in (f for raised in report.with_parts(cause.chain) for f in raised.frames if f.user):
        lines += [*report.frames_text([frame]), *(f"           {name} = {words}" for name, words in frame.values), ""]
    more = f"%%ddp --ranks {cause.rank} runs code on that rank, which keeps its variables"
    return "\n".join([*lines, f"{more}; %ddp stacks shows every rank."])
