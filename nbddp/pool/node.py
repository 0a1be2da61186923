"""A node of the pool: one agent and the workers that it has started, with what they wrote and how they ended."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbddp.agent import child_logs, orphans
from nbddp.agent.client import AgentClient
from nbddp.agent.gather import AgentRequests, without_errors
from nbddp.agent.process_id import ProcessId
from nbddp.errors import AgentFailed, RankStatus
from nbddp.launch.machine import Node
from nbddp.launch.topology import Topology, Worker
from nbddp.pool import start_requests
from nbddp.protocol.agent import Started, StartWorker, Warm
from nbddp.protocol.codec import Json, Message, from_json, to_json
from nbddp.protocol.outcome import Outcome, ProcessExit

RUNS_KEPT = 20  # whose output lies on disk; a cell may take a few of them


@dataclass
class WorkerProcess:
    """One worker process. `exit` is the agent's event once it has ended; what its last run wrote to the log begins
    at byte `log_from`; `exits`: how many functions wait there for its end (`atexit`). `retired`: it was to serve
    one run, which has begun. `spawned`: it imports torch itself."""

    rank: int
    uuid: str
    pid: int
    started: float
    log: str
    log_from: int = 0
    registered: bool = False
    exits: int = 0
    retired: bool = False
    spawned: bool = False
    exit: ProcessExit | None = None

    def hear(self, outcome: Outcome | None) -> None:
        """A run has ended; outcome: what the worker said of it."""
        if outcome is not None and outcome.at_exit is not None:
            self.exits = outcome.at_exit

    @property
    def lives(self) -> bool:
        return self.exit is None

    @property
    def ended_with_pool(self) -> bool:
        return bool(self.exit and self.exit.pool_ended)


@dataclass(frozen=True)
class ClusterFiles:
    """What a worker needs to find its cluster: ipyparallel's profile folder, and the controller's file for engines."""

    profile_dir: str
    engine_file: str


@dataclass(frozen=True)
class Posted:
    """Start requests that a node's agent is carrying out; `sizes`: how long the logs had been (bytes)."""

    starts: Sequence[StartWorker]
    sizes: Mapping[str, int]
    round: AgentRequests


class PoolNode:
    """The node of this machine. `address`: where ranks of other nodes reach those here; empty where there are none.

    `workers`: rank → its process, also if that has ended and is not replaced yet.

    died: called with the rank when a worker has ended, in the agent's reader thread; process_ended: with the
    event of another process's end.
    """

    sees_files = True  # whether files of ranks there are read by their paths, as files of this machine
    can_respawn = True  # whether its processes can be ended, and new ones started
    name = "this machine"

    def __init__(
        self,
        agent: AgentClient,
        died: Callable[[int, ProcessExit], None],
        process_ended: Callable[[Message], None],
    ):
        self.agent = agent
        self.workers: dict[int, WorkerProcess] = {}
        self._died, self._process_ended = died, process_ended
        self._early: dict[int, ProcessExit] = {}  # pid → the exit of one that ended before its start was noted
        self._described: tuple[object, ...] = ()
        self._kept: float | None = None
        self.lost = ""  # without what the pool cannot be reached, once that has ended
        self.address = ""
        self.number = 0  # among all nodes that the pool has had
        self.variables: Mapping[str, str] = {}  # that workers are to have besides
        self.options: Json = {}  # of the pool, that they get
        agent.on_event(weakly(self._hear))

    @property
    def alive(self) -> bool:
        return not self.agent.closed

    @property
    def given(self) -> Mapping[str, str]:
        """The environment in which variables of ours give way to the user's."""
        return os.environ

    @property
    def warm(self) -> Warm | None:
        """The agent's report when it had warmed up; None before."""
        return self.agent.warm

    @property
    def facts(self) -> Warm:
        """The same, where it is known to be warm."""
        assert self.warm is not None
        return self.warm

    # -- processes ------------------------------------------------------------------------------

    def host(self, index: int) -> Node:
        """This machine, from what its agent said when it was warm. Its processes meet over the loopback."""
        return start_requests.host(self.facts, index, self.address)

    def prepare(self, cluster: ClusterFiles) -> None:
        """Ask for what `request` needs there; returns at once."""

    def request(self, place: Worker, topology: Topology, visible: str, cluster: ClusterFiles) -> StartWorker:
        """A start request for one worker."""
        return start_requests.worker(
            place,
            topology,
            env={**start_requests.here(), **self.variables},
            visible=visible,
            home=self.agent.home,
            profile_dir=cluster.profile_dir,
            url_file=cluster.engine_file,
            options=self.options,
        )

    def post_starts(self, starts: Sequence[StartWorker]) -> Posted:
        """Ask for workers; returns at once."""
        posted = Posted(starts, self._sizes([s.log for s in starts]), AgentRequests())
        for start in starts:
            posted.round.post(self.agent, "start", kind=start.kind, **to_json(start))
        return posted

    def take_starts(self, posted: Posted, launched: Callable[[Mapping[int, int]], None]) -> None:
        """Note those that have been started as ours, and have `launched` do so with rank → pid. Raises AgentFailed for
        one that could not be, after that."""
        answers = posted.round.answers()
        came = [
            (start, from_json(Started, answer))
            for start, answer in zip(posted.starts, answers, strict=True)
            if not isinstance(answer, AgentFailed)
        ]
        launched({start.rank: process.pid for start, process in came})
        for start, process in came:
            self.workers[start.rank] = worker = WorkerProcess(
                start.rank, start.uuid, process.pid, process.started, start.log, posted.sizes[start.log],
                spawned=process.spawned,
            )  # fmt: skip
            early = self._early.pop(process.pid, None)
            if early is not None:
                self.exited(worker, early)
        without_errors(answers)

    def signal(self, ranks: Sequence[int], number: int, asked: AgentRequests, *, group: bool = False) -> None:
        """Those of these ranks that live here are to get a signal; they have it when `asked` is answered. group: also
        the processes of their groups, as torchrun signals a program's."""
        pids = [self.workers[r].pid for r in ranks if r in self.workers and self.workers[r].lives]
        if pids and self.alive:
            asked.post(self.agent, "signal", pids=pids, signal=int(number), group=group)

    def _hear(self, event: Message) -> None:
        """The agent's events, in its reader thread."""
        if event["ev"] == "exit" and event["kind"] == "worker":
            exit_ = from_json(ProcessExit, event)
            known = [w for w in list(self.workers.values()) if w.pid == event["pid"]]
            for worker in known:
                self.exited(worker, exit_)
            if not known:
                self._early[event["pid"]] = exit_
        elif ends_pool(event):
            self.lost = self.lost or ("node agent" if event["ev"] == "gone" else "controller")
            for worker in list(self.workers.values()):
                self.exited(worker, self._gone())
            if self.alive and event["ev"] == "exit":
                self.agent.tell("stop")  # a pool without its controller cannot be reached
            elif event["ev"] == "gone":
                self._clear_up()
        elif event["ev"] == "exit":
            self._process_ended(event)

    def _clear_up(self) -> None:
        """The keeper of a killed agent clears up (`agent.keeper`). Where that was killed too, its folder is left, and
        what its ranks have started in their sessions."""
        orphans.end_sessions([ProcessId(w.pid, w.started) for w in list(self.workers.values()) if w.ended_with_pool])
        if self.warm:  # what it said before is the reason of a start that failed
            self.agent.sweep()

    def _gone(self) -> ProcessExit:
        """The end of workers whose agent, or controller, has ended: the pool cannot be reached."""
        return ProcessExit(pool_ended=True)

    def taken_away(self) -> str:
        """What took the host away, such as the end of its Slurm job; empty if nothing did."""
        return ""

    def exited(self, worker: WorkerProcess, exit_: ProcessExit) -> None:
        """A process has ended."""
        if worker.exit is None:
            worker.exit = replace(exit_, last_words=exit_.last_words or self.last_words(worker.rank))
            self._died(worker.rank, worker.exit)

    # -- what they wrote --------------------------------------------------------------------------

    def _sizes(self, logs: Sequence[str]) -> dict[str, int]:
        return {log: os.path.getsize(log) if os.path.exists(log) else 0 for log in logs}

    def begin_logs(self, ranks: Sequence[int]) -> Sequence[int]:
        """Text of earlier cells does not belong to the next run's last output. Returns the ranks for which the node's
        agent is to be asked."""
        workers = [self.workers[r] for r in ranks if r in self.workers]
        sizes = self._sizes([worker.log for worker in workers])
        for worker in workers:
            worker.log_from = sizes[worker.log]
        return ()

    def last_words(self, rank: int) -> str:
        worker = self.workers[rank]
        return child_logs.last_words(worker.log, worker.log_from)

    def errors_of(self, number: int) -> Path:
        """The folder there into which ranks of run `number` write errors, for torchrun's `@record`."""
        return self.run_folder(number)

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

    # -- instructions and questions ---------------------------------------------------------------

    def children(self, asked: AgentRequests) -> list[Json] | None:
        """Its processes, for `status`; None where `asked` is to bring them."""
        asked.post(self.agent, "status")
        return None

    def note(self, ranks: Sequence[int], status: RankStatus, doing: str) -> None:
        """The part of `status` about those of these ranks that are here."""
        own = [r for r in ranks if r in self.workers]
        if own and self.alive:
            self.agent.tell("note", ranks=own, status=status, doing=doing)

    def keep(self, seconds: float | None) -> None:
        """How long the warm process is to survive us, if that is set and has changed."""
        if seconds is not None and seconds != self._kept:
            self._kept = seconds
            self.agent.keep(seconds)

    def describe(self, subject: tuple[object, ...], info: Callable[[], Json], files: list[str]) -> None:
        """What `status` says of the pool, and the files that end with it, if `subject` has changed."""
        if subject != self._described:
            self._described = subject
            self.agent.tell("describe", info=info(), files=files)


def ends_pool(event: Message) -> bool:
    """Whether an event of this machine's agent is its end or the controller's, without which no rank is reached."""
    return event["ev"] == "gone" or (event["ev"], event.get("kind")) == ("exit", "controller")


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A method to be called as long as its object lives."""
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = held()
        if found is not None:
            found(*args)

    return call
