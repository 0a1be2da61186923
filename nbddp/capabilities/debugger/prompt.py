"""A prompt for ranks that stand in their debuggers, where no panel is open. It appears in a terminal, a console, and
the box that `input()` opens in a notebook.

One view on a run's `Transcripts`. When all ranks that may stop have stopped, it prints their output, equal answers
once, and asks for a line. Meanwhile the run goes on to hear its ranks. Where lines come from is a `Keyboard`. Used in
the run's own thread alone, but for `complete`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from nbddp.capabilities.debugger import transcript
from nbddp.capabilities.debugger.transcript import Transcripts
from nbddp.deadlock.positions import Position
from nbddp.deadlock.proof import waiting_words
from nbddp.errors import BadInput, RankStatus
from nbddp.launch.topology import rank_words
from nbddp.output.layout import labelled

PATIENCE = 1.5  # seconds without news after which ranks that are still at work are not waited for
STEP = 10.0  # the same for ranks that make a step: the others would go on without them
NAMES_WITHIN = 1.0  # seconds in which a rank is to answer what names it has
FIRST = "a line goes to all stopped ranks, @1 p x to rank 1; n, s and c step; q ends the cell; h for help\n"
STOPS = (KeyboardInterrupt, EOFError)  # what ends the cell, as `q` does


class Keyboard(Protocol):
    """Where lines are typed. `open`: a line is asked for, and has not come."""

    open: bool

    def ask(self, prompt: str, complete: Callable[[str], Sequence[str]]) -> None:
        """Begin to ask for a line. complete: what may follow a text; may be called in another thread."""

    def hear(self, descriptor: int, seconds: float | None) -> str | None:
        """Wait until the descriptor can be read, the time is over (None: never), or a line has come; that line. Raises
        KeyboardInterrupt or EOFError for Ctrl-C and Ctrl-D."""

    def hide(self) -> None:
        """Something is about to be printed; `show` follows."""

    def show(self) -> None: ...

    def withdraw(self) -> None:
        """No line is wanted any more."""


class Running(Protocol):
    """What a prompt needs of a run."""

    debugged: Transcripts

    def running(self) -> tuple[int, ...]: ...
    @property
    def positions(self) -> Mapping[int, Position]: ...
    @property
    def looked_at(self) -> float: ...
    def send_line(self, ranks: Sequence[int], line: str) -> None: ...
    def stop(self) -> None: ...
    def names(self, rank: int, text: str, hear: Callable[[int, Any], None]) -> None: ...


class Prompt:
    """Of one run. `open`: a line is asked for."""

    def __init__(self, run: Running, keyboard: Keyboard):
        self._run, self._keyboard = run, keyboard
        self._said: dict[int, list[str]] = {}  # what ranks have said and has not been shown
        self._asked: frozenset[int] = frozenset()  # who got the last line
        self._steps: set[int] = set()  # who got a line that is no `continue`, and has not stopped since
        self._to: tuple[int, ...] = ()  # who gets a line that names nobody; empty: all
        self._last = ""
        self._helped = False
        self._news_at = 0.0

    @property
    def open(self) -> bool:
        return self._keyboard.open

    def told(self, rank: int, lines: Sequence[str]) -> None:
        """A rank has stopped, answered, or gone on."""
        self._news_at = time.monotonic()
        self._said.setdefault(rank, []).extend(lines)
        if self._run.debugged.talks[rank].stopped:
            self._steps.discard(rank)

    # -- when to ask ---------------------------------------------------------------------------

    def look(self, ready: Callable[[], None], over: bool) -> float | None:
        """Ask for a line if it is time to; seconds until it may be. ready: called before anything is shown. over: no
        line is wanted any more."""
        stopped = [] if over else self._stopped()
        if not stopped:
            self._keyboard.withdraw()
            return None
        if self.open:
            self._show()
            return None
        awaited = self._awaited(stopped)
        patience = STEP if self._steps.intersection(awaited) else PATIENCE
        left = self._news_at + patience - time.monotonic()
        if awaited and left > 0:
            return left
        ready()
        self._show()
        self._tell_the_others(stopped)
        self._ask(stopped)
        return None

    def _stopped(self) -> list[int]:
        at_work, talks = self._run.running(), self._run.debugged.talks
        return [r for r in self._run.debugged.stopped if r in at_work and not talks[r].asked]

    def _awaited(self, stopped: Sequence[int]) -> list[int]:
        """Ranks that may stop soon: those that make a step or got the last line, or all where none got one; without
        those of which a look since then says that they wait for another."""
        at_work = self._run.running()
        of = (self._steps | self._asked).intersection(at_work) if self._asked else set(at_work)
        fresh = self._run.looked_at > self._news_at
        blocked = {r for r, p in self._run.positions.items() if fresh and p.state == RankStatus.BLOCKED}
        return sorted(of.difference(stopped, blocked))

    def _ask(self, stopped: Sequence[int]) -> None:
        to = [r for r in stopped if not self._to or r in self._to]
        if not to:
            self._to, to = (), list(stopped)
        self._keyboard.ask(f"{rank_words(to)} {transcript.PROMPT}", self.complete)

    # -- what is shown -------------------------------------------------------------------------

    def _show(self) -> None:
        """The ranks' output since the last time."""
        said = transcript.folded(self._said)
        self._said.clear()
        width = max((len(rank_words(ranks)) for ranks, _ in said), default=0)
        self._print("".join(labelled(rank_words(ranks), width, lines) for ranks, lines in said))
        if said and not self._helped:
            self._helped = True
            self._print(FIRST)

    def _tell_the_others(self, stopped: Sequence[int]) -> None:
        """Where ranks are that make a step and do not stop with the others."""
        left = [r for r in self._run.running() if r not in stopped and r in self._steps]
        places = {r: [self._place(r)] for r in left}
        self._print("".join(f"{rank_words(ranks)}: {words}\n" for ranks, (words, *_) in transcript.folded(places)))

    def _place(self, rank: int) -> str:
        """Where a rank is that is still at work."""
        position = self._run.positions.get(rank)
        if position is None:
            return "still running"
        waits = waiting_words(position, self._run.positions)
        return ", ".join(filter(None, (position.where, waits or "still running")))

    def _print(self, text: str) -> None:
        if text:
            with self.aside():
                print(text, end="", flush=True)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While something is printed, also by others: the question is below it again."""
        self._keyboard.hide()
        try:
            yield
        finally:
            self._keyboard.show()

    # -- what is typed -------------------------------------------------------------------------

    def wait(self, descriptor: int, seconds: float | None) -> None:
        """As `events.ExtraPoller`: hear the keyboard until the descriptor can be read."""
        try:
            typed = self._keyboard.hear(descriptor, seconds)
        except STOPS:
            typed = transcript.ENDS[0]
        if typed is not None:
            self._take(typed)

    def close(self) -> None:
        """The run has ended."""
        self._keyboard.withdraw()

    def _take(self, typed: str) -> None:
        try:
            line = transcript.read(typed or self._last)
            if line.ends:
                self._run.stop()
            elif line.asks_help:
                print(transcript.HELP, flush=True)
            elif line.text:
                self._send(line)
                self._last = typed or self._last
            elif line.ranks is not None:
                self._to = line.ranks and tuple(transcript.chosen(self._stopped(), line.ranks))
        except BadInput as e:
            print(e, flush=True)

    def _send(self, line: transcript.TypedLine) -> None:
        ranks = transcript.chosen(self._stopped(), self._to if line.ranks is None else line.ranks)
        self._asked = frozenset(ranks)
        self._steps = self._steps.difference(ranks) if line.goes_on else self._steps.union(ranks)
        self._news_at = time.monotonic()
        self._run.send_line(ranks, line.text)

    def complete(self, typed: str) -> list[str]:
        """What may stand in the place of the last word of a line: names of the lowest rank's frame. In any thread."""
        stopped = self._stopped()
        with suppress(BadInput):
            line = transcript.read(typed)
            ranks = transcript.chosen(stopped, self._to if line.ranks is None else line.ranks)
            came: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._run.names(ranks[0], line.text, lambda rank, answer: came.put(answer))
            with suppress(queue.Empty):
                found = came.get(timeout=NAMES_WITHIN)
                return [str(name) for name in found] if isinstance(found, list) else []
        return []
