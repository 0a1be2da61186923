"""What ranks say that stand in their debuggers, and what they were told: a transcript for each. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbddp.run.report import place

PROMPT = "ddp> "  # before a line that was sent
MOST = 500  # lines of a transcript


@dataclass(frozen=True)
class Talk:
    """One rank's. `stopped`: it waits for a line; `where`: at this place; `asked`: a line was sent, and its answer has
    not come; `lines`: what was said, with PROMPT before what was sent; `answer`: what was said to the last line."""

    rank: int
    stopped: bool = False
    where: str = ""
    asked: bool = False
    lines: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()


class Debugged:
    """All ranks of a run that have stopped. Changed in the run's own thread, and read in any."""

    def __init__(self) -> None:
        self.talks: Mapping[int, Talk] = {}
        self.told: Callable[[], None] = lambda: None  # called when a rank has said something

    @property
    def stopped(self) -> list[int]:
        """Ranks that wait for a line."""
        return sorted(r for r, talk in self.talks.items() if talk.stopped)

    def heard(self, rank: int, content: Mapping[str, Any]) -> None:
        """A rank has stopped, has answered, or goes on."""
        talk = self.talks.get(rank, Talk(rank))
        said = tuple(str(content["said"]).splitlines())
        where = place(*content["place"]) if content["place"] else ""
        again = replace(
            talk, stopped=bool(content["stopped"]), where=where, asked=False,
            lines=(*talk.lines, *said)[-MOST:], answer=(*talk.answer, *said),
        )  # fmt: skip
        self.talks = {**self.talks, rank: again}
        self.told()

    def sent(self, ranks: Sequence[int], line: str) -> None:
        """These ranks were sent a line."""
        for rank in ranks:
            talk = self.talks[rank]
            again = replace(talk, asked=True, answer=(), lines=(*talk.lines, f"{PROMPT}{line}")[-MOST:])
            self.talks = {**self.talks, rank: again}
