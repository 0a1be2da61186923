"""The additions of capabilities to this worker: the parts that rows of the table name (`protocol.capability.RankPart`).

A part has those of these methods that it needs:

- begin(spec): before the program, or before another request is carried out.
- ended(error): the program has ended, well if `error` is None. Stop is still heard. A part that hears of some runs
  alone (`RankPart.hears`) returns True if what it has begun goes on. It then hears of the next run's end too.
- end(outcome, error): the run has ended. What it finds goes to `outcome.parts`, under its name.
- claim(frames) -> the `PendingCollective` that a thread with these frames is about to call, or None.
- position(found) -> the same `Whereabouts`, or what it knows better of where the rank is.
- called() -> group -> the collectives (`PastCall`) that it has seen.
- values(frame, line) -> names and what they held in a frame of an exception.
- note(raised) -> what else to say of an exception, or "".
- copied(): this process is a copy of the rank, without its threads, and goes on with what the part has. A part has it
  if that would not work otherwise.
- group_begins(): the program makes a default group. group_gone(): none is left of an earlier one, or its init failed.

Who begins first ends last. An error in begin, ended or end is reported with the outcome, and changes nothing else. A
part that sleeps (`RankPart.sleeps`) has none of the three called until it wakes.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from nbddp.protocol.capability import RankPart, load, rows
from nbddp.protocol.codec import Json
from nbddp.protocol.outcome import Outcome
from nbddp.protocol.run_spec import RunSpec
from nbddp.worker import failure
from nbddp.worker.cell_end import Exits, Forked
from nbddp.worker.output import PrintedOutput
from nbddp.worker.process_groups import Groups
from nbddp.worker.program import CellFiles
from nbddp.worker.release import Release, Reserve

HOOKS = (
    "begin",
    "ended",
    "end",
    "claim",
    "position",
    "called",
    "values",
    "note",
    "copied",
    "group_begins",
    "group_gone",
)
OF_RUN = ("begin", "ended", "end")


class RankWorker(Protocol):
    """What parts, requests and questions need of the IPython kernel. spec: the request that is carried out; outcome:
    what will be said of it; began: when it did, by `time.time_ns`, `perf_counter_ns` and the main thread's CPU time;
    leaves: whether what it leaves behind is let go of when it is over, as after an error;
    log_path: of the worker's log, empty in an engine that no agent of ours has started; pool_options: of the pool, that
    ranks get."""

    shell: Any
    files: CellFiles
    groups: Groups
    release: Release
    reserve: Reserve
    exits: Exits
    forked: Forked
    parts: WorkerParts
    printed: PrintedOutput
    log_path: str
    pool_options: Mapping[str, Any]
    spec: RunSpec | None
    began: tuple[int, int, int]
    outcome: Outcome
    leaves: bool

    def publish(self, kind: str, content: Json) -> None: ...
    def cell(self) -> int | None: ...
    def to_log(self, text: str) -> None: ...


class WorkerParts:
    """The parts of one worker. to_log: takes what concerns no cell."""

    def __init__(self, worker: RankWorker, to_log: Callable[[str], None]) -> None:
        self._worker, self._to_log = worker, to_log
        self._later: dict[str, RankPart] = {part.name: part for row in rows() for part in row.rank}
        asked = ("option:", "pool:")
        self._asked = {name: part.when for name, part in self._later.items() if part.when.startswith(asked)}
        self._hears = {name: part.hears for name, part in self._later.items() if part.hears}
        self._asleep = {name for name, part in self._later.items() if part.sleeps}
        self._begun: RunSpec | None = None  # the run that goes on
        self._deaf: set[str] = set()  # parts that do not hear of it
        self._open: set[str] = set()  # parts that have begun what has not ended: Stop may come in between
        self._once: list[tuple[str, Callable[..., Any]]] = []
        self._made: dict[str, Any] = {}
        self._hooks: dict[str, list[tuple[str, Callable[..., Any]]]] = {hook: [] for hook in HOOKS}
        self._errors: dict[str, str] = {}

    def start(self) -> None:
        """Make those that are there from the worker's start on."""
        self._make(lambda part: part.when == "start" or self._is_of_pool(part.when))

    def begin(self, spec: RunSpec) -> None:
        """Raises RuntimeError if one that an option asks for, of the run or of the pool, cannot begin. So no program
        runs without what was asked for, and no rank waits for the check of another."""
        self._make(lambda part: self._is_due(part.when, spec))
        self._deaf = {name for name, option in self._hears.items() if not spec.options.get(option)}
        left = self._open & self._deaf
        self._end_programs(left, RuntimeError("it was left on"))
        self._open |= self._hears.keys() - self._deaf
        self._begun = spec
        self.tell("begin", spec)
        self._deaf -= self._open
        for name, when in self._asked.items():
            if name in self._errors and self._is_due(when, spec):
                raise RuntimeError(f"{name} could not begin: {self._errors.pop(name)}")

    def ended(self, error: BaseException | None) -> None:
        self._end_programs(self._made.keys() - self._deaf, error)

    def _end_programs(self, names: Collection[str], error: BaseException | None) -> None:
        for name, method in [*self._hooks["ended"]]:
            if name in names and not self._surely(name, method, error):
                self._open.discard(name)

    def end(self, outcome: Outcome, error: BaseException | None) -> None:
        self._begun = None
        self.tell("end", outcome, error)
        for once in self._once:
            self._hooks["end"].remove(once)
        self._once = []
        outcome.part_errors, self._errors = tuple(self._errors.items()), {}

    def at_end(self, name: str, end: Callable[[Outcome, BaseException | None], None]) -> None:
        """Have this called as a part's `end` when the run that goes on ends."""
        self._once.append((name, end))
        self._hooks["end"].insert(0, (name, end))

    def of(self, hook: str) -> list[Callable[..., Any]]:
        """This method of each part that has it."""
        return [method for _, method in self._hooks[hook]]

    def __getitem__(self, name: str) -> Any:
        """The part of this name, made if it is not there. Raises KeyError if no row has it."""
        if name not in self._made:
            self.add(name, load(self._later[name].target)(self._worker))
            del self._later[name]
        return self._made[name]

    def add(self, name: str, part: Any) -> None:
        """Have a part hear of runs from the next one on; one that sleeps, once it wakes."""
        self._made[name] = part
        self._listen(name, [hook for hook in HOOKS if name not in self._asleep or hook not in OF_RUN])

    def wake(self, name: str) -> None:
        """Have a part that has slept hear of runs. Of the one that goes on it hears the begin now."""
        try:
            self._asleep.remove(name)
        except KeyError:  # it is awake
            return
        self._listen(name, OF_RUN)
        if self._begun is not None and hasattr(self._made[name], "begin"):
            self._surely(name, self._made[name].begin, self._begun)

    def _listen(self, name: str, hooks: Iterable[str]) -> None:
        for hook in hooks:
            if (method := getattr(self._made[name], hook, None)) is not None:
                at = len(self._hooks[hook]) if hook == "begin" else 0
                self._hooks[hook].insert(at, (name, method))

    def _make(self, is_due: Callable[[RankPart], bool]) -> None:
        for name in [part.name for part in self._later.values() if is_due(part)]:
            self._surely(name, self.__getitem__, name)

    def _is_of_pool(self, when: str) -> bool:
        kind, _, option = when.partition(":")
        return kind == "pool" and bool(self._worker.pool_options.get(option))

    def _is_due(self, when: str, spec: RunSpec) -> bool:
        kind, _, option = when.partition(":")
        if kind == "option":
            return bool(spec.options.get(option))
        if kind == "hosts":
            return spec.rendezvous is not None and bool(spec.rendezvous.listen)
        return self._is_of_pool(when)

    def tell(self, hook: str, *args: Any) -> None:
        """Call this method of each part that has it, and hears of the run."""
        for name, method in [*self._hooks[hook]]:
            if name not in self._deaf:
                self._surely(name, method, *args)

    def _surely(self, name: str, do: Callable[..., Any], *args: Any) -> Any:
        try:
            return do(*args)
        except Exception as e:
            self._errors.setdefault(name, f"{failure.type_name(e)}: {failure.message(e)}")
            self._to_log(f"{name}: {''.join(traceback.format_exception(e))}")
            return None
