"""Lines for the debuggers of a run's ranks: on their way there, and asked for where a keyboard is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from nbddp.capabilities.debugger.prompt import Keyboard, Prompt
from nbddp.capabilities.debugger.transcript import Transcripts
from nbddp.execution.events import Events
from nbddp.execution.positions import Position
from nbddp.execution.watch import RankQuestions, RankWatcher
from nbddp.protocol.run_spec import Question, Reply


class DebugSender:
    """Of one run, in its own thread but for `names`. `debugged`: what the ranks say."""

    def __init__(self, workers: RankQuestions, watcher: RankWatcher, events: Events, stop: Callable[[], None]):
        self._workers, self._watcher, self._events, self.stop = workers, watcher, events, stop
        self.debugged = Transcripts()
        self._prompt: Prompt | None = None

    # -- for the prompt (`capabilities.debugger.prompt.Running`) ---------------------------------------------------

    def running(self) -> tuple[int, ...]:
        return self._watcher.running

    @property
    def positions(self) -> Mapping[int, Position]:
        return self._watcher.positions

    @property
    def looked_at(self) -> float:
        return self._watcher.looked_at

    def send_line(self, ranks: Sequence[int], line: str) -> None:
        """A line for the debuggers of these ranks, as far as they wait for one."""
        at_work = self.running()
        waiting = [r for r in ranks if r in self.debugged.stopped and r in at_work]
        self.debugged.sent(waiting, line)
        for rank in set(ranks) & set(self.debugged.talks) - set(waiting):
            self.debugged.refused(rank, line)

        def hear(rank: int, reply: Reply) -> None:
            if not reply.answer and not reply.failed:
                self._events.put(("do", -1, lambda: self.debugged.refused(rank, line)))

        self._workers.look(waiting, Question.of("debug", line=line), hear)

    def names(self, rank: int, text: str, hear: Callable[[int, Any], None]) -> None:
        """What may complete a line for a rank's debugger; `hear(rank, names)` in another thread."""
        question = Question.of("debug_names", text=text)
        self._events.put(
            ("do", -1, lambda: self._workers.look([rank], question, lambda r, reply: hear(r, reply.answer)))
        )

    # -- for the run -----------------------------------------------------------------------------

    def ask_by(self, keyboard: Keyboard) -> None:
        """Have lines for ranks that stop typed there."""
        self._prompt = Prompt(self, keyboard)
        self.debugged.views["prompt"] = self._prompt.told

    @property
    def asks(self) -> bool:
        """Whether a line is asked for; below the question nothing is drawn."""
        return self._prompt is not None and self._prompt.open

    def ask_if_due(self, ready: Callable[[], None], over: bool) -> float | None:
        """Ask for a line for ranks that have stopped, if one is due; seconds until it may be."""
        if self._prompt is None or not self.debugged.talks:
            return None
        self._events.hear(self._prompt)
        return self._prompt.look(ready, over)

    def aside(self) -> AbstractContextManager[None]:
        """While something is printed: the question is below it again."""
        return nullcontext() if self._prompt is None else self._prompt.aside()

    def close(self) -> None:
        """No line is wanted any more."""
        if self._prompt is not None:
            self._prompt.close()
