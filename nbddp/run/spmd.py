"""One run: send to every rank, take in what happens, carry out what `supervise` decides.

Everything arrives on one queue (iopub messages, exits, Stop) and is handled in the
calling thread, so output keeps its order and its parent. The loop holds no rules.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nbddp.errors import Cause, Frame, Raised, RankState, RunStopped, WorkerFailed
from nbddp.run import report, supervise
from nbddp.run.collect import RankOutput
from nbddp.run.screen import Screen
from nbddp.topology import rank_words

OUTCOME = "nbddp_outcome"
LONG = 0.1  # seconds after which a run is worth telling others about
SHOWN = ("stream", "display_data", "execute_result", "update_display_data", "clear_output")


class Workers(Protocol):
    """What a run needs of a pool."""

    def send(self, rank: int, spec: dict[str, Any], hear: Any, code: str, buffers: list[bytes]) -> None: ...
    def interrupt(self, ranks: Sequence[int]) -> None: ...
    def kill(self, ranks: Sequence[int]) -> None: ...
    def where(self, ranks: Sequence[int]) -> Mapping[int, str]: ...
    def node_of(self, rank: int) -> int: ...
    def log_of(self, rank: int) -> str: ...


@dataclass
class Ended:
    """How one rank ended the run: `status` as the worker said, or "died" / "replaced"."""

    rank: int
    status: str
    at: float
    content: dict[str, Any] = field(default_factory=dict)
    buffers: list[bytes] = field(default_factory=list)
    code: int | None = None


class Run:
    """A request to several ranks and all that comes of it.

    specs: rank → the request's metadata. After `execute`, `ended` has one entry per rank.
    """

    def __init__(
        self,
        workers: Workers,
        specs: Mapping[int, dict[str, Any]],
        *,
        number: int,
        logs: Path,
        screen: Screen,
        show: Sequence[int] | None = None,
        code: str = "",
        buffers: Sequence[bytes] = (),
    ):
        self.workers, self.specs, self.number, self.screen = workers, dict(specs), number, screen
        self.code, self.buffers = code, list(buffers)
        self.outputs = {r: RankOutput(r, logs / f"rank{r}.log") for r in specs}
        self.shown = [r for r in self.outputs if show is None or r in show]
        self.ended: dict[int, Ended] = {}
        self.stops: tuple[float, ...] = ()
        self.places: dict[int, str] = {}
        self.events: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self.when_long: Callable[[], None] = lambda: None
        self.noted = False
        self._began = 0.0
        self._interrupted_at: float | None = None
        self._replaced = False
        self._actions: dict[type, Callable[[Any], None]] = {
            supervise.Interrupt: self._interrupt,
            supervise.Replace: self._replace,
        }

    # -- fed from other threads ------------------------------------------------------

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        """An iopub message of this run."""
        kind = message["header"]["msg_type"]
        if kind == OUTCOME or kind in SHOWN:
            self.events.put((kind, rank, message))

    def worker_exited(self, rank: int, event: dict[str, Any]) -> None:
        self.events.put(("exit", rank, event))

    # -- the loop ----------------------------------------------------------------------

    def execute(self) -> None:
        """Run to the end: every rank has an outcome, has died, or is replaced."""
        with self._stop_by_signal():
            self._began = time.monotonic()
            for rank, spec in self.specs.items():
                self.workers.send(rank, spec, self.hear, self.code, self.buffers)
            self.screen.start()  # while the ranks already work
            while True:
                action = supervise.next_action(self._state())
                if isinstance(action, supervise.Finish):
                    break
                if isinstance(action, supervise.Wait):
                    self._take(action.seconds)
                else:
                    self._actions[type(action)](action)
        self._drain()
        self.screen.finish([self.outputs[r] for r in self.shown])
        for out in self.outputs.values():
            out.close()

    def _state(self) -> supervise.RunState:
        bad = [e.at for e in self.ended.values() if e.status != "ok"]
        return supervise.RunState(
            now=time.monotonic(),
            running=self.running(),
            failed_at=min(bad, default=None),
            stops=self.stops,
            interrupted_at=self._interrupted_at,
            replaced=self._replaced,
        )

    def running(self) -> tuple[int, ...]:
        return tuple(r for r in self.specs if r not in self.ended)

    def _take(self, patience: float | None) -> None:
        """Wait for one event and handle it and all that have come with it."""
        look = self.screen.refresh([self.outputs[r] for r in self.shown], f"running: {rank_words(self.running())}")
        waits = [w for w in (patience, look, self._note_if_long()) if w is not None]
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
        left = self._began + LONG - time.monotonic()
        if left > 0 or self.noted:
            return None if self.noted else left
        self.noted = True
        self.when_long()
        return None

    def _drain(self) -> None:
        while not self.events.empty():
            self._handle(*self.events.get())

    def _handle(self, kind: str, rank: int, what: Any) -> None:
        if kind == "stop":
            self.stops += (what,)
        elif kind == "exit":
            if rank not in self.ended:
                status = "replaced" if self._replaced else "died"
                self.ended[rank] = Ended(rank, status, time.monotonic(), content=what, code=what["code"])
        elif kind == OUTCOME:
            buffers = [bytes(b) for b in what["buffers"]]
            content = what["content"]
            self.ended[rank] = Ended(rank, content["status"], time.monotonic(), content, buffers)
        else:
            for stream, line in self.outputs[rank].take(kind, what["content"]):
                if rank in self.shown:
                    self.screen.line(rank, stream, line)

    def _interrupt(self, action: supervise.Interrupt) -> None:
        self.places.update(self.workers.where(action.ranks))
        self.workers.interrupt(action.ranks)
        self._interrupted_at = time.monotonic()

    def _replace(self, action: supervise.Replace) -> None:
        if not self.places:
            self.places.update(self.workers.where(action.ranks))
        self._replaced = True
        self.workers.kill(action.ranks)

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

    def groups(self) -> dict[int, dict[str, Any]]:
        return {r: e.content["group"] for r, e in self.ended.items() if "group" in e.content}

    def broke_group(self) -> bool:
        ends = {r: e.status for r, e in self.ended.items()}
        had = any(g["run"] is not None for g in self.groups().values())
        missing = any(e.status in ("replaced", "died") for e in self.ended.values())
        return (had or missing) and supervise.group_is_broken(ends, self.groups())

    def first_failure(self) -> Ended | None:
        """The rank that failed first in time; an interrupted one only if nobody asked for it."""
        bad = [e for e in self.ended.values() if e.status in ("failed", "died")]
        if not bad and not self.stops:
            bad = [e for e in self.ended.values() if e.status == "interrupted"]
        return min(bad, key=lambda e: e.at, default=None)

    def raise_if_bad(self) -> None:
        """Raise WorkerFailed or RunStopped if the run did not end well."""
        first = self.first_failure()
        if self.stops and (first is None or first.at > self.stops[0]):
            states = tuple(self._state_of(e) for _, e in sorted(self.ended.items()))
            text = report.stopped_text(states, dropped=self.broke_group())
            raise RunStopped("the run was stopped by the user", states=states, report=text)
        if first is None:
            return
        cause = self._cause(first)
        states = tuple(self._state_of(e) for _, e in sorted(self.ended.items()))
        others = [s for s in states if s.rank != first.rank]
        text = report.failure_text(cause, others, dropped=self.broke_group(), whole_log=self.workers.log_of(first.rank))
        logs = {r: str(o.log) for r, o in self.outputs.items()}
        raise WorkerFailed(report.headline(cause), cause=cause, states=states, report=text, logs=logs)

    def _cause(self, ended: Ended) -> Cause:
        kind = "died" if ended.status == "died" else "exit" if "exit" in ended.content else "raised"
        return Cause(
            rank=ended.rank,
            node=self.workers.node_of(ended.rank),
            kind=kind,
            chain=chain_of(ended),
            code=ended.code if kind == "died" else ended.content.get("exit"),
            log=self.workers.log_of(ended.rank),
            extra=ended.content if kind == "died" else {},
        )

    def _state_of(self, ended: Ended) -> RankState:
        status = "finished" if ended.status == "ok" else ended.status
        chain = chain_of(ended)
        where = report.place_of(chain[-1].frames) if chain else self.places.get(ended.rank, "")
        detail = ""
        if status == "failed":
            detail = report.headline(self._cause(ended)).split(" ", 2)[2]
            where = ""
        elif status == "died":
            detail = report.ended(ended.code).removeprefix("died: ")
        return RankState(ended.rank, status, where, detail)


def chain_of(ended: Ended) -> tuple[Raised, ...]:
    """The remote exceptions of an outcome as values."""
    return tuple(
        Raised(
            type=link["type"],
            message=link["message"],
            relation=link["relation"],
            notes=tuple(link["notes"]),
            frames=tuple(
                Frame(f["file"], f["line"], f["name"], f["user"], tuple((n, t) for n, t in f["context"]))
                for f in link["frames"]
            ),
        )
        for link in ended.content.get("chain", ())
    )
