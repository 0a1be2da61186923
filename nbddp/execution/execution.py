"""One run: send to every rank, take in what happens, carry out what `supervise` decides.

Everything arrives on one queue (iopub messages, exits, Stop) and is handled in the calling thread, so output keeps its
order and its parent. The loop holds no rules. Once a run has lasted a while, every rank is occasionally asked where it
is. The answers feed the live status, the search for deadlocks, and the report if the run has to be ended.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from nbddp.deadlock.positions import Position, facts_of
from nbddp.deadlock.proof import Deadlock
from nbddp.deadlock.watch import EARLIEST, START_EACH, RankWatcher
from nbddp.errors import PoolNotRunning, Raised, RankStatus, RunFailed
from nbddp.execution import supervise
from nbddp.execution.escalation import Escalation, RankControl
from nbddp.execution.result import RankPlaces, RankSeats, RunResult, StuckRank
from nbddp.execution.supervise import Events
from nbddp.output.buffer import COMMS, RANK_LOG
from nbddp.output.log_file import LIMIT, MESSAGE
from nbddp.output.run_output import PRINTED, RankOutputs, RunOutput
from nbddp.output.screens import Screen
from nbddp.protocol import outcome
from nbddp.protocol.codec import Json
from nbddp.protocol.messages import INTERRUPTED, OUTCOME, JupyterMessage
from nbddp.protocol.outcome import Outcome, ProcessExit, RankExit
from nbddp.protocol.pool_parts import PoolParts
from nbddp.protocol.position import Whereabouts
from nbddp.protocol.request import Request
from nbddp.protocol.run_spec import Reply, RunSpec

UNSENT = "the connection to the workers was lost before this rank was reached; run the cell again"
UNTOLD = "the rank finished the cell without a report; %ddp log shows its output"
LONG = 0.1  # seconds after which a run is worth telling others about
ATTEMPTS = 3  # how often a run that exceptions from elsewhere disturb is taken to its end
LAST_OUTPUT = 0.15  # seconds without output after which none is expected from a rank that died: the agent tells of
# the death by a shorter way than output comes, and only outcomes are known to come after it


class RunWorkers(RankPlaces, RankControl, Protocol):
    """What a run needs of a pool."""

    def expect(self, rank: int) -> bool: ...


class Execution:
    """A request to several ranks and all that comes of it.

    specs: rank → the request as it is sent. After `execute`, `ended` has one entry per rank.
    """

    stops: tuple[float, ...] = ()
    noted = False
    _failed = False  # whether a rank has failed while others were at work
    seats: RankSeats | None = None  # of one that has not ended well
    restart_reason = ""  # if it is to begin again though no rank has failed
    stop_signal: int = signal.SIGINT  # what Stop sends to the ranks
    began = _output_until = 0.0
    _watcher: RankWatcher | None = None  # none as long as nobody has asked where the ranks are
    _ladder: Escalation | None = None  # none as long as the run goes its own way
    _display: RunOutput | None = None  # none as long as no rank has printed, and nobody has asked for it

    def __init__(
        self,
        workers: RunWorkers,
        specs: Mapping[int, RunSpec],
        request: Request,
        *,
        number: int,
        logs: Path,
        screen: Screen,
        timed_from: float | None = None,
        most: int = LIMIT,
        after: Execution | None = None,
        parts: PoolParts | None = None,
        attempt: int = 0,
    ):
        """timed_from: when `timeout` began (time.monotonic()); None: when the run does. most: bytes of each rank's
        output that are kept. after: the run whose freed ranks carry this one out without being asked (`then`).
        parts: the pool's. attempt: how many have failed before."""
        self.request, self._timed_from, self.attempt = request, timed_from, attempt
        self.workers, self.specs, self.number = workers, dict(specs), number
        self.parts = parts or PoolParts()
        self._screen, self._logs, self._most = screen, logs, most
        self._making = threading.RLock()
        self.ended: dict[int, RankExit] = {}
        self.events: Events = after.later if after else Events()
        self.later: Events = Events()
        self.next_request: Callable[[], RunSpec | None] = lambda: None  # what freed ranks are to do next, unasked
        self.goes_on: set[int] = set()  # ranks that have ended the run and do that
        self._asked_before = frozenset(after.goes_on) if after else frozenset[int]()
        self.aside: Callable[[int, str, Json], None] | None = None  # given what is printed, if nobody sees it
        self.when_sent: Callable[[], None] = lambda: None
        self.when_long: Callable[[], None] = lambda: None
        self.stuck: dict[int, StuckRank] = {}
        sizes = (int(s.rendezvous.env["WORLD_SIZE"]) for s in specs.values() if s.rendezvous is not None)
        self.world_size = max(sizes, default=len(specs))
        self.kept: dict[str, Any] = {}  # what parts of capabilities keep of it
        self.looks: list[Callable[[], float | None]] = []  # called while it waits: seconds until one has something due
        self.ends: list[Callable[[], None]] = []  # called when it is to end

    @property
    def watcher(self) -> RankWatcher:
        """In the run's own thread alone, as `ladder`."""
        if self._watcher is None:
            self._watcher = RankWatcher(
                self.workers, list(self.specs), self.ended, lambda rank, what: self.events.put(("place", rank, what)),
                run=self.number, world_size=self.world_size, hang_after=self.request.hang_after,
                program="cell" if self.request.program is None else self.request.program.op, began=self.began,
            )  # fmt: skip
            if self._failed:
                self._watcher.soon()
        return self._watcher

    @property
    def display(self) -> RunOutput:
        """What the ranks print, and where it is seen."""
        with self._making:  # a panel looks from another thread
            if self._display is None:
                made = RunOutput(list(self.specs), self.request.show, self._logs, self._most, self.parts, self._screen)
                made.ended = self.ended
                self._display = made
            return self._display

    @property
    def outputs(self) -> RankOutputs:
        """Rank → all that it printed."""
        return self.display.outputs

    @property
    def has_output(self) -> bool:
        """Whether anything has been printed, or kept."""
        return self._display is not None

    @property
    def ladder(self) -> Escalation:
        if self._ladder is None:
            self._ladder = Escalation(self)
        return self._ladder

    # -- fed from other threads ------------------------------------------------------

    def hear(self, rank: int, message: JupyterMessage) -> None:
        """An iopub message of this run."""
        kind = message["header"]["msg_type"]
        then = self._ladder.then if self._ladder is not None else None
        next_one = kind == OUTCOME and then is not None and message["content"].run == then.run
        if rank in self.goes_on or next_one:  # the run's own outcome may be lost, and come by `repeat`
            self.later.put((kind, rank, message))
        elif self.aside is not None and kind in PRINTED:
            self.aside(rank, kind, message["content"])
        elif kind == INTERRUPTED:
            self.events.put(("do", -1, lambda: self.ladder.took(rank)))
        elif kind == OUTCOME or kind in PRINTED or kind in COMMS or kind in self.parts.messages:
            self.events.put((kind, rank, message))
            if kind == OUTCOME and message["content"].next_run is not None:
                self.goes_on.add(rank)

    def env_of(self, rank: int) -> dict[str, str]:
        """torchrun's variables of a rank."""
        here = self.specs[rank].rendezvous
        return here.env if here is not None else {}

    def worker_exited(self, rank: int, process: ProcessExit) -> None:
        if rank in self.specs:  # one that has no part in this run is replaced before the next
            self.events.put(("exit", rank, process))

    def restart(self, why: str) -> None:
        """End the run as Stop does, to begin again: the pool's nodes change."""
        self.restart_reason = self.restart_reason or why
        self.events.put(("stop", -1, time.monotonic()))

    def stop(self, number: int = signal.SIGINT) -> None:
        """End the run as Stop does, or because the launcher got another signal: the ranks get it too."""
        self.stop_signal = number
        self.events.put(("stop", -1, time.monotonic()))

    def free(self) -> None:
        """Have blocked calls raise, and let the ranks go on from there."""
        self.events.put(("do", -1, lambda: self.ladder.free()))

    def replace(self, ranks: Sequence[int]) -> None:
        """End the run as Stop does, and the processes of these ranks at once; the next run has new ones."""
        self.events.put(("do", -1, lambda: self._give_up(ranks)))

    def tell(self, words: str) -> None:
        """A line for the user that is none of a rank's."""
        self.events.put(("do", -1, lambda: self.display.screen.say(words)))

    def never_reached(self, rank: int) -> None:
        """The request was lost with the connection that it was given to."""
        self._failed_by(rank, "ConnectionError", UNSENT)

    def never_told(self, rank: int) -> None:
        """The rank is idle, and has not said how it has ended the run."""
        self._failed_by(rank, "RuntimeError", UNTOLD)

    def _failed_by(self, rank: int, kind: str, words: str) -> None:
        said = Outcome(self.number, chain=(Raised(kind, words),))
        self.events.put((OUTCOME, rank, {"content": said, "buffers": []}))

    # -- the loop ----------------------------------------------------------------------

    def execute(self) -> None:
        """Run to the end: every rank has an outcome, has died, or is replaced.

        An exception of another signal's handler or of the front end may come amid it. It ends the run as Stop does
        before it goes on, so no rank is left at work without anybody who waits for it.
        """
        foreign: BaseException | None = None
        with self._stop_by_signal():
            try:
                self._send()
                if self._display is None:
                    self._screen.shown_by(lambda live, below: None)  # not by what an earlier attempt has printed
                self._screen.start()  # while the ranks already work
                self.when_sent()
                self._to_the_end()
            except BaseException as e:
                foreign = self._stop_for(e)
        self._drain()
        gone = [rank for rank, ended in self.ended.items() if ended.status in outcome.GONE or ended.code is not None]
        try:
            for hear in [*self.parts.ranks_gone] if gone else ():
                hear(self, gone)
        finally:
            try:
                if self._display is None:
                    self._screen.finish([])
                else:
                    self._display.finish()
            finally:
                if foreign is not None:
                    raise foreign

    def _send(self) -> None:
        self.began = time.monotonic()
        unsent, source, buffers = list(self.specs), self.request.source, list(self.request.buffers)
        try:
            while unsent:
                if unsent[0] in self._asked_before:
                    self.workers.expect(unsent.pop(0))
                    continue
                self.workers.send(unsent[0], self.specs[unsent[0]], self.hear, source, buffers)
                del unsent[0]
        finally:
            for rank in unsent[1:]:  # whether the first got it is not known: if it does not answer, it is replaced
                self.never_reached(rank)

    def _to_the_end(self) -> None:
        while True:
            action = supervise.next_action(self._state())
            if isinstance(action, supervise.Finish):
                break
            if isinstance(action, supervise.Wait):
                self._take(action.seconds)
            else:
                if isinstance(action, supervise.Interrupt):
                    self._tell_end()
                self.ladder.take(action)

    def _stop_for(self, error: BaseException) -> BaseException:
        """End the run as Stop does, without the screen, which may be what has failed; returns the last exception.

        Another exception is another Stop; after a few, the ranks are ended and not waited for.
        """
        self.ladder.foreign = True
        with self.display.without_screen():
            for _ in range(ATTEMPTS):
                self.stops += (time.monotonic(),)
                try:
                    self._to_the_end()
                    return error
                except BaseException as e:  # its context is the one before
                    error = e
            self.workers.kill(self.running())
        return error

    @property
    def deadline(self) -> float | None:
        """When `--timeout` ends the run, by time.monotonic(); None without it."""
        return None if self.request.timeout is None else (self._timed_from or self.began) + self.request.timeout

    def _state(self) -> supervise.RunState:
        bad = [e.at + supervise.STOP_COMES * e.own_interrupt for e in self.ended.values() if not e.well]
        state = supervise.RunState(
            now=time.monotonic(),
            running=self.running(),
            failed_at=min(bad, default=None),
            stops=self.stops,
            hang_after=self.request.hang_after,
            deadline=self.deadline,
            output_until=self._output_until,
        )
        watcher, ladder = self._watcher, self._ladder
        if watcher is not None:
            hung = watcher.all_hung or watcher.all_held
            state = replace(state, hung_since=watcher.hung_since, all_hung=hung)
        if ladder is None:
            return state
        patience, release_after = self._patience(ladder)
        return replace(
            state,
            interrupted_at=ladder.interrupted_at,
            stuck=ladder.stuck,
            spared=ladder.spared,
            pressed_again=ladder.pressed_again,
            released=frozenset(ladder.released),
            replaced=frozenset(ladder.replaced),
            through_at=ladder.through_at,
            cleanup=ladder.cleanup,
            patience=patience,
            release_after=release_after,
        )

    def _patience(self, ladder: Escalation) -> tuple[float, float]:
        """How long ranks that are to end may take, and their calls. A program that is ended by somebody's wish
        may still use its group: it writes a checkpoint."""
        if not self.request.one_shot:
            return supervise.PATIENCE, supervise.RELEASE_AFTER
        shutdown = self.request.shutdown_timeout
        wished = ladder.ended_by == supervise.STOPPED and self.stop_signal != signal.SIGINT
        release = min(supervise.WISHED, shutdown / 2) if wished else supervise.RELEASE_AFTER
        return shutdown, release

    def running(self) -> tuple[int, ...]:
        return tuple([rank for rank in self.specs if rank not in self.ended])

    def _take(self, patience: float | None) -> None:
        """Wait for one event and handle it and all that have come with it."""
        due = [self._note_if_long(), self._look_if_due(), *[look() for look in self.looks]]
        if self._ladder is not None:
            due += [self._ladder.ask_through_if_due(), self._ladder.tell_if_due()]
        waits = [w for w in (patience, *due, self._refresh()) if w is not None]
        try:
            event = self.events.get(timeout=max(0.0, min(waits)) if waits else None)
        except queue.Empty:
            return
        deadline = time.monotonic() + 0.02
        while True:
            self._handle(*event)
            if time.monotonic() > deadline:
                return
            try:
                event = self.events.get_nowait()
            except queue.Empty:
                return

    def _refresh(self) -> float | None:
        """Show what is new; seconds until the next look."""
        if self._display is None:
            return self._screen.refresh([], lambda: self.watcher.status())
        return self._display.refresh(lambda: self.watcher.status())

    def _note_if_long(self) -> float | None:
        """Seconds until the run counts as long; None once that has been reported."""
        left = self.began + LONG - time.monotonic()
        if left > 0 or self.noted:
            return None if self.noted else left
        self.noted = True
        self.when_long()
        return None

    def _drain(self) -> None:
        while not self.events.empty():
            self._handle(*self.events.get_nowait())

    def _handle(self, kind: str, rank: int, what: Any) -> None:
        if kind == "stop":
            self._stopped_at(what)
        elif kind == "place":
            self._placed(rank, *what)
        elif kind == "through":
            self.ladder.note_draining(rank, what)
        elif kind == "exit":
            self._died(rank, what)
        elif kind == "do":
            what()
        elif kind == OUTCOME:
            self._came_out(rank, what)
        elif kind in COMMS:
            self.display.take_comm(rank, kind, what)
        elif kind in PRINTED:
            self._printed(rank, kind, what["content"])
        else:
            self.parts.hear(rank, kind, what["content"])

    def _stopped_at(self, at: float) -> None:
        """Stop was pressed; it may have reached ranks before us."""
        self.stops += (at,)
        self._tell_end()
        for rank, ended in self.ended.items():
            if ended.own_interrupt and at - ended.at < supervise.STOP_COMES:
                self.ended[rank] = replace(ended, status=outcome.INTERRUPTED)

    def _tell_end(self) -> None:
        for end in self.ends:
            end()

    def _died(self, rank: int, process: ProcessExit) -> None:
        now = time.monotonic()
        if process.code is not None:
            process = replace(process, seen_ns=time.time_ns())
        if rank not in self.ended:
            verdict = self._verdict(rank, "", outcome.process(process.code))
            self.ended[rank] = RankExit(rank, verdict, now, process=process)
            self._output_until = now + LAST_OUTPUT
        elif process.code is not None:
            before = self.ended[rank].process or process
            known = replace(before, code=process.code, seen_ns=process.seen_ns)
            self.ended[rank] = replace(self.ended[rank], process=known)

    def _came_out(self, rank: int, message: JupyterMessage) -> None:
        if rank in self.ended:
            return  # it was said again although it was on its way
        buffers = [bytes(b) for b in message["buffers"]]
        said: Outcome = message["content"]
        if said.traceback:
            self.display.traceback(rank, said.traceback)
        whole = ""
        if said.pages or said.has_longer(*MESSAGE):
            said, whole = self.display.outputs[rank].wholes.outcome(said)
        status = self._verdict(rank, outcome.exit_kind(said), "lives")
        self.ended[rank] = RankExit(rank, status, time.monotonic(), said, buffers=buffers, whole=whole)
        if status == outcome.FAILED and self.running():
            self._look_soon()
        if self.ended[rank].own_interrupt:
            self._output_until = time.monotonic() + supervise.STOP_COMES
        if self._ladder is not None:
            self._ladder.ask_next(rank)

    def _verdict(self, rank: int, said: str, process: str) -> RankStatus:
        stopped = bool(self.stops) and said == "interrupt"
        ours = self._ladder.ours(rank, stopped) if self._ladder else outcome.INTERRUPTED if stopped else ""
        found = outcome.verdict(said, process, ours, outcome.PROGRAM if self.request.is_program else outcome.REQUEST)
        return outcome.verdict_of_one_shot(said, ours, found) if self.request.one_shot else found

    def _printed(self, rank: int, kind: str, content: Json) -> None:
        if rank in self.ended:
            self._output_until = time.monotonic() + LAST_OUTPUT
        self.display.take(rank, kind, content)

    def _placed(self, rank: int, number: int, reply: Reply) -> None:
        facts = facts_of(reply)
        if facts is not None and (facts.interrupted or self._ladder is not None):
            self.ladder.saw(rank, facts)
        self.watcher.answered(rank, number, facts)

    def wait_for_answers(self, until: float) -> None:
        """Handle what comes until the ranks have answered, or the time is over."""
        while self.watcher.waits_for_answers and time.monotonic() < until:
            with suppress(queue.Empty):
                self._handle(*self.events.get(timeout=max(0.0, until - time.monotonic())))

    def _give_up(self, ranks: Sequence[int]) -> None:
        self._stopped_at(time.monotonic())
        self.ladder.give_up(ranks)

    # -- where the ranks are -----------------------------------------------------------------

    @property
    def positions(self) -> dict[int, Position]:
        return self._watcher.positions if self._watcher is not None else {}

    @property
    def looked_at(self) -> float:
        return self._watcher.looked_at if self._watcher is not None else 0.0

    @property
    def facts(self) -> dict[int, Whereabouts]:
        return self._watcher.facts if self._watcher is not None else {}

    @property
    def deadlock(self) -> Deadlock | None:
        return self._watcher.deadlock if self._watcher is not None else None

    def _look_soon(self) -> None:
        """A rank has failed: are the others waiting for it? Those that have not come so far would be asked twice."""
        self._failed = True
        if self._watcher is not None:
            self._watcher.soon()

    def _look_if_due(self) -> float | None:
        """Ask the ranks where they are if it is time; seconds until something about that is due."""
        first = self.began + (START_EACH * len(self.specs) if self._failed else EARLIEST)
        if self._watcher is None and (left := first - time.monotonic()) > 0:
            return left
        return self.watcher.look_if_due() if self._ladder is None or self._ladder.looks else None

    @contextmanager
    def _stop_by_signal(self) -> Iterator[None]:
        """While the run lasts, the notebook kernel's interrupt is an event of the run."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, lambda *_: self.events.put(("stop", -1, time.monotonic())))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    # -- what came of it -----------------------------------------------------------------

    @property
    def plain(self) -> bool:
        """Whether every rank has finished, and nothing else has happened: then there is nobody to blame."""
        finished = all(r in self.ended and self.ended[r].status == outcome.FINISHED for r in self.specs)
        return finished and self._ladder is None and not (self.stops or self.goes_on)

    def ending(self) -> RunResult:
        """What came of the run, as far as it is known now."""
        result = RunResult(
            self.workers, self.ended, self.running(), self.positions, self.facts, self.stuck, self.deadlock,
            stops=self.stops, timeout=self.request.timeout, one_shot=self.request.one_shot,
            logs={r: str(self._logs / RANK_LOG.format(r)) for r in self.specs},
        )  # fmt: skip
        ladder = self._ladder
        if ladder is None:
            return result
        then = {r: p for r, p in ladder.found.items() if r not in ladder.replaced}  # and not where they clean up
        return replace(
            result, positions={**self.positions, **then}, ended_by=ladder.ended_by, why=ladder.why,
            interrupted_at=ladder.interrupted_at, restarted=ladder.restarted, restarted_at=ladder.restarted_at,
            deadlock=self.deadlock if ladder.interrupted_at is None else ladder.deadlock,
        )  # fmt: skip

    def error(self) -> RunFailed | PoolNotRunning | None:
        """What ended the run, with the report; None if it ended well."""
        return None if self.plain else self.ending().error()

    def raise_if_bad(self) -> None:
        """Raise the error that says what ended the run, if it did not end well."""
        error = self.error()
        if error is not None:
            raise error
