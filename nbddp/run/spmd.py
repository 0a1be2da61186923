"""One run: send to every rank, take in what happens, carry out what `supervise` decides.

Everything arrives on one queue (iopub messages, exits, Stop) and is handled in the
calling thread, so output keeps its order and its parent. The loop holds no rules. Once a
run has lasted a while, every rank is asked now and then where it is: the answers feed
the live status, the search for deadlocks, and the report if the run has to be ended.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

from nbddp.errors import PoolNotRunning, RankStatus, RunFailed
from nbddp.plan.request import Request
from nbddp.plan.topology import rank_words
from nbddp.run import outcome, supervise, widgets
from nbddp.run.collect import RankOutput
from nbddp.run.deadlock import Deadlock
from nbddp.run.debugged import Debugged
from nbddp.run.ending import Ending, Places
from nbddp.run.events import Events
from nbddp.run.failures import Failure
from nbddp.run.logfile import LIMIT
from nbddp.run.outcome import Ended
from nbddp.run.positions import Position
from nbddp.run.prompt import Keyboard, Prompt
from nbddp.run.screen import Screen, Silent
from nbddp.run.watch import Asked, RankWatcher
from nbddp.run.widgets import Widgets

OUTCOME, STOPPED = "nbddp_outcome", "nbddp_stopped"
UNSENT = "the connection to the workers was lost before this rank was reached; run the cell again"
WHY = 300  # characters of what ends a run, in a line of progress
LONG = 0.1  # seconds after which a run is worth telling others about
FILES_HELD = 256  # ranks whose output files stay open while a run goes on
ATTEMPTS = 3  # how often a run that exceptions from elsewhere disturb is taken to its end
WISHED = 5.0  # seconds after which ranks that somebody has told to end are freed from calls that block them
LAST_OUTPUT = 0.15  # seconds without output after which none is expected from a rank that died: the agent tells of
# the death by a shorter way than output comes, and only outcomes are known to come after it
SHOWN = ("stream", "nbddp_streams", "display_data", "execute_result", "update_display_data", "clear_output")


class Workers(Places, Asked, Protocol):
    """What a run needs of a pool."""

    def send(self, rank: int, spec: dict[str, Any], hear: Any, code: str, buffers: list[bytes]) -> None: ...
    def signal(self, ranks: Sequence[int], number: int) -> None: ...
    def kill(self, ranks: Sequence[int]) -> None: ...
    def expect(self, rank: int) -> bool: ...
    def release(self, ranks: Sequence[int], run: int, then: Mapping[str, Any]) -> None: ...
    def written(self, ranks: Sequence[int]) -> Mapping[int, Mapping[str, tuple[int, str]]]: ...


class Run:
    """A request to several ranks and all that comes of it.

    specs: rank → the request as it is sent. After `execute`, `ended` has one entry per rank.
    """

    def __init__(
        self,
        workers: Workers,
        specs: Mapping[int, dict[str, Any]],
        request: Request,
        *,
        number: int,
        logs: Path,
        screen: Screen,
        timed_from: float | None = None,
        most: int = LIMIT,
        after: Run | None = None,
        widgets: Widgets | None = None,
    ):
        """timed_from: when `timeout` began (time.monotonic()); None: when the run does. most: bytes of each rank's
        output that are kept. after: the run whose freed ranks carry this one out without being asked (`then`).
        widgets: those that the ranks have made so far."""
        self.widgets = widgets or Widgets()
        self.widgets.begin()
        self.request, self._timed_from = request, timed_from
        self.workers, self.specs, self.number, self.screen = workers, dict(specs), number, screen
        self.outputs = {r: RankOutput(r, logs / f"rank{r}.log", most, len(specs) <= FILES_HELD) for r in specs}
        for out in self.outputs.values():
            out.said = self.widgets.words
        self.earlier: dict[int, list[Path]] = {}  # rank → files of what is shown under this run and was printed before
        self.shown = [r for r in self.outputs if request.show is None or r in request.show]
        self.ended: dict[int, Ended] = {}
        self.stops: tuple[float, ...] = ()
        self.events: Events = after.later if after else Events()
        self.later: Events = Events()
        self.next_request: Callable[[], Mapping[str, Any]] = dict  # what freed ranks are to do next, unasked
        self.then: Mapping[str, Any] = {}
        self.goes_on: set[int] = set()  # ranks that have ended the run and do that
        self._asked_before = frozenset(after.goes_on) if after else frozenset[int]()
        self.aside: Callable[[int, str, dict[str, Any]], None] | None = None  # given what is printed, if nobody sees it
        self.when_sent: Callable[[], None] = lambda: None
        self.when_long: Callable[[], None] = lambda: None
        self.noted = False
        self.stuck: dict[int, dict[str, Any]] = {}
        self.world_size = max((int(s["env"]["WORLD_SIZE"]) for s in specs.values() if "env" in s), default=len(specs))
        self.ended_by = ""
        self.regrouped = ""
        self.stop_signal: int = signal.SIGINT  # what Stop sends to the ranks
        self.failures: dict[int, Failure] = {}  # once it has ended: of ranks that failed by themselves
        self.watcher = RankWatcher(
            workers, list(specs), self.ended, lambda rank, what: self.events.put(("place", rank, what)),
            run=number, world_size=self.world_size, hang_after=request.hang_after,
            program="cell" if request.program is None else "script",
        )  # fmt: skip
        self.began = 0.0
        self._output_until = 0.0
        self._interrupted_at: float | None = None
        self.debugged = Debugged()
        self._prompt: Prompt | None = None
        self._released = self._replaced = False
        self._given_up: set[int] = set()  # ranks that are replaced because somebody asked for it
        self._through_at: float | None = None
        self._next_through = 0.0
        self._actions: dict[type, Callable[[Any], None]] = {
            supervise.Interrupt: self._interrupt,
            supervise.Release: self._release,
            supervise.Replace: self._replace,
        }

    # -- fed from other threads ------------------------------------------------------

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        """An iopub message of this run."""
        kind = message["header"]["msg_type"]
        next_one = kind == OUTCOME and message["content"].get("run") == self.then.get("run", -1)
        if rank in self.goes_on or next_one:  # the run's own outcome may be lost, and come by `repeat`
            self.later.put((kind, rank, message))
        elif self.aside is not None and kind in SHOWN:
            self.aside(rank, kind, message["content"])
        elif kind in (OUTCOME, STOPPED) or kind in SHOWN or kind in widgets.KINDS:
            self.events.put((kind, rank, message))
            if kind == OUTCOME and message["content"].get("then"):
                self.goes_on.add(rank)

    def worker_exited(self, rank: int, event: dict[str, Any]) -> None:
        if rank in self.specs:  # one that has no part in this run is replaced before the next
            self.events.put(("exit", rank, event))

    def regroup(self, why: str) -> None:
        """End the run as Stop does, because the pool's nodes change: the cell is to begin again on those there are."""
        self.regrouped = self.regrouped or why
        self.events.put(("stop", -1, time.monotonic()))

    def stop(self, number: int = signal.SIGINT) -> None:
        """End the run as Stop does, or because the launcher got another signal: the ranks get it too."""
        self.stop_signal = number
        self.events.put(("stop", -1, time.monotonic()))

    def free(self) -> None:
        """Have blocked calls raise, and let the ranks go on from there."""
        self.events.put(("do", -1, self._free))

    def debug(self, ranks: Sequence[int], line: str) -> None:
        """A line for the debuggers of these ranks, as far as they wait for one."""
        self.events.put(("do", -1, lambda: self.send_line(ranks, line)))

    def names(self, rank: int, text: str, hear: Callable[[int, Any], None]) -> None:
        """What may complete a line for a rank's debugger; `hear(rank, names)` in another thread."""
        question = {"op": "debug_names", "text": text}
        self.events.put(("do", -1, lambda: self.workers.look([rank], question, hear)))

    def ask_by(self, keyboard: Keyboard) -> None:
        """Have lines for ranks that stop typed there."""
        self._prompt = Prompt(self, keyboard)
        self.debugged.views["prompt"] = self._prompt.told

    def replace(self, ranks: Sequence[int]) -> None:
        """End the run as Stop does, and the processes of these ranks at once; the next run has new ones."""
        self.events.put(("do", -1, lambda: self._give_up(ranks)))

    def tell(self, words: str) -> None:
        """A line for the user that is none of a rank's."""
        self.events.put(("do", -1, lambda: self.screen.say(words)))

    def never_reached(self, rank: int) -> None:
        """The request was lost with the connection that it was given to."""
        link = {"type": "ConnectionError", "message": UNSENT, "relation": "", "notes": (), "frames": ()}
        self.events.put((OUTCOME, rank, {"content": {"status": "failed", "chain": [link]}, "buffers": []}))

    # -- the loop ----------------------------------------------------------------------

    def execute(self) -> None:
        """Run to the end: every rank has an outcome, has died, or is replaced.

        An exception that comes amid it, of another signal's handler or of the front end, ends the run as Stop does
        before it goes on: no rank is left at work that nobody waits for.
        """
        foreign: BaseException | None = None
        with self._stop_by_signal():
            try:
                self._send()
                self.screen.start()  # while the ranks already work
                self.when_sent()
                self._to_the_end()
            except BaseException as e:
                foreign = self._stop_for(e)
        self._drain()
        self._fill_in()
        try:
            self._settle_widgets()
            self.screen.finish([self.outputs[r] for r in self.shown])
        finally:
            for out in self.outputs.values():
                out.close()
            if foreign is not None:
                raise foreign

    def _send(self) -> None:
        self.began = time.monotonic()
        self.watcher.begin(self.began)
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
                self._actions[type(action)](action)

    def _stop_for(self, error: BaseException) -> BaseException:
        """End the run as Stop does, without the screen, which may be what has failed; returns the last exception.

        Another exception is another Stop; after a few, the ranks are ended and not waited for.
        """
        shown, self.screen = self.screen, Silent()
        for _ in range(ATTEMPTS):
            self.stops += (time.monotonic(),)
            try:
                self._to_the_end()
                break
            except BaseException as e:  # its context is the one before
                error = e
        else:
            self.workers.kill(self.running())
        self.screen = shown
        return error

    def _state(self) -> supervise.RunState:
        bad = [e.at + supervise.STOP_COMES * e.own_interrupt for e in self.ended.values() if not e.well]
        return supervise.RunState(
            now=time.monotonic(),
            running=self.running(),
            failed_at=min(bad, default=None),
            stops=self.stops,
            hung_since=self.watcher.hung_since,
            all_hung=self.watcher.all_hung or self.watcher.all_held,
            hang_after=self.request.hang_after,
            deadline=None if self.request.timeout is None else (self._timed_from or self.began) + self.request.timeout,
            interrupted_at=self._interrupted_at,
            released=self._released,
            replaced=self._replaced,
            through_at=self._through_at,
            output_until=self._output_until,
            **self._patience(),
        )

    def _patience(self) -> dict[str, float]:
        """How long ranks that were told to end may take, where that is not as with cells. A program that is ended by
        somebody's wish may still use its group: it writes a checkpoint."""
        program = self.request.program
        if program is None or program.keep:
            return {}
        wished = self.ended_by == supervise.STOPPED and self.stop_signal != signal.SIGINT
        release = min(WISHED, program.shutdown / 2) if wished else supervise.RELEASE_AFTER
        return {"patience": program.shutdown, "release_after": release}

    def running(self) -> tuple[int, ...]:
        return self.watcher.running

    def _take(self, patience: float | None) -> None:
        """Wait for one event and handle it and all that have come with it."""
        due = (self._note_if_long(), self._look_if_due(), self._ask_through_if_due(), self._ask_line_if_due())
        asks = self._prompt is not None and self._prompt.open  # below what it has asked nothing is drawn
        look = None if asks else self.screen.refresh([self.outputs[r] for r in self.shown], self.watcher.status)
        waits = [w for w in (patience, look, *due) if w is not None]
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

    def _note_if_long(self) -> float | None:
        """Seconds until the run counts as long; None once that has been told."""
        left = self.began + LONG - time.monotonic()
        if left > 0 or self.noted:
            return None if self.noted else left
        self.noted = True
        self.when_long()
        return None

    def _drain(self) -> None:
        while not self.events.empty():
            self._handle(*self.events.get_nowait())

    def _fill_in(self) -> None:
        """What ranks that died had written, and their messages did not bring."""
        gone = [rank for rank, ended in self.ended.items() if ended.status in outcome.GONE or ended.code is not None]
        for rank, written in (self.workers.written(gone) if gone else {}).items():
            for stream, (start, text) in written.items():
                came = self.outputs[rank].received[stream]
                lost = f"\n… {start - came} characters lost …\n" * (start > came)
                missing = lost + text[max(0, came - start) :]
                if missing:
                    self._printed(rank, "stream", {"name": stream, "text": missing})

    def _handle(self, kind: str, rank: int, what: Any) -> None:
        if kind == "stop":
            self._stopped_at(what)
        elif kind == "place":
            self.watcher.answered(rank, *what)
        elif kind == "through":
            self._lets_through(rank, what)
        elif kind == "exit":
            self._died(rank, what)
        elif kind == "do":
            what()
        elif kind == OUTCOME:
            self._came_out(rank, what)
        elif kind == STOPPED:
            self.debugged.heard(rank, what["content"])
        elif kind in widgets.KINDS:
            self.widgets.take(rank, kind, what["content"], what["buffers"])
            self.outputs[rank].take(kind, what["content"])  # what an Output widget takes in
            if widgets.may_end_bar(kind, what["content"]):
                self._end_bars(rank)
        else:
            self._printed(rank, kind, what["content"])

    def _stopped_at(self, at: float) -> None:
        """Stop was pressed; it may have reached ranks before us."""
        self.stops += (at,)
        self._close_prompt()
        for ended in self.ended.values():
            if ended.own_interrupt and at - ended.at < supervise.STOP_COMES:
                ended.status = outcome.INTERRUPTED

    def _died(self, rank: int, event: dict[str, Any]) -> None:
        code, now = event["code"], time.monotonic()
        if rank not in self.ended:
            verdict = self._verdict(rank, "", outcome.process(code))
            self.ended[rank] = Ended(rank, verdict, now, content=event)
            self._output_until = now + LAST_OUTPUT
        if code is not None:
            self.ended[rank].code, self.ended[rank].gone_ns = code, time.time_ns()

    def _came_out(self, rank: int, message: dict[str, Any]) -> None:
        if rank in self.ended:
            return  # it was said again although it was on its way
        buffers = [bytes(b) for b in message["buffers"]]
        content = message["content"]
        if content.get("said"):
            self._traceback(rank, content["said"])
        status = self._verdict(rank, outcome.said(content), "lives")
        self.ended[rank] = Ended(rank, status, time.monotonic(), content, buffers)
        if status == outcome.FAILED:
            self.watcher.soon()
        if self.ended[rank].own_interrupt:
            self._output_until = time.monotonic() + supervise.STOP_COMES
        self._ask_next(rank)

    def _verdict(self, rank: int, said: str, process: str) -> RankStatus:
        stopped = self._interrupted_at is not None or (self.stops and said == "interrupt")
        ours = outcome.REPLACED if self._replaced or rank in self._given_up else outcome.INTERRUPTED if stopped else ""
        found = outcome.verdict(said, process, ours, outcome.PROGRAM if self.request.is_program else outcome.REQUEST)
        return outcome.verdict_of_script(said, ours, found) if self.request.spends else found

    def _printed(self, rank: int, kind: str, content: dict[str, Any]) -> None:
        if rank in self.ended:
            self._output_until = time.monotonic() + LAST_OUTPUT
        for stream, line in self.outputs[rank].take(kind, content):
            if rank in self.shown:
                self._show_line(rank, stream, line)
        if kind in widgets.SHOWING:
            self._end_bars(rank, 1)

    def _traceback(self, rank: int, text: str) -> None:
        """What Python would have written to stderr at a script's end. Where the report shows the first failure's
        traceback by itself, it goes to the files alone."""
        if self.screen.shows_reports():
            self.outputs[rank].keep("stderr", text)
        else:
            self._printed(rank, "stream", {"name": "stderr", "text": text})

    def _show_line(self, rank: int, stream: str, line: str) -> None:
        with nullcontext() if self._prompt is None else self._prompt.aside():
            self.screen.line(rank, stream, line)

    def _end_bars(self, rank: int, newest: int = 0) -> None:
        """A bar that is over is a line like any other; one that was closed is gone. newest: look at so many alone."""
        out = self.outputs[rank]
        for shown in [v for v in out.views[-newest:] if self.widgets.is_over(v.data)]:
            out.views.remove(shown)
            if rank in self.shown:
                shown.told = True
                for line in (self.widgets.words(shown.data) or "").splitlines():
                    self._show_line(rank, "stdout", line)

    def _settle_widgets(self) -> None:
        """What stays of the widgets that were shown."""
        shown = {rank: out.shown_widgets() for rank, out in self.outputs.items()}
        if not any(shown.values()):
            return
        reflect = self.screen.reflects()
        for rank, bundles in shown.items():
            how = reflect if rank in self.shown else None
            self.outputs[rank].settle(lambda data, how=how: self.widgets.settled(data, how))  # type: ignore[misc]
            self.widgets.drop_bars(bundles)

    # -- the ladder ----------------------------------------------------------------------

    def _say_why(self, what: str) -> None:
        """What is done, after what ends the run: who has failed is seen at once, however long the others take."""
        why = self.ending().so_far()
        why = f"{why[:WHY]} …" if len(why) > WHY else why
        self.screen.ends(f"{why}; {what}" if why else what)

    def _interrupt(self, action: supervise.Interrupt) -> None:
        self._close_prompt()
        self.ended_by = action.why
        self.watcher.proven = action.why == supervise.HUNG
        until = self.watcher.look_for_report()
        while self.watcher.waits_for_answers and time.monotonic() < until:
            with suppress(queue.Empty):
                self._handle(*self.events.get(timeout=max(0.0, until - time.monotonic())))
        if self.watcher.waits_for_answers:
            self.watcher.assess()  # without those that do not answer
        still = self.running()
        self._say_why(f"interrupting {rank_words(still)}")
        ends = self.request.spends and self.ended_by != supervise.STOPPED
        self.workers.signal(still, signal.SIGTERM if ends else self.stop_signal)
        self._interrupted_at = time.monotonic()

    def _release(self, action: supervise.Release) -> None:
        self._say_why(f"freeing {rank_words(action.ranks)}")
        self.then = self.next_request()
        for rank in self.ended:  # first: such a rank waits a moment for what is on its way, and the others are many
            self._ask_next(rank)
        self.workers.release(action.ranks, self.number, self.then)
        self._released = True
        self._next_through = time.monotonic() + supervise.PATIENCE / 2  # most are free long before

    def _ask_next(self, rank: int) -> None:
        """Have a rank that has failed, and left before it was to be freed, do what the freed ones do unasked."""
        ended = self.ended[rank]
        lives = not ended.well and ended.status not in outcome.GONE and not ended.content.get("broken")
        if self.then and lives and rank not in self.goes_on and ended.content.get("group", {}).get("touched"):
            self.goes_on.add(rank)
            self.workers.send(rank, {**self.then, "through": True}, self.hear, "", [])

    def _ask_through_if_due(self) -> float | None:
        """Ask the ranks that are to free themselves whether they let a message through first; seconds to the next."""
        if not self._released or self._replaced:
            return None
        now = time.monotonic()
        if now >= self._next_through:
            self._next_through = now + supervise.PATIENCE / 4
            self.workers.look(
                self.running(), {"op": "through"}, lambda rank, does: self.events.put(("through", rank, does))
            )
        return self._next_through - now

    def _lets_through(self, rank: int, does: object) -> None:
        if does is True and rank not in self.ended:
            self._through_at = time.monotonic()
            self.screen.ends(f"rank {rank} is transferring a message, which may finish; Stop interrupts it")

    def _replace(self, action: supervise.Replace) -> None:
        self.ended_by = self.ended_by or supervise.STOPPED
        self._say_why(f"ending {rank_words(action.ranks)}")
        self._replaced = True
        self._interrupted_at = self._interrupted_at or time.monotonic()  # what ends from here on, we have ended
        self.workers.kill(action.ranks)

    def _free(self) -> None:
        """Free what is blocked, without an interrupt; the program may go on, but for its process group."""
        blocked = tuple(r for r in self.running() if r in self.positions and self.positions[r].call is not None)
        if blocked and not self._released:
            self._release(supervise.Release(blocked))

    def send_line(self, ranks: Sequence[int], line: str) -> None:
        """As `debug`, in the run's own thread."""
        waiting = [r for r in ranks if r in self.debugged.stopped and r not in self.ended]
        self.debugged.sent(waiting, line)
        for rank in set(ranks) & set(self.debugged.talks) - set(waiting):
            self.debugged.refused(rank, line)

        def hear(rank: int, took: Any) -> None:
            if not took:
                self.events.put(("do", -1, lambda: self.debugged.refused(rank, line)))

        self.workers.look(waiting, {"op": "debug", "line": line}, hear)

    def _ask_line_if_due(self) -> float | None:
        """Ask for a line for ranks that have stopped, if one is due; seconds until it may be."""
        if self._prompt is None or not self.debugged.talks:
            return None
        self.events.hear(self._prompt)
        return self._prompt.look(self.screen.ready, over=self._interrupted_at is not None)

    def _close_prompt(self) -> None:
        if self._prompt is not None:
            self._prompt.close()

    def _give_up(self, ranks: Sequence[int]) -> None:
        self._given_up.update(ranks)
        self._stopped_at(time.monotonic())
        self.workers.kill([r for r in ranks if r in self.running()])

    # -- where the ranks are -----------------------------------------------------------------

    @property
    def positions(self) -> dict[int, Position]:
        return self.watcher.positions

    @property
    def looked_at(self) -> float:
        return self.watcher.looked_at

    @property
    def facts(self) -> dict[int, dict[str, Any]]:
        return self.watcher.facts

    @property
    def deadlock(self) -> Deadlock | None:
        return self.watcher.deadlock

    def _look_if_due(self) -> float | None:
        """Ask the ranks where they are if it is time; seconds until something about that is due."""
        return None if self._interrupted_at is not None else self.watcher.look_if_due()

    @contextmanager
    def _stop_by_signal(self) -> Iterator[None]:
        """While the run lasts, the kernel's interrupt is an event of the run."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, lambda *_: self.events.put(("stop", -1, time.monotonic())))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    # -- what came of it -----------------------------------------------------------------

    def ending(self) -> Ending:
        """What came of the run, as far as it is known now."""
        return Ending(
            self.workers, self.ended, self.running(), self.positions, self.facts, self.stuck, self.deadlock,
            self.ended_by, self._interrupted_at, self.stops, self.request.timeout,
            {r: str(o.log) for r, o in self.outputs.items()}, self.request.spends,
        )  # fmt: skip

    def error(self) -> RunFailed | PoolNotRunning | None:
        """What ended the run, with the report; None if it ended well."""
        return self.ending().error()

    def raise_if_bad(self) -> None:
        """Raise the error that says what ended the run, if it did not end well."""
        error = self.error()
        if error is not None:
            raise error

    def unwritten(self) -> str:
        """Where output could not be written down, and why; empty where it could."""
        failed = {r: (o.file.why, o.log) for r, o in self.outputs.items() if o.file.why}
        failed |= {r: tuple(e.content["unkept"]) for r, e in self.ended.items() if e.content.get("unkept")}
        if not failed:
            return ""
        why, path = failed[min(failed)]
        return f"output of {rank_words(failed)} could not be saved: {why} ({path}); the cell itself continued"
