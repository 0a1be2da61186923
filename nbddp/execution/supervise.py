"""The next action in a run: a pure function of the events so far.

`next_action(state)` decides; the loop in `execution.execution` carries it out and holds no rules. Times are seconds of
one monotonic clock. The first of these brings a run to its end: a failure (after GRACE, since the others may be about
to report the same error; at once if all others are known to wait for ranks that cannot come); Stop; a deadlock that has
stood for `hang_after`; the deadline of `--timeout`. Then, on the ranks that are still at work, a ladder: one interrupt;
after RELEASE_AFTER free what is blocked in a collective; after PATIENCE, counted anew while a rank lets a message on
its way through, replace the process of a stuck rank. Such a rank has not had the interrupt, and nothing else has ended
its call. A rank that has had it is on its way out, and is not ended for that. After Stop it has any time, or till
`--timeout` and its clean-up would be over; otherwise `cleanup` seconds. After Stop its collectives are spared too,
unless it waits for a rank that cannot come. Stop pressed once more replaces at once. An interrupt that a rank got from
elsewhere may be the beginning of Stop: it is a failure only STOP_COMES later.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from nbddp.errors import RankStatus
from nbddp.protocol.outcome import GroupFacts

GRACE = 0.3
STOP_COMES = 0.75  # VS Code interrupts every process under the notebook kernel, and the notebook kernel after them
RELEASE_AFTER = 0.05
PATIENCE = 1.4
THROUGH = 6.0  # seconds for which ranks are believed that they let a message through; they do so for 5
WISHED = 5.0  # seconds after which calls are ended that ranks make on their way out, after somebody's wish
SPOILS = (RankStatus.INTERRUPTED, RankStatus.REPLACED, RankStatus.DIED, RankStatus.ENDED)  # the group of a rank
FAILED, STOPPED, HUNG, LATE = "failed", "stopped", "hung", "late"


@dataclass(frozen=True)
class RunState:
    """`running`: ranks without an outcome. `failed_at`: time of the first failure or death. `hung_since`: since
    when the same deadlock stands; `all_hung`: every running rank is part of it, or is held by ranks that have left the
    run. `deadline`: when the run must have ended. `stuck`: ranks that only the end of their process ends; `spared`:
    those that are not to be freed, since they are on their way out. `pressed_again`: Stop was, after the interrupt.
    `through_at`: when a rank said last that it lets a message through before it frees itself. `output_until`: till when
    output of a rank that died may still arrive. `patience`, `release_after`: seconds, where they are others than a
    cell's; `cleanup`: seconds from the interrupt on (None: any time). The rest: what was done already."""

    now: float
    running: tuple[int, ...]
    failed_at: float | None = None
    stops: tuple[float, ...] = ()
    hung_since: float | None = None
    all_hung: bool = False
    hang_after: float | None = 5.0
    deadline: float | None = None
    interrupted_at: float | None = None
    stuck: tuple[int, ...] = ()
    spared: tuple[int, ...] = ()
    pressed_again: bool = False
    released: frozenset[int] = frozenset()
    replaced: frozenset[int] = frozenset()
    through_at: float | None = None
    output_until: float = 0.0
    patience: float = PATIENCE
    release_after: float = RELEASE_AFTER
    cleanup: float | None = None


@dataclass(frozen=True)
class Wait:
    """Nothing to do before `seconds` have passed (None: until something happens)."""

    seconds: float | None


@dataclass(frozen=True)
class Interrupt:
    """A signal to these ranks: SIGINT, unless one-shot processes have to end; `why` is what ended the run: "failed",
    "stopped", "hung" or "late"."""

    ranks: tuple[int, ...]
    why: str = FAILED


@dataclass(frozen=True)
class ReleaseRanks:
    """Free these ranks from the calls they are blocked in."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Replace:
    """End these ranks' processes; they are started anew before the next run."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Finish:
    pass


Action = Wait | Interrupt | ReleaseRanks | Replace | Finish


def next_action(state: RunState) -> Action:
    """The table of the module's docstring."""
    if not state.running:
        return Finish() if state.now >= state.output_until else Wait(state.output_until - state.now)
    left = tuple(r for r in state.running if r not in state.replaced)
    if not left:
        return Wait(None)
    if len(state.stops) > 1 or state.pressed_again:
        return Replace(left)
    if state.interrupted_at is None:
        due, why = end_due(state)
        if due is None:
            return Wait(None)
        return Interrupt(left, why) if state.now >= due else Wait(due - state.now)
    return _on_the_way_out(state, state.interrupted_at, left)


def _on_the_way_out(state: RunState, since: float, left: tuple[int, ...]) -> Action:
    """The ladder above its first step, which was taken at `since`. left: ranks that still run."""
    bound = tuple(r for r in left if r not in state.released and r not in state.spared)
    if bound:
        pause = since + state.release_after * (not state.all_hung) - state.now
        return ReleaseRanks(bound) if pause <= 0 else Wait(pause)  # an interrupt alone ends no call that is blocked
    stuck = tuple(r for r in left if r in state.stuck)
    moved = since if state.through_at is None else min(state.through_at, since + THROUGH)
    ends = [(moved + state.patience, stuck)] if stuck else []
    ends += [] if state.cleanup is None else [(since + state.cleanup, left)]
    at, ranks = min(ends, default=(None, ()))
    if at is None:
        return Wait(None)
    return Replace(ranks) if at <= state.now else Wait(at - state.now)


def end_due(state: RunState) -> tuple[float | None, str]:
    """When the run is to be ended as things stand (None: never), and why."""
    due = [
        (state.stops[0] if state.stops else None, STOPPED),
        (None if state.failed_at is None else state.failed_at + GRACE * (not state.all_hung), FAILED),
        (None if None in (state.hung_since, state.hang_after) else state.hung_since + state.hang_after, HUNG),  # type: ignore[operator]
        (state.deadline, LATE),
    ]
    return min(((at, why) for at, why in due if at is not None), key=lambda d: d[0], default=(None, ""))


def group_is_broken(ends: dict[int, RankStatus], groups: Mapping[int, GroupFacts]) -> bool:
    """True if the ranks' process group may not be used again after a run that went wrong.

    ends: rank → its verdict (`protocol.outcome`).
    groups: rank → what it said of its group. Ranks that all failed at the same point of the program still agree.
    """
    if all(end == RankStatus.FINISHED for end in ends.values()):
        return False
    cut = any(g.cut for g in groups.values())
    if cut or any(end in SPOILS for end in ends.values()) or len(groups) < len(ends):
        return True
    return len({(g.run, g.sequence) for g in groups.values()}) > 1


# -- the queue of events ----------------------------------------------------------------------------

# The events of a run, on one queue. Any thread and a signal's handler may put; one thread takes.
# Where something else is to be heard while that thread waits, it sleeps in an `ExtraPoller`, and a byte on a pipe wakes
# it.

Event = tuple[str, int, Any]  # what kind, of which rank, and what


class ExtraPoller(Protocol):
    """Something else that is heard while a run waits."""

    def wait(self, descriptor: int, seconds: float | None) -> None:
        """Handle what comes until the descriptor can be read, or the time is over (None: never)."""

    def close(self) -> None:
        """Nothing is heard here any more."""


class Events:
    """The queue. Without an `ExtraPoller` it is a plain one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._poller: ExtraPoller | None = None
        self._ends = (-1, -1)
        self._asleep = False

    def put(self, event: Event) -> None:
        self._queue.put(event)
        if self._asleep:
            with suppress(BlockingIOError):  # it is full: who sleeps wakes by what is there
                os.write(self._ends[1], b".")

    def get_nowait(self) -> Event:
        return self._queue.get_nowait()

    def empty(self) -> bool:
        return self._queue.empty()

    def get(self, timeout: float | None) -> Event:
        """The next event. Raises queue.Empty after `timeout` seconds."""
        if self._poller is None:
            return self._queue.get(timeout=timeout)
        end = None if timeout is None else time.monotonic() + timeout
        self._asleep = True
        try:
            while True:
                with suppress(queue.Empty):
                    return self._queue.get_nowait()
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise queue.Empty
                self._poller.wait(self._ends[0], left)
                with suppress(BlockingIOError):
                    os.read(self._ends[0], 4096)
        finally:
            self._asleep = False

    def hear(self, poller: ExtraPoller) -> None:
        """From here on this is heard as well; nothing happens if something is."""
        if self._poller is not None:
            return
        self._ends = os.pipe()
        for end in self._ends:
            os.set_blocking(end, False)
        self._poller = poller

    def close(self) -> None:
        """Nothing else is heard any more."""
        poller, self._poller = self._poller, None
        if poller is not None:
            poller.close()
            for end in self._ends:
                os.close(end)
