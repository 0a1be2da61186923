"""The parts that capabilities have in one pool (`capability.PoolPart`): made when they are needed, called by lists.

The core calls what is in a list and knows nobody by name. A part has those methods that it needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nbddp.protocol.capability import Capability, load


class PoolParts:
    """A list for each method: of the parts that are made and have it, in the order of their rows. `messages`: types
    that any part hears.

    A mimebundle that is displayed and may change by messages of its own:

    - words: (data) -> what it says now, or None if it is no display of the part's.
    - is_over: (data) -> whether it changes no more, and is a line like any other.
    - settled: (data, whether rich displays are seen) -> the mimebundle that stays, empty if nothing does; or None.

    A run, which is an `Execution`:

    - launched: (Request, the pool's run id) a cell or a script is to run, in one attempt or several.
    - tells: (Request) -> fields of the `RunSpec` that every rank gets.
    - run_begins: (run) before it is sent.
    - run_ended: (run) always, also where a `run_begins` has raised.

    The pool, and a shell with the magics:

    - installed: (shell, a function that gives the `Pool`) the magics are loaded.
    - removed: () they are removed.
    - notes: () -> what to say when a line is met, before a cell too, in lines.
    - offers: () -> what workers could have been started on instead of this machine, in lines.
    - started: (agent) it has workers, of the machine with this agent.
    - ranks_ended: (ranks) their processes are over.
    - process_ended: (event) a process that the agent has started is over, and is none that the pool needs.
    - stopped: () it has no processes any more.
    - shortcomings: () -> what does not work here, in lines.

    `message`, which `hear` calls, is (rank, type, content, buffers) -> whether a display of the rank may be over.
    """

    def __init__(self, pool: Callable[[], Any] = lambda: None, rows: Iterable[Capability] = ()):
        """pool: what parts are made with."""
        self._pool = pool
        self._rows = {row.name: row.part for row in rows if row.part is not None}
        self._made: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._due: dict[str, list[str]] = {}
        for name, part in self._rows.items():
            for condition in (*part.when, *part.messages):
                self._due.setdefault(condition, []).append(name)
        self._hear: dict[str, list[Callable[[int, str, dict[str, Any], Sequence[Any]], bool]]] = {}
        self.messages = frozenset(kind for row in self._rows.values() for kind in row.messages)
        self.words: list[Callable[[dict[str, Any]], str | None]] = []
        self.is_over: list[Callable[[dict[str, Any]], bool]] = []
        self.settled: list[Callable[[dict[str, Any], bool], dict[str, Any] | None]] = []
        self.installed: list[Callable[[Any, Callable[[], Any]], None]] = []
        self.removed: list[Callable[[], None]] = []
        self.notes: list[Callable[[], list[str]]] = []
        self.offers: list[Callable[[], list[str]]] = []
        self.started: list[Callable[[Any], None]] = []
        self.process_ended: list[Callable[[Mapping[str, Any]], None]] = []
        self.stopped: list[Callable[[], None]] = []
        self.shortcomings: list[Callable[[], list[str]]] = []
        self.launched: list[Callable[[Any, str], None]] = []
        self.tells: list[Callable[[Any], Mapping[str, Any]]] = []
        self.run_begins: list[Callable[[Any], None]] = []
        self.run_ended: list[Callable[[Any], None]] = []
        self.ranks_ended: list[Callable[[Collection[int]], None]] = []

    def on(self, condition: str) -> None:
        """Have the parts that this makes: what a row has in `when`, or in `messages`."""
        if condition in self._due:
            with self._lock:
                for name in self._due.get(condition, ()):
                    self.of(name)
                self._due.pop(condition, None)

    def of(self, name: str) -> Any:
        """The part of a capability."""
        with self._lock:
            if name not in self._made:
                self._made[name] = load(self._rows[name].target)(self._pool)
                made = [(row, self._made[name]) for name, row in self._rows.items() if name in self._made]
                for method, found in vars(self).items():
                    if isinstance(found, list):
                        found[:] = [getattr(part, method) for _, part in made if hasattr(part, method)]
                self._hear = {kind: [p.message for row, p in made if kind in row.messages] for kind in self.messages}
            return self._made[name]

    def hear(self, rank: int, kind: str, content: dict[str, Any], buffers: Sequence[Any] = ()) -> bool:
        """A message of a rank, in any thread; whether a display of the rank may be over with it."""
        self.on(kind)
        over = False
        for hear in self._hear.get(kind, ()):
            over |= bool(hear(rank, kind, content, buffers))
        return over

    @contextmanager
    def during(self, run: Any) -> Iterator[None]:
        """Meanwhile a run goes on."""
        try:
            for begins in self.run_begins:
                begins(run)
            yield
        finally:
            for ended in self.run_ended:
                ended(run)


def lines(told: Iterable[Callable[[], list[str]]]) -> list[str]:
    """What methods say that give lines."""
    return [line for each in told for line in each()]
