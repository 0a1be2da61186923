"""A node of the pool: one agent and the workers that it has started, with what they wrote and how they ended."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbddp.agent.handle import Agent
from nbddp.plan.capacity import Limit
from nbddp.worker import kept

LAST_WORDS = 12  # lines
RUNS_KEPT = 20  # whose output lies on disk; a cell may take a few of them

Starts = list[dict[str, Any]]


@dataclass
class Living:
    """One worker process. `exit` is the agent's event once it has ended; what its last run wrote to the log begins
    at byte `log_from`; `exits`: how many functions wait there for its end (`atexit`)."""

    rank: int
    uuid: str
    pid: int
    started: float
    log: str
    kept: str
    log_from: int = 0
    registered: bool = False
    exits: int = 0
    exit: dict[str, Any] | None = None

    @property
    def lives(self) -> bool:
        return self.exit is None


class Node:
    """`workers`: rank → its process, also if that has ended and is not replaced yet.

    died: called with the rank and the agent's event when a worker has ended, in the agent's reader thread; its event
    has `pool_ended` if the agent or the controller did. tried: with what `doctor`'s trials say.
    """

    def __init__(
        self, agent: Agent, died: Callable[[int, dict[str, Any]], None], tried: Callable[[dict[str, Any]], None]
    ):
        self.agent = agent
        self.workers: dict[int, Living] = {}
        self._died, self._tried = died, tried
        self._early: dict[int, dict[str, Any]] = {}  # pid → the exit of one that ended before its start was noted
        self._described: tuple[object, ...] = ()
        self._kept: float | None = None
        agent.on_event(weakly(self._hear))

    @property
    def alive(self) -> bool:
        return self.agent.alive

    @property
    def warm(self) -> Mapping[str, Any]:
        """What the agent told when it had warmed up; empty before."""
        return self.agent.warm or {}

    # -- processes ------------------------------------------------------------------------------

    def start(self, starts: Starts, launch: Callable[[Starts], Starts]) -> None:
        """Have workers started by `launch`, which answers with their pids and start times, and note them as ours."""
        sizes = {s["rank"]: os.path.getsize(s["log"]) if os.path.exists(s["log"]) else 0 for s in starts}
        for start, answer in zip(starts, launch(starts), strict=True):
            rank = start["rank"]
            self.workers[rank] = Living(
                rank, start["uuid"], answer["pid"], answer["started"], start["log"], start["kept"], sizes[rank]
            )
            early = self._early.pop(answer["pid"], None)
            if early is not None:
                self._exited(self.workers[rank], early)

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """Those of these ranks that live here get a signal."""
        pids = [self.workers[r].pid for r in ranks if r in self.workers and self.workers[r].lives]
        if pids and self.alive:
            self.agent.request("signal", pids=pids, signal=int(number))

    def _hear(self, event: dict[str, Any]) -> None:
        """The agent's events, in its reader thread."""
        if event["ev"] == "exit" and event["kind"] == "worker":
            known = [w for w in list(self.workers.values()) if w.pid == event["pid"]]
            for worker in known:
                self._exited(worker, event)
            if not known:
                self._early[event["pid"]] = event
        elif event["ev"] == "exit" and event["kind"] == "trials":
            self._tried(event)
        elif event["ev"] == "gone" or (event["ev"] == "exit" and event["kind"] == "controller"):
            for worker in list(self.workers.values()):
                self._exited(worker, {"code": None, "pool_ended": True})
            if self.alive and event["ev"] == "exit":
                self.agent.tell("stop")  # a pool without its controller cannot be reached

    def _exited(self, worker: Living, event: dict[str, Any]) -> None:
        if worker.exit is None:
            worker.exit = event = {**event, "last_words": self.last_words(worker.rank)}
            self._died(worker.rank, event)

    # -- what they wrote --------------------------------------------------------------------------

    def begin_logs(self, ranks: Sequence[int]) -> None:
        """What earlier cells wrote is none of the next run's last words."""
        workers = [self.workers[r] for r in ranks if r in self.workers]
        for worker in workers:
            with suppress(FileNotFoundError):
                worker.log_from = os.path.getsize(worker.log)
        kept.clear(worker.kept for worker in workers)  # a worker does so too, if it lives to begin

    def written(self, rank: int) -> dict[str, tuple[int, str]]:
        """What a rank wrote in its last run, by stream, as its own files have it: how many characters they have no
        more, and all since."""
        return {stream: kept.text(self.workers[rank].kept, stream) for stream in kept.STREAMS}

    def last_words(self, rank: int) -> str:
        worker = self.workers[rank]
        return last_words(worker.log, worker.log_from, self.written(rank)["stderr"][1])

    def run_folder(self, number: int) -> Path:
        """The folder of a run's output."""
        return self.agent.bulk / "runs" / str(number)

    def forget_run(self, number: int) -> None:
        """The folder of a run some time before run `number` goes."""
        old = self.run_folder(number - RUNS_KEPT)
        try:
            old.rmdir()  # most hold nothing
        except OSError:
            shutil.rmtree(old, ignore_errors=True)

    # -- what it is told, and asked ---------------------------------------------------------------

    def limits(self) -> list[Limit]:
        """What bounds the number of workers here, as it is now."""
        return [Limit(**row) for row in self.agent.request("limits")["limits"]]

    def note(self, ranks: Sequence[int], state: str) -> None:
        """What `status` is to say of these ranks."""
        if self.alive:
            self.agent.tell("note", ranks=[*ranks], state=state)

    def keep(self, seconds: float | None) -> None:
        """How long the warm process is to outlive us, if that is said and has changed."""
        if seconds is not None and seconds != self._kept:
            self._kept = seconds
            self.agent.keep(seconds)

    def describe(self, subject: tuple[object, ...], info: Callable[[], dict[str, Any]], files: list[str]) -> None:
        """What `status` says of the pool, and the files that end with it, if `subject` has changed."""
        if subject != self._described:
            self._described = subject
            self.agent.tell("describe", info=info(), files=files)


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A method to be called as long as its object lives."""
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = held()
        if found is not None:
            found(*args)

    return call


def last_words(log: str, start: int = 0, printed: str = "") -> str:
    """What a process that has ended said last: why the C++ library aborts (in what it printed to stderr), why
    and where the interpreter does (in its log, from byte `start`), or else the last lines of the log."""
    try:
        with open(log, errors="replace") as file:
            file.seek(start if start <= os.path.getsize(log) else 0)  # the agent has cut it
            lines = [line.rstrip() for line in file.read().splitlines()]
    except OSError:
        lines = []
    told = [line.rstrip() for line in printed.splitlines() if line.startswith(("terminate called", "  what():"))]
    lines = lines[next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), 0) :]
    in_thread = ""
    for line in lines:
        if line.startswith(("Thread 0x", "Current thread 0x")):
            in_thread = line
        elif line.startswith("Fatal Python error") or (in_thread.startswith("Current") and line.startswith("  File ")):
            told.append(line)
    return "\n".join(told[:LAST_WORDS] or [line for line in lines if line][-3:])
