"""The pool behind its panels: one session for each pool, which carries out the requests of a view and samples the pool.
It holds no rules: what is shown is decided in `state`.

Commands change the pool in the notebook kernel's main thread alone, as cells do. A front end's click comes there; with
ipykernel's subshells it comes in another thread, and is handed over.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from nbddp.agent.client import AgentClient
from nbddp.analysis.steps import Recording
from nbddp.capabilities.debugger import sender, transcript
from nbddp.capabilities.debugger.transcript import post_mortem
from nbddp.capabilities.panel import meters, output, poll, rows
from nbddp.capabilities.panel import state as panel_state
from nbddp.capabilities.panel.curves import curve
from nbddp.capabilities.panel.plan import plan_of
from nbddp.capabilities.panel.pump import can_hear, pump
from nbddp.capabilities.panel.state import DEBUGGER, LAUNCH, RANKS, TIMINGS, PanelModel, State
from nbddp.capabilities.stacks.command import live
from nbddp.capabilities.timings.analysis import analysed
from nbddp.capabilities.timings.document import step_document, words
from nbddp.capabilities.timings.text import table
from nbddp.errors import BadInput, NbddpError, PoolError, RunFailed
from nbddp.execution.execution import Execution
from nbddp.figures.document.page import in_widget
from nbddp.launch.topology import Topology, rank_words
from nbddp.pool.node import weakly
from nbddp.pool.pool import WorkerPool
from nbddp.pool.state import PoolState

EVERY = 0.5  # seconds between two looks
CURVE_EVERY = 0.9  # seconds between two drawings of the curve while a cell runs: every second look
ACCIDENTS = 10  # looks in a row that may come to nothing
LOG_BYTES = 16_384  # of a log's end


class Session:
    """One for each pool, with all its panels. A thread looks at the pool while there are views, and ends with them.

    A command says what it does before it does it: what comes of it is said by that thread, and stays.
    """

    def __init__(self, pool: WorkerPool):
        self._pool = weakref.ref(pool)
        pool.warm_up()
        machine = tuple(pool.machine())
        plan = plan_of(pool.spec, pool.topology)
        standing = plan if pool.topology is not None else None
        first = State(plan=plan, placed=pool.topology, standing=standing, place=pool.parts.placed_on)
        self._looked_at: Topology | None = None  # the pool at the last look
        self.model = PanelModel(panel_state.known(first, machine), weakly(self._not_shown))
        self._uses, self._paces = poll.Uses(), poll.Paces()
        self._curved = float("-inf")  # when the curve was drawn
        self._wanted = -1  # the step that was selected last
        self._draws = threading.Lock()
        self._after: Callable[[], None] | None = None  # what is to be done when that has ended
        pool.parts.of("panel").session = weakref.ref(self)
        pool.parts.of("debugger").elsewhere = functools.partial(_debugs, weakref.ref(self))
        last = pool.last_run
        self._over = last.number if last is not None and pool.current is None else 0  # seen to end
        self._known = self._over  # after whose end a command was given
        self._named = (0, "")  # the run that was seen last
        self._views = 0
        self._end = threading.Event()
        self._lock = threading.Lock()

    @property
    def pool(self) -> WorkerPool:
        """The pool. Raises PoolError if it has been dropped."""
        pool = self._pool()
        if pool is None:
            raise PoolError("the pool of this panel has stopped; %ddp panel opens a panel for the current pool")
        return pool

    # -- views ---------------------------------------------------------------------------------

    def open(self, view: Callable[[State, State], None]) -> Callable[[], None]:
        """Have a view told of changes; what ends that."""
        leave = self.model.watch(view)
        with self._lock:
            self._views += 1
            if self._views == 1:
                self._end = threading.Event()
                looking = (weakref.ref(self), self._end)
                threading.Thread(target=_look, args=looking, name="nbddp-panel", daemon=True).start()
        left = threading.Event()

        def close() -> None:
            if not left.is_set():
                left.set()
                leave()
                with self._lock:
                    self._views -= 1
                    if not self._views:
                        self._end.set()

        return close

    def look(self) -> bool:
        """See how things are; False once the pool is gone."""
        pool = self._pool()
        if pool is None:
            return False
        now = pool.topology if pool.running else None
        if (not self.model.state.machine or now is not self._looked_at) and (machine := pool.machine()):
            self.model.change(panel_state.known, machine)
            self._looked_at = now
        if self.model.state.stage is None:
            self.model.change(panel_state.placed, now, pool.spec)
            self._watch(pool, pool.topology)
        return True

    def _watch(self, pool: WorkerPool, placed: Topology | None) -> None:
        """See what the ranks do, and how the run has ended that was on."""
        run = pool.current
        run = run if run is not None and run.request.is_program else None
        last = run or pool.last_run
        over = last is not None and run is None and last.number != self._over  # it has ended since the last look
        if not pool.running:
            placed = None
        if placed is not None:
            self._uses.take(pool, placed)
            if last is not None:
                self._paces.ask(pool, last, over=run is None)
        with self.model.together():  # each view is drawn once
            self._note_run(run)
            if placed is not None:
                seen = poll.look(pool, run)
                ranks = rows.rows(placed, seen, self._uses.before, self._uses.now, dict(self._paces.steps))
                seconds = time.monotonic() - run.began if run is not None else 0.0
                self.model.change(panel_state.seen, ranks, seen.program, seconds)
                if run is not None:
                    self.model.change(panel_state.measured, meters.sample(seconds, self._uses.now.values()))
            other = self._paces.run != self.model.state.run
            if self._paces.new and (other or run is None or time.monotonic() - self._curved >= CURVE_EVERY):
                self._paces.new, self._curved = False, time.monotonic()
                drawn = curve(dict(self._paces.steps))
                self.model.change(panel_state.timed, self._paces.run, drawn, " ".join(notes_on_times(pool)))
                if run is None:
                    self._keep_past()  # its last steps have come after its end
            if last is not None and (run is not None or over):
                views = sender.transcripts_of(last).views  # not twice a second, but at once
                views["panel"] = functools.partial(self._talked, last)
                self._talked(last)
                outputs = output.outputs([last.outputs[r] for r in sorted(last.outputs)])
                self.model.change(panel_state.printed, outputs, last.number)
        if over and last is not None:
            self._over = last.number
            self._ended(last)

    def _note_run(self, run: Execution | None) -> None:
        """Keep what was measured of the run before: the next may begin before a look has seen it end."""
        if self._paces.run != self.model.state.run:
            self._keep_past()
        if run is not None:
            self._named = (run.number, poll.named(run))

    def _keep_past(self) -> None:
        """Keep what was measured of the run whose curve is drawn."""
        state, (number, name) = self.model.state, self._named
        if number == state.run:
            past = meters.past(number, name, state.curve, state.meters)
            self.model.change(panel_state.ended, past, state.has_failed)

    def _talked(self, run: Execution, *news: Any) -> None:
        talks = sender.transcripts_of(run).talks
        self.model.change(panel_state.talked, [talk for _, talk in sorted(talks.items())])

    def _ended(self, run: Execution) -> None:
        """Say how a run has ended, and do what was asked for meanwhile. What a command has said since stays."""
        error = run.error()
        self._named = (run.number, poll.named(run))
        self._keep_past()
        self.model.change(panel_state.ended, None, isinstance(error, RunFailed))
        if run.number != self._known:
            self._say(f"{poll.named(run)}: {error}" if error is not None else f"{poll.named(run)} ended on all ranks")
        if (after := self._after) is not None:
            self._after = None
            in_main(after)

    # -- commands ------------------------------------------------------------------------------

    def move(self, control: str, value: Any) -> None:
        self.model.change(panel_state.moved, control, value)

    def start(self) -> None:
        """Have the pool that is planned."""
        if not self.model.state.may_start:  # the button can always be pressed: one that is off drops the focus
            self._say(self.model.state.why_not(), LAUNCH)
        elif (run := self._current()) is not None:
            self._say(f"{poll.named(run)} is running; press Start after it has finished, or press Stop", LAUNCH)
        else:
            self.model.change(panel_state.began)
            in_main(self._start)

    def _start(self) -> None:
        pool = self.pool
        try:
            notes = pool.ensure(self.model.state.plan.spec(), lambda text: self.model.change(panel_state.reached, text))
            self.model.change(panel_state.started, pool.placed(), pool.spec, notes)
        except NbddpError as e:
            self.model.change(panel_state.failed, str(e), log_of(pool, e))
        except KeyboardInterrupt:
            self.model.change(panel_state.failed, "the start was stopped by the user", ())
        except BaseException as e:
            self.model.change(panel_state.failed, f"{type(e).__name__}: {e}", log_of(pool, e))
            raise

    def stop(self) -> None:
        """End the cell as Stop does."""
        if (run := self._busy("there is no cell to stop")) is not None:
            self._say(f"stopping {poll.named(run)} on {rank_words(run.running())}")
            run.stop()

    def free(self) -> None:
        """Have collectives that are blocked raise."""
        if (run := self._busy("no cell is running, so no rank is blocked")) is None:
            return
        blocked = [r for r, p in sorted(dict(run.positions).items()) if p.call is not None and r in run.running()]
        if blocked:
            self._say(f"unblocking {rank_words(blocked)}: the blocked call raises an error there")
            run.free()
        else:
            self._say("no rank is blocked in a collective")

    def restart(self, ranks: Sequence[int] | None) -> None:
        """New processes for these ranks (None: all); a cell that runs ends before."""
        pool = self.pool
        if not pool.running:
            self._say("no workers are running, so there is nothing to restart; Start starts them")
            return
        chosen = sorted(pool.workers) if ranks is None else [r for r in ranks if r in pool.workers]
        run = self._current()
        if run is None:
            in_main(lambda: self._do(lambda: "; ".join(pool.restart(chosen))))
            return
        self._after = lambda: self._do(lambda: "; ".join([*pool.group.renew(), f"{rank_words(chosen)} restarted"]))
        self._say(f"stopping {poll.named(run)}, and restarting {rank_words(chosen)}")
        run.replace(chosen)

    def shut_down(self) -> None:
        """End the pool; a cell that runs ends before."""
        pool = self.pool
        if not pool.running:
            self._say("no workers are running, so there is nothing to shut down")
            return

        def end() -> str:
            size = pool.world_size
            pool.stop()
            return f"pool of {size} stopped; variables on its workers are lost"

        run = self._current()
        if run is None:
            in_main(lambda: self._do(end))
            return
        self._after = lambda: self._do(end)
        self._say(f"stopping {poll.named(run)}, then the pool")
        run.stop()

    def dismiss(self) -> None:
        """Take away what the last command has said."""
        self.model.change(panel_state.said, "")

    def complete(self, line: str, rank: int | None, hear: Callable[[list[str]], None]) -> None:
        """Names that may complete a line for a rank that is stopped, of the first one if none is named. They come in
        another thread."""
        run = self._current()
        stopped = sender.transcripts_of(run).stopped if run is not None else []
        if run is not None and (whom := [r for r in stopped if rank in (None, r)]):
            sender.complete(run, whom[0], line, hear)
        else:
            hear([])

    def show(self, control: str, value: Any) -> None:
        self.model.change(panel_state.showing, control, value)

    def select(self, number: int) -> None:
        """Show the timeline of a step, of the last one if several are selected at once. Ranks of one machine are asked
        in a thread, also while they work; those of several, whose clocks are compared first, when no cell runs."""
        pool, self._wanted = self.pool, number
        self.model.change(panel_state.wants, number)
        if not pool.running or not self.model.state.curve.points:
            self._say("no step of DDP is recorded; a training cell records them", TIMINGS)
        elif pool.group.sees_files:  # no node is reached by an agent of another host
            asked = (pool, self._paces.run, number)
            threading.Thread(target=self._select, args=asked, name="nbddp-step", daemon=True).start()
        elif self._current() is not None:
            self._say("the ranks' clocks on several hosts are compared after the cell; select the step then", TIMINGS)
        else:
            in_main(lambda: self._do(lambda: self._take_step(pool.timings(), number), TIMINGS))

    def _select(self, pool: WorkerPool, run: int, number: int) -> None:
        try:
            recording = poll.step(pool, run, number)
            with self._draws:  # one at a time: of several that are selected in turn the last alone is drawn
                if number == self._wanted:
                    self._say(self._take_step(recording, number), TIMINGS)
        except NbddpError as e:
            self._say(str(e), TIMINGS)

    def _take_step(self, recording: Recording, number: int) -> str:
        view, notes = analysed(recording, number), tuple(notes_on_times(self.pool))
        drawn, said, tables = step_document(view), "\n".join([words(view), *notes]), (table(view),)
        html = in_widget(drawn, said, tables, notes)
        self.model.change(panel_state.selected, panel_state.Timeline(number, said, drawn, tables, notes, html))
        return f"step {number} of {recording.model}"

    def debug(self, line: str, rank: int | None = None) -> None:
        """A line for the debugger of a rank, or of all that stand in theirs."""
        if (
            run := self._busy("no cell is running; breakpoint() in a %%ddp cell stops its ranks there", DEBUGGER)
        ) is None:
            return
        try:
            asked = transcript.read(line)
            if asked.ends:
                self.stop()
                return
            if asked.asks_help:
                self.model.change(panel_state.said, "commands of the debugger", transcript.HELP, DEBUGGER)
                return
            if not asked.text:
                raise BadInput(f"write a line after {line}, such as {line} p x")
            ranks = transcript.chosen(sender.transcripts_of(run).stopped, asked.ranks if rank is None else (rank,))
        except BadInput as e:
            self._say(str(e), DEBUGGER)
            return
        self._say(f"{asked.text} was sent to {rank_words(ranks)}", DEBUGGER)
        sender.send(run, ranks, asked.text)

    def post_mortem(self) -> None:
        """The frames of the rank that failed first, and what its names held."""
        last = self.pool.last_run
        error = last.error() if last is not None and self._current() is None else None
        if isinstance(error, RunFailed):
            self.model.change(panel_state.said, str(error), post_mortem(error), DEBUGGER)
        else:
            self._say("no rank has failed in the last cell", DEBUGGER)

    def stacks(self) -> None:
        """Where every rank is. Asked in a thread, by a client of its own, so that a cell goes on."""
        pool = self.pool
        if not pool.running or pool.agent is None:
            self._say("no workers are running, so there are no stacks")
            return
        self._say("asking every rank for its stack …")
        threading.Thread(target=self._stacks, args=(pool.agent,), name="nbddp-stacks", daemon=True).start()

    def _stacks(self, agent: AgentClient) -> None:
        try:
            self.model.change(panel_state.said, "stacks of all ranks", repr(live(agent)), RANKS)
        except NbddpError as e:
            self._say(str(e))

    def _not_shown(self, error: Exception) -> None:
        """A view could not show a state: print the traceback, and say so in the panel."""
        traceback.print_exception(error)
        self._say(f"a part of the panel could not be shown ({type(error).__name__}: {error})", "")

    def _say(self, words: str, page: str = RANKS) -> None:
        self.model.change(panel_state.said, words, "", page)

    def _current(self) -> Execution | None:
        """The run that a command is for."""
        run = self.pool.current
        if run is not None and run.request.is_program:
            return run
        if (last := self.pool.last_run) is not None:
            self._known = last.number
        return None

    def _busy(self, otherwise: str, page: str = RANKS) -> Execution | None:
        """The run that is on; without one that is said."""
        run = self._current()
        if run is None:
            self._say(otherwise, page)
        return run

    def _do(self, command: Callable[[], str], page: str = RANKS) -> None:
        """Carry a command out in the main thread, and say what it did."""
        try:
            self._say(command(), page)
        except NbddpError as e:
            self._say(str(e), page)
        self.look()


_sessions: weakref.WeakKeyDictionary[WorkerPool, Session] = weakref.WeakKeyDictionary()


def session_of(pool: WorkerPool) -> Session:
    """The session of a pool, which all its panels share."""
    if pool not in _sessions:
        _sessions[pool] = Session(pool)
    return _sessions[pool]


class PanelPart:
    """The part of one pool: while a program runs, the front end is heard if a panel is open."""

    def __init__(self, pool: PoolState):
        self.session: Callable[[], Session | None] = lambda: None

    def run_begins(self, run: Execution) -> None:
        found = self.session()
        if run.request.is_program and found is not None and found.model.watched and (heard := pump()) is not None:
            run.events.hear(heard)


def _debugs(session: weakref.ref[Session]) -> bool:
    """Whether a panel is open, where ranks that stop can be answered while the cell runs."""
    found = session()
    return found is not None and found.model.watched and can_hear()


def _look(session: weakref.ref[Session], end: threading.Event) -> None:
    """The session's thread, which keeps neither it nor the pool. A look at a pool that is being changed may fail. The
    next look succeeds then; if none does for a while, the error is no accident."""
    failed = 0
    while not end.wait(EVERY):
        found = session()
        if found is None:
            return
        try:
            if not found.look():
                return
            failed = 0
        except Exception:
            failed += 1
            if failed > ACCIDENTS:
                raise
        del found


def notes_on_times(pool: WorkerPool) -> list[str]:
    """What capabilities have to say of times that were measured on this pool."""
    return [line for say in pool.parts.figure_notes if (line := say("timings"))]


def log_of(pool: WorkerPool, error: BaseException) -> Sequence[str]:
    """The end of the log that says more of a failed start: of the agent, or of the error's own."""
    paths = [getattr(error, "log", ""), pool.agent.log if pool.agent is not None else ""]
    for path in filter(None, paths):
        try:
            with open(path, "rb") as file:
                file.seek(0, 2)
                file.seek(max(0, file.tell() - LOG_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError as e:
            return [f"{path}: {e.strerror}"]
        if lines:
            return lines
    return ()


def in_main(call: Callable[[], None]) -> None:
    """Call it in the main thread: at once if this is it, else as soon as the notebook kernel is idle."""
    if threading.current_thread() is threading.main_thread():
        call()
        return
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    loop = getattr(getattr(shell, "kernel", None), "io_loop", None)
    if loop is None:
        raise PoolError("a panel's buttons need a Jupyter kernel; in a terminal type %ddp start")
    loop.add_callback(call)
