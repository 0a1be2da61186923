"""Lines for the debuggers of a run's ranks: on their way there, and asked for where a keyboard is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbddp.capabilities.debugger.prompt import Keyboard, Prompt
from nbddp.capabilities.debugger.transcript import Transcripts
from nbddp.deadlock.positions import Position
from nbddp.protocol.run_spec import Question, Reply

if TYPE_CHECKING:
    from nbddp.execution.execution import Execution

NAME = "debugger"


class DebugSender:
    """Of one run, in its own thread but for `names`. `debugged`: what the ranks say."""

    def __init__(self, run: Execution, keyboard: Keyboard | None):
        """keyboard: where lines for ranks that stop are typed, besides by `send`."""
        self._run = run
        self.debugged = Transcripts()
        run.kept[NAME] = self
        if keyboard is not None:
            prompt = Prompt(self, keyboard)
            self.debugged.views["prompt"] = prompt.told
            run.looks.append(lambda: self._ask_if_due(prompt))
            run.ends.append(prompt.close)
            run.display.around, run.display.held = prompt.aside, lambda: prompt.open

    # -- for the prompt (`capabilities.debugger.prompt.Running`) ---------------------------------------------------

    def running(self) -> tuple[int, ...]:
        return self._run.running()

    @property
    def positions(self) -> Mapping[int, Position]:
        return self._run.positions

    @property
    def looked_at(self) -> float:
        return self._run.looked_at

    def stop(self) -> None:
        self._run.stop()

    def send_line(self, ranks: Sequence[int], line: str) -> None:
        """A line for the debuggers of these ranks, as far as they wait for one."""
        at_work = self.running()
        waiting = [r for r in ranks if r in self.debugged.stopped and r in at_work]
        self.debugged.sent(waiting, line)
        for rank in set(ranks) & set(self.debugged.talks) - set(waiting):
            self.debugged.refused(rank, line)

        def hear(rank: int, reply: Reply) -> None:
            if not reply.answer and not reply.failed:
                self._run.events.put(("do", -1, lambda: self.debugged.refused(rank, line)))

        self._run.workers.look(waiting, Question.of("debug", line=line), hear)

    def names(self, rank: int, text: str, hear: Callable[[int, Any], None]) -> None:
        """What may complete a line for a rank's debugger; `hear(rank, names)` in another thread."""
        question = Question.of("debug_names", text=text)
        self._run.events.put(
            ("do", -1, lambda: self._run.workers.look([rank], question, lambda r, reply: hear(r, reply.answer)))
        )

    # -- for the run -----------------------------------------------------------------------------

    def _ask_if_due(self, prompt: Prompt) -> float | None:
        """Ask for a line for ranks that have stopped, if one is due; seconds until it may be."""
        if not self.debugged.talks:
            return None
        self._run.events.hear(prompt)
        return prompt.look(self._run.display.screen.ready, over=self._run.ladder.interrupted_at is not None)


def transcripts_of(run: Execution) -> Transcripts:
    """What the ranks of a run have said in their debuggers."""
    return run.kept[NAME].debugged if NAME in run.kept else Transcripts()


def send(run: Execution, ranks: Sequence[int], line: str) -> None:
    """A line for the debuggers of these ranks, as far as they wait for one; in any thread."""
    run.events.put(("do", -1, lambda: run.kept[NAME].send_line(ranks, line)))


def complete(run: Execution, rank: int, line: str, hear: Callable[[list[str]], None]) -> None:
    """Names that may complete a line for this rank's debugger; `hear(names)` in another thread."""
    run.kept[NAME].names(rank, line, lambda rank, names: hear(names if isinstance(names, list) else []))
