"""How a run is ended, step by step: its ranks are interrupted, freed from calls that block them, and replaced.

`supervise` decides which step is due; here it is carried out, and what has been done is kept for the next decision and
for the verdict on each rank.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from nbddp.plan.request import Request
from nbddp.plan.topology import rank_words
from nbddp.run import outcome, supervise
from nbddp.run.display import Display
from nbddp.run.ending import Ending
from nbddp.run.events import Events
from nbddp.run.outcome import Ended
from nbddp.run.watch import Asked, RankWatcher

WHY = 300  # characters of what ends a run, in a line of progress


class Commanded(Asked, Protocol):
    """What a ladder does with ranks."""

    def send(self, rank: int, spec: dict[str, Any], hear: Any, code: str, buffers: list[bytes]) -> None: ...
    def signal(self, ranks: Sequence[int], number: int) -> None: ...
    def kill(self, ranks: Sequence[int]) -> None: ...
    def release(self, ranks: Sequence[int], run: int, then: Mapping[str, Any]) -> None: ...


class Steered(Protocol):
    """What a ladder needs of a run."""

    @property
    def workers(self) -> Commanded: ...

    number: int
    request: Request
    watcher: RankWatcher
    display: Display
    events: Events
    ended: dict[int, Ended]
    goes_on: set[int]
    stop_signal: int
    next_request: Callable[[], Mapping[str, Any]]

    def hear(self, rank: int, message: dict[str, Any]) -> None: ...
    def wait_for_answers(self, until: float) -> None: ...
    def ending(self) -> Ending: ...


class Ladder:
    """Of one run, in its own thread. `ended_by`: why the run is ended, as `supervise` has it, or empty; `then`: what
    freed ranks do next, unasked; the times are time.monotonic()'s."""

    def __init__(self, run: Steered):
        self._run = run
        self.ended_by = ""
        self.then: Mapping[str, Any] = {}
        self.interrupted_at: float | None = None
        self.through_at: float | None = None
        self.released = self.replaced = False
        self._given_up: set[int] = set()  # ranks that are replaced because somebody asked for it
        self._next_through = 0.0
        self._steps: dict[type, Callable[[Any], None]] = {
            supervise.Interrupt: self._interrupt,
            supervise.Release: self._release,
            supervise.Replace: self._replace,
        }

    def take(self, action: supervise.Action) -> None:
        """Carry out a step."""
        self._steps[type(action)](action)

    def ours(self, rank: int, stopped: bool) -> str:
        """What we had done to a rank that leaves, as `outcome.TABLE` has it. stopped: Stop has reached it."""
        if self.replaced or rank in self._given_up:
            return outcome.REPLACED
        return outcome.INTERRUPTED if stopped or self.interrupted_at is not None else ""

    def _say_why(self, what: str) -> None:
        """What is done, after what ends the run: who has failed is seen at once, however long the others take."""
        why = self._run.ending().so_far()
        why = f"{why[:WHY]} …" if len(why) > WHY else why
        self._run.display.screen.ends(f"{why}; {what}" if why else what)

    def _interrupt(self, action: supervise.Interrupt) -> None:
        run = self._run
        self.ended_by = action.why
        run.watcher.proven = action.why == supervise.HUNG
        run.wait_for_answers(run.watcher.look_for_report())
        if run.watcher.waits_for_answers:
            run.watcher.assess()  # without those that do not answer
        still = run.watcher.running
        self._say_why(f"interrupting {rank_words(still)}")
        ends = run.request.spends and self.ended_by != supervise.STOPPED
        run.workers.signal(still, signal.SIGTERM if ends else run.stop_signal)
        self.interrupted_at = time.monotonic()

    def _release(self, action: supervise.Release) -> None:
        run = self._run
        self._say_why(f"freeing {rank_words(action.ranks)}")
        self.then = run.next_request()
        for rank in run.ended:  # first: such a rank waits a moment for what is on its way, and the others are many
            self.ask_next(rank)
        run.workers.release(action.ranks, run.number, self.then)
        self.released = True
        self._next_through = time.monotonic() + supervise.PATIENCE / 2  # most are free long before

    def ask_next(self, rank: int) -> None:
        """Have a rank that has failed, and left before it was to be freed, do what the freed ones do unasked."""
        run, ended = self._run, self._run.ended[rank]
        lives = not ended.well and ended.status not in outcome.GONE and not ended.content.get("broken")
        if self.then and lives and rank not in run.goes_on and ended.content.get("group", {}).get("touched"):
            run.goes_on.add(rank)
            run.workers.send(rank, {**self.then, "through": True}, run.hear, "", [])

    def ask_through_if_due(self) -> float | None:
        """Ask the ranks that are to free themselves whether they let a message through first; seconds to the next."""
        if not self.released or self.replaced:
            return None
        run, now = self._run, time.monotonic()
        if now >= self._next_through:
            self._next_through = now + supervise.PATIENCE / 4
            run.workers.look(
                run.watcher.running, {"op": "through"}, lambda rank, does: run.events.put(("through", rank, does))
            )
        return self._next_through - now

    def lets_through(self, rank: int, does: object) -> None:
        """A rank's answer to that."""
        if does is True and rank not in self._run.ended:
            self.through_at = time.monotonic()
            words = f"rank {rank} is transferring a message, which may finish; Stop interrupts it"
            self._run.display.screen.ends(words)

    def _replace(self, action: supervise.Replace) -> None:
        self.ended_by = self.ended_by or supervise.STOPPED
        self._say_why(f"ending {rank_words(action.ranks)}")
        self.replaced = True
        self.interrupted_at = self.interrupted_at or time.monotonic()  # what ends from here on, we have ended
        self._run.workers.kill(action.ranks)

    # -- asked for by a user ---------------------------------------------------------------------

    def free(self) -> None:
        """Free what is blocked, without an interrupt; the program may go on, but for its process group."""
        at = self._run.watcher.positions
        blocked = tuple(r for r in self._run.watcher.running if r in at and at[r].call is not None)
        if blocked and not self.released:
            self._release(supervise.Release(blocked))

    def give_up(self, ranks: Sequence[int]) -> None:
        """End the processes of these ranks at once."""
        self._given_up.update(ranks)
        self._run.workers.kill([r for r in ranks if r in self._run.watcher.running])
