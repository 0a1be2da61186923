"""The parts that capabilities have in one pool (`capability.PoolPart`): made when they are needed, called by lists.

The core calls what is in a list and knows nobody by name. A part has those methods that it needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from nbddp.protocol.capability import Capability, PoolPart, load
from nbddp.protocol.codec import Json
from nbddp.protocol.messages import MimeBundle

Lines = list[Callable[[], list[str]]]


class Hooks:
    """A list for each method that a part may have."""

    def __init__(self) -> None:
        # a shell with the magics; it gives its `Pool`
        self.installed: list[Callable[[Any, Callable[[], Any]], None]] = []
        self.removed: list[Callable[[], None]] = []
        # a line that is to be met; one that raises BadInput refuses it, and nothing has changed
        self.environment: list[Callable[[Any], Any]] = []  # its `LaunchSpec`; to an `EnvChange` of `nbddp.pool.change`
        self.machines: list[Callable[[Any, Any], Any]] = []  # and the `Node`s that there are; those to place workers on
        self.turned_away: list[Callable[[Mapping[str, str]], str]] = []  # why a host of such versions cannot join
        self.planned: list[Callable[[Any, Any], list[str]]] = []  # and its `Topology`; what to say of it
        self.renews: list[Callable[[Any], bool]] = []  # its `LaunchSpec`; whether it takes new workers
        # the pool, in its life and in lines
        self.started: list[Callable[[Any], None]] = []  # it has workers; given the agent of this machine
        self.ranks_ended: list[Callable[[Collection[int]], None]] = []  # their processes are over
        self.process_ended: list[Callable[[Mapping[str, Any]], None]] = []  # the agent's event, if the pool goes on
        self.stopped: list[Callable[[], None]] = []
        self.released: list[Callable[[], None]] = []  # what it holds besides processes is to be given back
        self.left: list[Callable[[], None]] = []  # the same, except for what another kernel is to find
        self.given_back: Lines = []  # what `released` gives back
        self.holds: Lines = []  # what `status` says besides its table
        self.notes: Lines = []  # what to say when a line is met, before a cell too
        self.shortcomings: Lines = []  # what does not work here
        self.figure_notes: list[Callable[[str], str]] = []  # command or option → what to say under its figure
        # a run, which is an `Execution`
        self.launched: list[Callable[[Any, str], None]] = []  # a `Request`, before its first attempt; the pool's run id
        self.tells: list[Callable[[Any], Mapping[str, Any]]] = []  # a program's `Request`; fields of its `RunSpec`s
        self.run_begins: list[Callable[[Any], None]] = []  # of a program, before it is sent
        self.ranks_gone: list[Callable[[Any, list[int]], None]] = []  # processes have ended; output may be added
        self.run_ended: list[Callable[[Any], None]] = []  # always, also where a `run_begins` has raised
        self.run_failed: list[Callable[[Any], None]] = []  # before that, where not every rank has finished
        # a run in which ranks have something to say, and their `Outcome`s; notes on them
        self.remarks: list[Callable[[Any, Sequence[Any]], list[str]]] = []
        self.printed_late: list[Callable[[Any, int, str, Json], None]] = []  # by a rank since the last run
        self.log_text: list[Callable[[Any, int, str], str]] = []  # run, rank, its log → what `%ddp log` prints
        # what is displayed, and may change by messages of its own
        self.display_words: list[Callable[[MimeBundle], str | None]] = []  # what it says now; None: not the part's
        self.display_over: list[Callable[[MimeBundle], bool]] = []  # whether it changes no more
        self.display_left: list[Callable[[MimeBundle, bool], MimeBundle | None]] = []  # what stays, in words or rich
        # an `OutputState` of `nbddp.output.page`; its `OutputPage`, or None where text is enough
        self.output_pages: list[Callable[[Any], Any]] = []
        self.reattached: list[Callable[[Any], None]] = []  # a shell; shows the run that a page has lost sight of


class PoolParts(Hooks):
    """A list for each method: of the parts that are made and have it, in the order of their rows. `messages`: types
    that any part hears, by a method (rank, type, content, buffers) -> whether a display of the rank may be over.

    `due`: conditions that have not come yet -> the parts that they make. `fields`: those of a `Request` that are such.
    """

    def __init__(self, pool: Any = None, rows: Iterable[Capability] = ()):
        """pool: what parts are made with."""
        super().__init__()
        self._pool = pool
        self._rows = {row.name: row.part for row in rows if row.part is not None}
        self._made: dict[str, Any] = {}
        self._lock = threading.RLock()
        self.due: dict[str, list[str]] = {}
        for name, part in self._rows.items():
            for condition in (*part.when, *part.messages):
                self.due.setdefault(condition, []).append(name)
        asked = [condition for condition in self.due if condition.startswith("field:")]
        self.fields = tuple([condition.removeprefix("field:") for condition in asked])
        self._hear: dict[str, list[Callable[[int, str, Json, Sequence[Any]], bool]]] = {}
        self.messages = frozenset(kind for row in self._rows.values() for kind in row.messages)

    def on(self, condition: str) -> None:
        """Have the parts that this makes: what a row has in `when`, or in `messages`."""
        if condition in self.due:
            with self._lock:
                for name in self.due.get(condition, ()):
                    self.of(name)
                self.due.pop(condition, None)

    def on_options(self, spec: Any) -> None:
        """Have the parts that the options of a line ask for, a `LaunchSpec`."""
        for option in spec.said:
            self.on(f"option:{option.name}")

    def of(self, name: str) -> Any:
        """The part of a capability."""
        with self._lock:
            if name not in self._made:
                self._made[name] = load(self._rows[name].target)(self._pool)
                made = [(row, self._made[name]) for name, row in self._rows.items() if name in self._made]
                for method, found in vars(self).items():
                    if isinstance(found, list):
                        found[:] = [_method(row, part, method) for row, part in made if hasattr(part, method)]
                self._hear = {kind: [p.message for row, p in made if kind in row.messages] for kind in self.messages}
            return self._made[name]

    def placed_on(self, spec: Any, nodes: Sequence[Any]) -> Sequence[Any]:
        """The machines that a plan for `spec`, a `LaunchSpec`, is made for, from those that there are."""
        self.on_options(spec)
        for replaced in self.machines:
            nodes = replaced(spec, nodes)
        return nodes

    def hear(self, rank: int, kind: str, content: Json, buffers: Sequence[Any] = ()) -> bool:
        """A message of a rank, in any thread; whether a display of the rank may be over with it."""
        self.on(kind)
        over = False
        for hear in self._hear.get(kind, ()):
            over |= bool(hear(rank, kind, content, buffers))
        return over


def _method(row: PoolPart, part: Any, name: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(part, name)
    if not row.asked or name not in ("launched", "run_begins", "run_ended"):
        return method

    def if_asked(run: Any, *more: Any) -> None:
        request = getattr(run, "request", run)
        if any(getattr(request, field) is not None for field in row.asked):
            method(run, *more)

    return if_asked


def call_all(told: Iterable[Callable[[], None]]) -> None:
    """Call each, also after one that raises. The last error is raised, with the others as its context."""
    first, *others = [*told] or [lambda: None]
    try:
        first()
    finally:
        if others:
            call_all(others)


def lines(told: Lines) -> list[str]:
    """What all of a list say. A list may grow meanwhile: a message in another thread makes a part."""
    return [line for each in [*told] for line in each()]
