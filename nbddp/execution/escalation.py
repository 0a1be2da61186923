"""How a run is ended, step by step: its ranks are interrupted, freed from calls that block them, and replaced.

`supervise` decides which step is due; here it is carried out, and what has been done is kept for the next decision and
for the verdict on each rank. A rank that has had the interrupt (`took`) is cleaning up, and the screen shows it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from nbddp.deadlock.positions import Position
from nbddp.deadlock.proof import Deadlock
from nbddp.deadlock.watch import RankQuestions, RankWatcher
from nbddp.errors import RankStatus
from nbddp.execution import supervise
from nbddp.execution.result import RunResult
from nbddp.execution.supervise import Events
from nbddp.launch.topology import rank_words
from nbddp.output.run_output import RunOutput
from nbddp.protocol import outcome
from nbddp.protocol.messages import JupyterMessage
from nbddp.protocol.outcome import RankExit
from nbddp.protocol.position import Whereabouts
from nbddp.protocol.request import Request
from nbddp.protocol.run_spec import Question, RunSpec

WHY = 300  # characters of what ends a run, in a line of progress
TELL = 1.0  # seconds between two lines about ranks that are cleaning up
UNNOTICED = "not received the interrupt yet"
RESTARTED = "you restarted it"
PRESSED, LATE = "Stop was pressed again", "it was still running {} after the interrupt ({})"


class RankControl(RankQuestions, Protocol):
    """What a ladder does with ranks."""

    def send(self, rank: int, spec: RunSpec, hear: Any, code: str, buffers: list[bytes]) -> None: ...
    def signal(self, ranks: Sequence[int], number: int, *, group: bool = False) -> None: ...
    def kill(self, ranks: Sequence[int]) -> None: ...
    def release(self, ranks: Sequence[int], run: int, then: RunSpec | None, spares: bool) -> None: ...


class RunControl(Protocol):
    """What a ladder needs of a run."""

    @property
    def workers(self) -> RankControl: ...
    @property
    def watcher(self) -> RankWatcher: ...

    number: int
    request: Request

    @property
    def deadline(self) -> float | None: ...
    @property
    def display(self) -> RunOutput: ...

    events: Events
    ended: dict[int, RankExit]
    goes_on: set[int]
    stop_signal: int
    stops: tuple[float, ...]
    restart_reason: str
    next_request: Callable[[], RunSpec | None]

    def hear(self, rank: int, message: JupyterMessage) -> None: ...
    def wait_for_answers(self, until: float) -> None: ...
    def ending(self) -> RunResult: ...


class Escalation:
    """Of one run, in its own thread. `ended_by`: why the run is ended, as `supervise` has it, or empty; `then`: what
    freed ranks do next, unasked; `found`, `deadlock`: where the ranks were when they were interrupted, and what held
    them; `why`: rank → why it was replaced, where it was not stuck; the times are time.monotonic()'s."""

    def __init__(self, run: RunControl):
        self._run = run
        self.ended_by = ""
        self.then: RunSpec | None = None
        self.interrupted_at: float | None = None
        self.through_at: float | None = None
        self.released: set[int] = set()
        self.replaced: set[int] = set()
        self.found: dict[int, Position] = {}
        self.deadlock: Deadlock | None = None
        self.why: dict[int, str] = {}
        self.restarted: tuple[int, ...] = ()  # ranks that the user has restarted, which ended the run
        self.restarted_at: float | None = None
        self._taken: dict[int, float] = {}  # rank → when it had its interrupt
        self._over: dict[int, float] = {}  # rank → since when its program is known to have ended, and not its run
        self.foreign = False  # whether an exception from elsewhere ends the run
        self._released_at = 0.0
        self._next_through = self._next_told = 0.0
        self._steps: dict[type, Callable[[Any], None]] = {
            supervise.Interrupt: self._interrupt,
            supervise.ReleaseRanks: self._release,
            supervise.Replace: self._replace,
        }

    def take(self, action: supervise.Action) -> None:
        """Carry out a step."""
        self._steps[type(action)](action)

    def ours(self, rank: int, stopped: bool) -> str:
        """What we had done to a rank that leaves, as `outcome.TABLE` has it. stopped: Stop has reached it."""
        if rank in self.replaced:
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
        group = run.request.one_shot  # with all they have started, as torchrun does it
        ends = group and self.ended_by != supervise.STOPPED
        self.found, self.deadlock = dict(run.watcher.positions), run.watcher.deadlock
        now = time.monotonic()
        # VS Code's Stop has interrupted all processes under the notebook kernel before.
        by_stop = self.ended_by == supervise.STOPPED and run.stop_signal == signal.SIGINT
        self._taken = {r: at for r, at in self._taken.items() if by_stop and now - at < supervise.STOP_COMES}
        still = tuple(r for r in still if r not in self._taken)
        run.workers.signal(still, signal.SIGTERM if ends else run.stop_signal, group=group)
        if self._is_gentle:  # as Ctrl-C in a terminal, and Stop in a plain kernel
            run.workers.look(still, Question.of("interrupt_started", run=run.number), lambda rank, reply: None)
        self.interrupted_at = time.monotonic()
        self._next_told = self.interrupted_at + TELL
        run.watcher.ends(self.interrupted_at)

    def _release(self, action: supervise.ReleaseRanks) -> None:
        run = self._run
        self._say_why(f"unblocking {rank_words(action.ranks)}")
        if not self.released:
            self.then = self.then or run.next_request()
            self._released_at = time.monotonic()
            self._next_through = self._released_at + supervise.PATIENCE / 2  # most are free long before
            for rank in run.ended:  # first: such a rank waits a moment for what is on its way, and the others are many
                self.ask_next(rank)
        spares = self._spares and not self._taken.keys() & set(action.ranks)
        run.workers.release(action.ranks, run.number, self.then, spares)
        self.released.update(action.ranks)

    def ask_next(self, rank: int) -> None:
        """Have a rank that has failed, and left before it was to be freed, do what the freed ones do unasked."""
        run, ended = self._run, self._run.ended[rank]
        lives = not ended.well and ended.status not in outcome.GONE and not ended.lost_context
        touched = ended.group is not None and ended.group.touched
        if self.then and lives and touched and rank not in run.goes_on:
            run.goes_on.add(rank)
            run.workers.send(rank, replace(self.then, fields={"through": True}), run.hear, "", [])

    def ask_through_if_due(self) -> float | None:
        """Ask the ranks that are to free themselves whether they let a message through first; seconds to the next."""
        run, now = self._run, time.monotonic()
        waiting = [r for r in run.watcher.running if r in self.released and r not in self._taken]
        if not waiting or self.replaced:
            return None
        if now >= self._next_through:
            self._next_through = now + supervise.PATIENCE / 4
            run.workers.look(
                waiting, Question.of("through"), lambda rank, reply: run.events.put(("through", rank, reply.answer))
            )
        return self._next_through - now

    def note_draining(self, rank: int, does: object) -> None:
        """A rank's answer to that."""
        if does is True and rank not in self._run.ended:
            self.through_at = time.monotonic()
            words = f"rank {rank} is transferring a message; press Stop to interrupt it"
            self._run.display.screen.ends(words)

    def _replace(self, action: supervise.Replace) -> None:
        self.ended_by = self.ended_by or supervise.STOPPED
        stuck = set(self.stuck)
        for rank in action.ranks:
            if self.pressed_again or len(self._run.stops) > 1:
                self.why[rank] = PRESSED
            elif rank not in stuck:
                self.why[rank] = LATE.format(*self._bound_words)
        self._say_why(f"ending {rank_words(action.ranks)}")
        self.interrupted_at = self.interrupted_at or time.monotonic()  # what ends from here on, we have ended
        self._end(action.ranks)

    def _end(self, ranks: Sequence[int]) -> None:
        self.replaced.update(ranks)
        self._run.workers.kill(ranks)

    # -- on their way out ------------------------------------------------------------------------

    def took(self, rank: int) -> None:
        """A rank's program has had an interrupt: of ours, or from elsewhere."""
        if rank not in self._taken:
            self._taken[rank] = time.monotonic()
            if self._spares:
                self.released.discard(rank)  # it does not free itself

    def saw(self, rank: int, facts: Whereabouts) -> None:
        """A rank's reports while it was at work."""
        if facts.interrupted:
            self.took(rank)
        if not facts.over or self.interrupted_at is None:
            self._over.pop(rank, None)
        else:
            self._over.setdefault(rank, time.monotonic())

    @property
    def _spares(self) -> bool:
        """Whether collectives of ranks on their way out may go on: somebody has wished the end, and none has failed."""
        return self.ended_by == supervise.STOPPED and self._is_gentle and not self._run.restart_reason

    @property
    def _is_gentle(self) -> bool:
        """Whether the ranks' processes survive the program, and have time to clean up."""
        request = self._run.request
        return request.is_program and not request.one_shot

    @property
    def looks(self) -> bool:
        """Whether it is of interest where the ranks are."""
        return self.interrupted_at is None or self._is_gentle

    @property
    def spared(self) -> tuple[int, ...]:
        """Ranks that are cleaning up, and wait for none that cannot come."""
        if not self._spares or self.interrupted_at is None:
            return ()
        watcher, late = self._run.watcher, time.monotonic() - self.interrupted_at > supervise.WISHED
        return tuple(
            r for r in self._taken
            if not (watcher.looked_at > self.interrupted_at and watcher.is_blocked(r) and (late or watcher.is_held(r)))
        )  # fmt: skip

    @property
    def stuck(self) -> tuple[int, ...]:
        """Ranks that only the end of their process ends. With a cell those are of two kinds: they have not had the
        interrupt; or they have come to the end of their program, and not of the run. One without the interrupt is still
        in a call of torch.distributed, has lost its request to it, or held the interpreter before and since."""
        run = self._run
        if not self._is_gentle:
            return run.watcher.running
        ends = tuple(r for r, since in self._over.items() if time.monotonic() - since > supervise.PATIENCE)
        if self._released_at < run.watcher.looked_at:
            return ends + tuple(r for r in self.released if r not in self._taken and self._is_stuck(r))
        return ends

    def _is_stuck(self, rank: int) -> bool:
        now, before = (at.get(rank) for at in (self._run.watcher.positions, self.found))
        if now is None or now.state == RankStatus.SILENT:
            return before is None or before.state == RankStatus.SILENT
        return self._run.watcher.calls_torch(rank) or self._run.watcher.lost_request(rank)

    @property
    def pressed_again(self) -> bool:
        """Whether Stop was pressed while ranks were on their way out for another reason."""
        at = self.interrupted_at
        return at is not None and self.ended_by != supervise.STOPPED and any(
            stop > at + supervise.STOP_COMES for stop in self._run.stops
        )  # fmt: skip

    @property
    def cleanup(self) -> float | None:
        """Seconds from the interrupt on that ranks have to clean up; None: any time, or what one-shot processes have.
        After Stop they have any time; with `--timeout`, as much as if that had ended the run."""
        request, deadline = self._run.request, self._run.deadline
        if not self._is_gentle:
            return None
        if not self._is_wished:
            return request.shutdown_timeout
        if deadline is None or self.interrupted_at is None:
            return None
        return max(0.0, deadline - self.interrupted_at) + request.shutdown_timeout

    @property
    def _is_wished(self) -> bool:
        """An exception of the front end's is the wish of nobody who could press Stop again."""
        return self._spares and not self.foreign

    @property
    def _bound_words(self) -> tuple[str, str]:
        """`cleanup` and the options that it comes of."""
        options = "--timeout and --shutdown-timeout" if self._is_wished else "--shutdown-timeout"
        return f"{round(self.cleanup or 0.0, 1):g} s", options

    def tell_if_due(self) -> float | None:
        """Say every second which ranks are still at work, where, and what ends them; seconds to the next time. Those
        that have not noticed the interrupt get it once more."""
        run, now, since = self._run, time.monotonic(), self.interrupted_at
        left = [r for r in run.watcher.running if r not in self.replaced]
        if since is None or not left or not self._is_gentle:
            return None
        if now >= self._next_told:
            self._next_told = now + TELL
            self._say_why("; ".join([*self._cleaning(left, now - since), self._advice()]))
            if run.stop_signal == signal.SIGINT:
                unaware = [r for r in left if r not in self._taken]
                run.workers.look(unaware, Question.of("interrupt", again=run.number), lambda rank, reply: None)
        return self._next_told - now

    def _cleaning(self, ranks: Sequence[int], seconds: float) -> list[str]:
        """`rank 1 is cleaning up, cell line 9, 3 s`."""
        at: dict[tuple[bool, str], list[int]] = {}
        for r in ranks:
            at.setdefault((r in self._taken, self._run.watcher.place_words(r)), []).append(r)
        found = []
        for (cleans, where), its in at.items():
            does = ("is cleaning up", "are cleaning up") if cleans else (f"has {UNNOTICED}", f"have {UNNOTICED}")
            who = f"{rank_words(its)} {does[len(its) > 1]}"
            found.append(", ".join(filter(None, (who, where, f"{seconds:.0f} s"))))
        return found

    def _advice(self) -> str:
        again = " again" if self.ended_by == supervise.STOPPED else ""
        ends = f"press Stop{again} to kill the process; its variables are lost"
        if self.cleanup is None:
            return ends
        bound, options = self._bound_words
        return f"{ends}. This happens after {bound} anyway ({options})"

    # -- asked for by a user ---------------------------------------------------------------------

    def free(self) -> None:
        """Free what is blocked, without an interrupt; the program may go on, but for its process group."""
        at = self._run.watcher.positions
        blocked = tuple(r for r in self._run.watcher.running if r in at and at[r].call is not None)
        if blocked and not self.released:
            self._release(supervise.ReleaseRanks(blocked))

    def give_up(self, ranks: Sequence[int]) -> None:
        """End the processes of these ranks at once. What their peers report from here on is a consequence."""
        ended = tuple(r for r in ranks if r in self._run.watcher.running)
        self.restarted, self.restarted_at = ended, time.monotonic()
        self.why.update(dict.fromkeys(ended, RESTARTED))
        self._end(ended)
