"""All that a panel shows, as one value, and how it changes. Pure: a view draws a `State` and holds no rules.

`PanelModel` holds the value that is now, and tells its views of a new one. It may be changed from any thread; views are
informed in the thread that has changed it, one after the other.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from nbddp.analysis.placement import describe
from nbddp.capabilities.debugger.transcript import Talk
from nbddp.capabilities.panel.curves import Curve
from nbddp.capabilities.panel.meters import PastRun, Sample, kept, sampled
from nbddp.capabilities.panel.output import ALL, Output, Showing
from nbddp.capabilities.panel.plan import OF_CELLS, Considered, PanelPlan, Place, as_they_are, considered, plan_of
from nbddp.capabilities.panel.rows import Rank
from nbddp.figures.document.page import Document
from nbddp.figures.table import Table
from nbddp.launch.machine import Node
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import Topology, counted
from nbddp.output import progress
from nbddp.output.progress import STAGES, Progress, StageText

LOG = 40  # lines of a log that are shown
PAGES = LAUNCH, RANKS, OUTPUT, TIMINGS, DEBUGGER = ("Launch", "Ranks", "Output", "Timings", "Debugger")


@dataclass(frozen=True)
class Stage:
    """What a start is at: `done` of `of`, where that can be counted."""

    words: str
    part: progress.Stage = STAGES[0]
    done: int = 0
    of: int = 0

    def text(self) -> str:
        return f"{self.words} ({self.done} of {self.of})" if self.of else self.words


@dataclass(frozen=True)
class Timeline:
    """One step: its drawing, as HTML of the panel too, and in words and tables. captions: their last lines."""

    number: int
    words: str
    document: Document = field(default_factory=lambda: Document(()))
    tables: tuple[Table, ...] = ()
    captions: tuple[str, ...] = ()
    html: str = ""


@dataclass(frozen=True)
class State:
    """`machine`: the nodes that there are, none while nobody knows them; `place`: what makes of them those that a plan
    is for. `placed`: the running pool's layout, and `standing`: the controls' values that it was made with.
    `stage`: what a start is at, None where none goes on; `failure`: why the last one failed, with the end of a `log`.
    `notice`: what the last command has done; `detail`: more of it, such as stacks; `page`: where both are shown, on
    every page if it is empty. `ranks`: a row each; `program`: what runs on them, since `seconds`. `outputs`: what the
    last program, the run `printer`, has printed, of which `showing` is seen; `room`: the most lines of it that were in
    progress at once. `curve`: the steps of a `run`, and a `step` of them; `timing_note`: what is to be said of such
    times; `wanted`: the step that was chosen last, or -1; `meters`: what the run's processes have used; `past`: runs
    before. `talks`: what ranks say that have stopped in the debugger; `has_failed`: whether the last program has."""

    plan: PanelPlan = field(default_factory=PanelPlan)
    machine: tuple[Node, ...] = ()
    place: Place = as_they_are
    considered: Considered = field(default_factory=Considered)
    placed: Topology | None = None
    standing: PanelPlan | None = None
    stage: Stage | None = None
    failure: str = ""
    log: tuple[str, ...] = ()
    notice: str = ""
    ranks: tuple[Rank, ...] = ()
    program: str = ""
    seconds: int = 0
    detail: str = ""
    page: str = ""
    outputs: tuple[Output, ...] = ()
    showing: Showing = field(default_factory=Showing)
    printer: int = 0
    room: int = 0
    talks: tuple[Talk, ...] = ()
    run: int = 0
    curve: Curve = field(default_factory=Curve)
    step: Timeline | None = None
    timing_note: str = ""
    wanted: int = -1
    meters: tuple[Sample, ...] = ()
    past: tuple[PastRun, ...] = ()
    has_failed: bool = False

    @property
    def may_start(self) -> bool:
        return self.stage is None and self.considered.topology is not None

    def why_not(self) -> str:
        """Why nothing can be started now."""
        if self.stage is not None:
            return "a start is under way"
        return self.considered.refusal or self.considered.note

    def pool_words(self) -> str:
        """What the pool is like, in a line."""
        if self.stage is not None:
            return f"starting: {self.stage.text()} …"
        if self.placed is None:
            return "no workers are running"
        if self.program:
            return f"{self.program} is running: {self.placed.equation()}"
        return f"ready: {self.placed.equation()}"

    def describe(self) -> str:
        """All that the panel shows, as lines."""
        found = self.considered
        lines = [self.pool_words()]
        if self.placed is None and found.topology is not None:
            lines += ["planned:", *(f"  {line}" for line in describe(found.topology).splitlines())]
        elif self.placed is not None:
            lines += describe(self.placed).splitlines()[1:]
        lines += [f"not possible: {found.refusal}"] if found.refusal else []
        lines += [f"  {line}" for line in (found.cell, found.torchrun, found.of_torchrun()) if line]
        lines += [self.failure, *self.log] if self.failure else []
        return "\n".join(lines)


# -- how it changes: each gives a State from a State ---------------------------------------------


def moved(state: State, control: str, value: Any) -> State:
    """A launch control has another value."""
    plan = replace(state.plan, **{control: value})
    return replace(state, plan=plan, considered=considered(plan, state.machine, control, state.place))


def known(state: State, machine: Sequence[Node]) -> State:
    """It is known what machines there are."""
    return replace(state, machine=tuple(machine), considered=considered(state.plan, machine, place=state.place))


def began(state: State) -> State:
    """A start begins; that is while no cell runs, also if none has looked since the last one ended."""
    return replace(state, stage=Stage("preparing"), failure="", log=(), notice="", detail="", program="")


def reached(state: State, text: str) -> State:
    """A start reports this; a text that belongs to no stage leaves it where it is."""
    before = state.stage.part if state.stage is not None else STAGES[0]
    part = (text.stage if isinstance(text, StageText) else None) or before
    if isinstance(text, Progress):
        return replace(state, stage=Stage(text.words, part, text.done, text.of))
    return replace(state, stage=Stage(text, part))


def started(state: State, now: Topology, spec: LaunchSpec, notes: Sequence[str]) -> State:
    """A start has ended well."""
    said = "; ".join([f"{STAGES[-1]}: {now.equation()}", *notes])
    return replace(placed(state, now, spec), stage=None, notice=said, detail="", page=LAUNCH)


def failed(state: State, words: str, log: Sequence[str]) -> State:
    """A start has failed."""
    return replace(state, stage=None, failure=words, notice="", detail="", log=tuple(log[-LOG:]))


def seen(state: State, ranks: Sequence[Rank], program: str, seconds: float) -> State:
    """This is how the ranks are."""
    return replace(state, ranks=tuple(ranks), program=program, seconds=int(seconds))


def printed(state: State, outputs: tuple[Output, ...], run: int = 0) -> State:
    """This is what the ranks have printed in a run; a rank that is no longer among them is not shown alone."""
    there = {ALL, *(out.rank for out in outputs)}
    kept = state.showing if state.showing.rank in there else replace(state.showing, rank=ALL)
    lines = sum(len(out.moving) for out in outputs)
    room = max(lines, state.room if run == state.printer else 0)
    return replace(state, outputs=outputs, showing=kept, printer=run, room=room)


def showing(state: State, control: str, value: Any) -> State:
    """Another part of what they have printed is to be seen."""
    return replace(state, showing=replace(state.showing, **{control: value}))


def talked(state: State, talks: Sequence[Talk]) -> State:
    """This is what ranks in their debuggers have said."""
    return replace(state, talks=tuple(talks))


def timed(state: State, run: int, curve: Curve, note: str = "") -> State:
    """These are the steps of a run so far; of another run no step is chosen."""
    if run == state.run:
        return replace(state, curve=curve, timing_note=note)
    return replace(state, run=run, curve=curve, step=None, timing_note=note, wanted=-1, meters=())


def wants(state: State, number: int) -> State:
    """This step has been chosen, and its timeline is being made."""
    return replace(state, wanted=number)


def measured(state: State, sample: Sample) -> State:
    """This is what the processes of the run use now."""
    return replace(state, meters=sampled(state.meters, sample))


def ended(state: State, run: PastRun | None, has_failed: bool) -> State:
    """A program has ended. run: what is kept of it; None if it had no step of DDP."""
    return replace(state, past=kept(state.past, run) if run is not None else state.past, has_failed=has_failed)


def selected(state: State, step: Timeline) -> State:
    """This step is looked at."""
    return replace(state, step=step, wanted=step.number if state.wanted < 0 else state.wanted)


def said(state: State, notice: str, detail: str = "", page: str = "") -> State:
    """A command has done this."""
    return replace(state, notice=notice, detail=detail, page=page)


def placed(state: State, now: Topology | None, spec: LaunchSpec) -> State:
    """The pool is as a cell or a command has made it, from `spec`; what is planned begins there, and what concerns
    cells alone stays."""
    if now is None:
        return state if state.placed is None else replace(state, placed=None, standing=None, ranks=())
    pool = plan_of(spec, now)
    if (now, pool) == (state.placed, state.standing):
        return state
    plan = replace(pool, **{name: getattr(state.plan, name) for name in OF_CELLS})
    return replace(
        state, placed=now, standing=pool, plan=plan, considered=considered(plan, state.machine, place=state.place)
    )


class PanelModel:
    """The present state, and who is informed of the next. `report`: called with the error of a view that could not show
    a state, once for each error of each view; the other views, and whoever changed the state, go on."""

    def __init__(self, state: State, report: Callable[[Exception], None] = traceback.print_exception):
        self.state = state
        self._report = report
        self._views: list[_View] = []
        self._lock = threading.RLock()
        self._begun: State | None = None  # the state before a block of changes

    def watch(self, view: Callable[[State, State], None]) -> Callable[[], None]:
        """Have `view(before, now)` called after each change; what ends that."""
        watching = _View(view)
        with self._lock:
            self._views.append(watching)

        def leave() -> None:
            with self._lock:
                if watching in self._views:
                    self._views.remove(watching)

        return leave

    @property
    def watched(self) -> bool:
        return bool(self._views)

    def change(self, rule: Callable[..., State], *args: Any) -> None:
        """Have `rule(state, *args)` be the state."""
        with self.together():
            self.state = rule(self.state, *args)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Have views told once of all changes of the block, which must not wait for anything."""
        with self._lock:
            if self._begun is not None:  # within another one
                yield
                return
            before = self._begun = self.state
            try:
                yield
            finally:
                self._begun = None
                if self.state != before:
                    now = self.state
                    errors = [view.tell(before, now) for view in list(self._views)]
                    for error in filter(None, errors):
                        self._report(error)


@dataclass(eq=False)
class _View:
    """Who is informed of changes, and which errors of that are reported: by type, and the lines that led there."""

    call: Callable[[State, State], None]
    reported: set[tuple[Any, ...]] = field(default_factory=set)

    def tell(self, before: State, now: State) -> Exception | None:
        """The error of showing this state, if it is a new one."""
        try:
            self.call(before, now)
        except Exception as e:
            which = type(e), *(line for _, line in traceback.walk_tb(e.__traceback__))
            if which not in self.reported:
                self.reported.add(which)
                return e
        return None


# -- which buttons act -----------------------------------------------------------------------------
#
# A button that would do nothing is shown so, and its tooltip says why. It can still be pressed, which says the same:
# one that a front end disables drops the keyboard's focus.

STEPPING = ("Next", "Step in", "Out", "Continue", "Send")


def start_label(state: State) -> str:
    """What Start will do: `Start 4 workers`, `Resize to 6 workers`, `Change the pool`."""
    planned, now = state.considered.topology, state.placed
    if planned is None:
        return "Start" if now is None else "Change the pool"
    workers = counted(planned.world_size, "worker")
    if now is None or state.plan == state.standing:
        return f"Start {workers}"
    return f"Resize to {workers}" if planned.world_size != now.world_size else "Change the pool"


def why_off(state: State) -> Mapping[str, str]:
    """Button → why it would do nothing now; empty if it acts."""
    pool = "" if state.placed is not None else "no workers are running"
    cell = "" if state.program else "no cell is running"
    blocked = any(row.state == "waiting" for row in state.ranks)
    stopped = any(talk.stopped for talk in state.talks)
    idle = cell or ("" if blocked else "no rank is blocked in a collective")
    post = f"{state.program} is running" if state.program else "" if state.has_failed else "no cell has failed"
    return {
        "Start": _why_no_start(state), "Stop": cell, "Free": idle, "Stacks": pool, "Restart": pool, "Shut down": pool,
        "Show": "" if state.curve.points else "no step of DDP is recorded", "Post-mortem": post,
        **dict.fromkeys(STEPPING, "" if cell == "" and stopped else "no rank waits in a debugger"),
    }  # fmt: skip


def _why_no_start(state: State) -> str:
    if not state.may_start:
        return state.why_not()
    if state.program:
        return f"{state.program} is running"
    whole = all(row.state != "dead" for row in state.ranks)
    return "the pool is as planned" if state.placed is not None and state.plan == state.standing and whole else ""
