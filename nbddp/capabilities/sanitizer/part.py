"""The quiet line under a run that trained with DDP, off by `%config DDPMagics.hints = False`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nbddp.protocol.codec import from_json
from nbddp.protocol.outcome import Outcome

if TYPE_CHECKING:
    from nbddp.execution.execution import Execution
    from nbddp.pool.state import PoolState


class HintsPart:
    """A pool's line about its runs, without a request. In a notebook the shell's `DDPMagics` has the setting."""

    def __init__(self, pool: PoolState):
        self._shell: Any = None

    def installed(self, shell: Any, pool: Callable[[], Any]) -> None:
        self._shell = shell

    def removed(self) -> None:
        self._shell = None

    def remarks(self, run: Execution, outcomes: Sequence[Outcome]) -> list[str]:
        """Where every rank has finished, and has said what it saw. A line on that goes out at once."""
        if not run.plain or not run.request.is_program:
            return []
        said = {rank: ended.outcome.parts.get("hints") for rank, ended in run.ended.items() if ended.outcome}
        if len(said) < len(run.specs) or not all(said.values()) or not self._wanted():
            return []
        from nbddp.capabilities.sanitizer.hints import RankHints, line

        option = "%%ddp --sanitize" if run.request.program is None else "--sanitize"
        found = line({rank: from_json(RankHints, each) for rank, each in said.items() if each}, option)
        if found:
            _say(run.display.screen, found)
        return []

    def _wanted(self) -> bool:
        settings = self._shell.configurables if self._shell is not None else ()
        return all(getattr(each, "hints", True) for each in settings if type(each).__name__ == "DDPMagics")


def _say(screen: Any, text: str) -> None:
    """Below the run's output; at a terminal on stderr, since stdout is the program's there."""
    from nbddp.output.screens import Terminal

    if isinstance(screen, Terminal):
        screen.ready()
        print(text, file=sys.stderr, flush=True)
    else:
        screen.say(text)
