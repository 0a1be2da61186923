"""A cluster of ipyparallel's that already runs: its engines become the ranks, and are engines again when the pool ends.

`AttachedCluster` is our client of it, and knows whether its hub and its engines live. `AttachedNode` is a node of such
engines. It has no agent, so no engine is started anew, and an engine is controlled through ipyparallel. What an engine
does to become a worker is `capabilities.attached.engine_side`.

How an end is known: the operating system reports the end of an engine that runs here; ipyparallel's nanny tells the hub
of another one at once; without a nanny the hub misses its heartbeats, 30 s later by default. The hub itself is asked
once a second.
"""

from __future__ import annotations

import getpass
import itertools
import os
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbddp.agent import stop
from nbddp.agent.client import START_TIMEOUT, AgentClient
from nbddp.agent.gather import AgentRequests
from nbddp.agent.hardware import loopback_name
from nbddp.agent.process_id import ProcessId
from nbddp.capabilities.attached.clusters import Cluster
from nbddp.compat import ipyparallel
from nbddp.compat.extra.versions import versions
from nbddp.compat.system import existing_working_dir
from nbddp.errors import AgentFailed, BadInput, PoolError, RankStatus, several
from nbddp.launch import torchrun_env
from nbddp.launch.machine import Node
from nbddp.launch.topology import Topology, Worker, counted
from nbddp.pool import start_requests
from nbddp.pool.node import PoolNode, WorkerProcess
from nbddp.pool.rpc import RankRpc
from nbddp.protocol import messages
from nbddp.protocol.agent import Warm
from nbddp.protocol.codec import Json, Message
from nbddp.protocol.messages import JupyterMessage
from nbddp.protocol.outcome import ProcessExit
from nbddp.protocol.run_spec import Question, Reply, RunSpec

if TYPE_CHECKING:  # as an engine has it; a pool of processes of its own never needs it
    from nbddp.capabilities.attached.engine_side import EngineFacts, Owner, TakeRequest

CONNECT_SECONDS = 10.0
LOOK_SECONDS = 60.0  # for an engine to say what it is; then it is busy
SLOW = 3.0  # seconds after which it is asked whether a pool has it
TICK, BEAT_EVERY = 1.0, 2  # seconds between two questions to the hub; every how many of them the owner is heard
SILENT = 6  # questions without an answer until a hub counts as gone
LEAVE_SECONDS, GIVE_BACK_SECONDS = 5.0, 2.0
EXIT_SECONDS = 1.5  # that engines have for leaving when this process ends
MEMORY_SECONDS = 0.5
TAKEN = "__import__('nbddp.capabilities.attached.engine_side', fromlist=['engine_side']).{}"
LEFT = "its engine has exited, or the cluster has lost it"


@dataclass(frozen=True)
class Engine:
    """An engine by the hub's id, and what it has said of itself (`engine_side.look`)."""

    id: int
    uuid: str
    told: EngineFacts

    @property
    def here(self) -> bool:
        """Whether this process may signal it, and the gate of this machine can tell whose its connections are."""
        from nbddp.capabilities.attached import engine_side

        return list(self.told["sees"]) == engine_side.sees_processes()


class AttachedCluster:
    """Our client of a cluster. `lost`: why it cannot be reached any more, or empty. `nodes`: with what engines."""

    def __init__(self, cluster: Cluster, pool_id: str):
        """Raises AgentFailed if it does not answer."""
        self.cluster, self.lost = cluster, ""
        self.owner: Owner = {
            "pool": f"{pool_id} of {socket.gethostname()}",
            "words": f"the pool of process {os.getpid()} on {socket.gethostname()} ({getpass.getuser()})",
        }
        self.nodes: list[AttachedNode] = []
        self._unanswered = self._beats = 0
        self._pidfds: dict[int, tuple[AttachedNode, WorkerProcess]] = {}
        self._ended, self._wake = os.pipe()
        self.closed = False
        try:
            self.wire = RankRpc(self._connect, self._noticed)
        except (OSError, RuntimeError, ValueError) as e:
            self._close_pipe()
            raise AgentFailed(
                f"cluster {cluster.name} does not answer ({e}); ipcluster list shows the running ones, and "
                "ipcluster start "
                "-n 4 starts one"
            ) from None
        self._thread = threading.Thread(target=self._watch, name="nbddp-cluster", daemon=True)

    def _connect(self, **options: Any) -> Any:
        from ipyparallel import Client

        return Client(str(self.cluster.file), timeout=CONNECT_SECONDS, **options)

    # -- which engines there are --------------------------------------------------------------------

    def look(self, progress: Callable[[str], None]) -> list[Engine]:
        """The engines, each with what it says of itself, by id. Raises BadInput where there is none, PoolError where
        one does not answer or cannot be a worker."""
        found = self.wire.registered()
        name = self.cluster.name
        if not found:
            raise BadInput(f"cluster {name} has no engines; start some with ipcluster engines -n 4, or wait for them")
        progress(f"checking the engines of cluster {name}")
        told = self.evaluate(dict.fromkeys(found, "look()"), LOOK_SECONDS)
        engines = [Engine(i, found[i], told[i]) for i in sorted(found)]
        for engine in engines:
            self._refuse(engine)
        return engines

    def _refuse(self, engine: Engine) -> None:
        from nbddp.capabilities.attached import (
            engine_side,  # as an engine has it; a pool of processes of its own never needs it
        )

        told, here, name = engine.told, versions(), self.cluster.name
        if told["worker"]:
            raise BadInput(f"cluster {name} belongs to an nbddp pool; %ddp start --nproc N starts another pool")
        if told["held"]:
            raise PoolError(
                f"{told['held']} is using engine {engine.id} of cluster {name}; %ddp stop there releases it, and "
                "so does "
                f"the end of that process, after {engine_side.PATIENCE:.0f} s"
            )
        if told["spoilt"]:
            raise PoolError(
                f"engine {engine.id} of cluster {name} cannot be a worker ({told['spoilt']}); restart the cluster"
            )
        if "torch" not in told["versions"]:
            raise AgentFailed(f"engine {engine.id} on {told['host']} has no torch ({told['python']}); install it there")
        if told["versions"].get("nbddp") != here["nbddp"]:
            raise AgentFailed(
                f"engine {engine.id} on {told['host']} has nbddp {told['versions'].get('nbddp')}, but this machine "
                f"has {here['nbddp']}; install the same version on both"
            )

    def evaluate(self, asked: Mapping[int, str], seconds: float) -> dict[int, Any]:
        """Engine's id → the value there of what it is asked, a call of `capabilities.attached.engine_side`. Raises
        PoolError.

        It goes as text, since ipyparallel sends functions in a form that is its Python's own.
        """
        client = self.wire.client
        results = {i: client[i].apply_async(eval, TAKEN.format(call)) for i, call in asked.items()}
        others: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        began, wondered = time.monotonic(), False
        while late := [i for i, result in results.items() if not result.ready()]:
            results[late[0]].wait(0.05)
            stop.check()
            waited = time.monotonic() - began
            if waited > SLOW and not wondered:
                wondered = True
                whose = _to_engine("other", pool=self.owner["pool"])
                self.wire.question(late, whose, lambda engine, reply: others.put((engine, reply.answer)))
            while not others.empty():
                self._refuse_busy(*others.get())
            if waited > seconds:
                raise PoolError(
                    f"{several('engine', late)} of cluster {self.cluster.name} did not answer for {seconds:.0f} s; "
                    "wait for the code that runs there, or interrupt it"
                )
        return {i: self._value(i, result) for i, result in results.items()}

    def give_back(self, ids: Sequence[int]) -> None:
        """Have engines of which not all could be taken be engines again. Those that are at work do it when they come to
        it; the others have done it when this returns."""
        leave = TAKEN.format(f"leave_if_of({self.owner['pool']!r})")
        asked = [self.wire.client[i].apply_async(eval, leave) for i in ids]
        end = time.monotonic() + GIVE_BACK_SECONDS
        for result in asked:
            result.wait(max(0.0, end - time.monotonic()))

    def _refuse_busy(self, engine: int, words: Any) -> None:
        """words: whose the engine is; something else where it is nobody's, or does not say."""
        if isinstance(words, str) and words:
            raise PoolError(
                f"{words} is using engine {engine} of cluster {self.cluster.name}, which is busy; %ddp stop there "
                "releases it"
            )

    def _value(self, engine: int, result: Any) -> Any:
        from ipyparallel.error import IPythonError

        try:
            value = result.get(0)
        except IPythonError as e:  # RemoteError, or EngineError for one that has ended
            said = f"{getattr(e, 'ename', type(e).__name__)}: {getattr(e, 'evalue', e)}"
            if "No module named 'nbddp" in said:
                raise AgentFailed(
                    f"engine {engine} of cluster {self.cluster.name} lacks this version of nbddp ({said}); install "
                    "the nbddp of this notebook kernel where the engines run, and restart the cluster"
                ) from None
            raise PoolError(f"engine {engine} of cluster {self.cluster.name} did not become a worker: {said}") from None
        return value

    def differences(self, engines: Sequence[Engine]) -> list[str]:
        """What is otherwise on the engines than here, a line each."""
        here, lines = versions(), []
        for engine in engines:
            theirs = engine.told["versions"]
            host = engine.told["host"]
            lines += [
                f"engines on {host} have {name} {theirs.get(name, 'none')}; this machine has {version}"
                for name, version in here.items()
                if theirs.get(name) != version
            ]
        return list(dict.fromkeys(lines))

    def promises(self, engines: Sequence[Engine]) -> list[str]:
        """What is otherwise than with workers of our own, in words."""
        far = [e for e in engines if not e.here]
        unseen = (
            "a host that falls silent" if all(e.told["nanny"] for e in far) else "an engine on another host that exits"
        )
        late = f"; the hub's heartbeats detect {unseen}, by default after 30 s" if far else ""
        lines = [
            f"nbddp did not start the engines of cluster {self.cluster.name}: it cannot replace one that exits, and "
            "their logs are with their launcher. --fresh, --max-restarts and %ddp restart are not possible; after %ddp "
            f"stop the engines keep running{late}"
        ]
        before = [e.id for e in engines if e.told["torch"]]
        if before:
            lines.append(
                f"{several('engine', before)} had already imported torch: environment variables that torch has read "
                "keep their effect, except OMP_NUM_THREADS"
            )
        return [*lines, *filter(None, [self.cluster.open_words(bool(far))])]

    def description(self) -> Json:
        """What `status` and `stacks` in a terminal need of it: there is no file that ends with the pool."""
        ranks = {str(w.rank): w.uuid for node in self.nodes for w in node.workers.values()}
        return {"cluster": self.cluster.name, "file": str(self.cluster.file.absolute()), "engines": ranks}

    # -- does it live? -------------------------------------------------------------------------------

    def begin(self) -> None:
        """All engines are ranks: tell from here on which end."""
        for node, worker in self._living():
            if node.here and hasattr(os, "pidfd_open"):
                with suppress(OSError):  # it has ended, and the hub tells
                    self._pidfds[os.pidfd_open(worker.pid)] = node, worker
        if not self._thread.is_alive():
            self._thread.start()

    def _living(self) -> list[tuple[AttachedNode, WorkerProcess]]:
        return [(node, w) for node in self.nodes for w in list(node.workers.values()) if w.lives]

    def _watch(self) -> None:
        asks = select.poll()
        for number in (self._ended, *self._pidfds):
            asks.register(number, select.POLLIN)
        due = time.monotonic()
        while not self.closed and not self.lost:
            for number, _ in asks.poll(max(0.0, due - time.monotonic()) * 1000):
                if number in self._pidfds:
                    asks.unregister(number)
                    node, worker = self._pidfds.pop(number)
                    os.close(number)
                    node.left(worker)
            if time.monotonic() >= due and not self.closed:
                due = time.monotonic() + TICK
                self._tick()
        for number in self._pidfds:
            os.close(number)
        self._pidfds.clear()

    def _tick(self) -> None:
        if self._unanswered >= SILENT:
            self._lose(f"the controller of cluster {self.cluster.name} has not answered for {SILENT} s")
            return
        self._unanswered += 1
        self._noticed("notification")
        with suppress(RuntimeError):  # a client that is just being replaced
            ipyparallel.ask_hub(self.wire.client)
            if self._beats % BEAT_EVERY == 0:
                ranks = [w.rank for _, w in self._living()]
                self.wire.question(ranks, _to_engine("beat", pool=self.owner["pool"]), self._heard)
        self._beats += 1

    def _heard(self, rank: int, reply: Reply) -> None:
        """Whether a rank's engine is still ours."""
        if reply.answer is False:
            for node, worker in self._living():
                if worker.rank == rank:
                    node.left(worker, "its engine left this pool because the pool was silent")

    def _noticed(self, stream: str) -> None:
        """The hub's messages, in the client's thread or the watch's."""
        if stream == "query":
            self._unanswered = 0
            return
        there = set(ipyparallel.engines(self.wire.client).values()) if hasattr(self, "wire") else None
        for node, worker in self._living() if there is not None else ():
            if worker.uuid not in there:  # type: ignore[operator]
                node.left(worker)

    def _lose(self, why: str) -> None:
        self.lost = why
        ended = f"the pool stopped while the cell was running, because {why}; {self.again()}"
        for node, worker in self._living():
            node.left(worker, why, ended)

    def again(self) -> str:
        return (
            f"variables stay on its engines as long as they run, and %ddp start --cluster {self.cluster.name} uses "
            "them again once it answers"
        )

    def signal(self, engine: str, number: int) -> None:
        """Have the nanny that ipyparallel has given an engine send it a signal."""
        message = self.wire.client.session.msg("signal_request", content={"sig": int(number)})
        self.wire.connection.outbox.question(engine, message)

    # -- the end -------------------------------------------------------------------------------------

    def end(self, at_exit: bool) -> None:
        """Have all engines be engines again, and be without the client. at_exit: this process ends, and its
        connections with it."""
        self.leave(EXIT_SECONDS if at_exit else LEAVE_SECONDS)
        if not at_exit:
            self.wire.close()

    def leave(self, seconds: float = LEAVE_SECONDS) -> None:
        """Have all engines be engines again; one that is at work has its program ended, and is not waited for."""
        if self.closed:
            return
        self.closed = True
        done: queue.SimpleQueue[int] = queue.SimpleQueue()
        left = {w.rank for _, w in self._living()} if not self.lost else set()

        def hear(rank: int, message: JupyterMessage) -> None:
            if message["header"]["msg_type"] == messages.OUTCOME:
                done.put(rank)

        with suppress(PoolError, KeyError, RuntimeError):  # a client that is lost cannot be asked: ranks notice it
            for rank in left:
                self.wire.send(rank, RunSpec("leave", 0), hear)
            end = time.monotonic() + seconds
            while left and time.monotonic() < end:
                with suppress(queue.Empty):
                    left.discard(done.get(timeout=max(0.0, end - time.monotonic())))
            if not self.lost:  # of an agent that has ended `_clear_up` may not have told them yet
                left |= {w.rank for node in self.nodes for w in node.workers.values() if w.ended_with_pool}
            abandoned: queue.SimpleQueue[int] = queue.SimpleQueue()
            self.wire.question([*left], _to_engine("abandon", pool=self.owner["pool"]), lambda r, _: abandoned.put(r))
            end = time.monotonic() + min(GIVE_BACK_SECONDS, seconds)
            with suppress(queue.Empty):
                for _ in left:
                    abandoned.get(timeout=max(0.0, end - time.monotonic()))
        self._close_pipe()

    def _close_pipe(self) -> None:
        os.close(self._wake)  # wakes the watch
        if self.closed and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(TICK)
        os.close(self._ended)


def _to_engine(do: str, **fields: Any) -> Question:
    """A question to `capabilities.attached.engine_side`."""
    return Question.of("engine", do=do, **fields)


def by_host(engines: Sequence[Engine]) -> list[list[Engine]]:
    """The engines of each host, hosts in order of their lowest engine."""
    found: dict[tuple[str, ...], list[Engine]] = {}
    for engine in sorted(engines, key=lambda e: e.id):
        found.setdefault(tuple(engine.told["sees"]), []).append(engine)
    return list(found.values())


class AttachedNode(PoolNode):
    """A node of engines that somebody else has started. `agent` is that of this machine: it keeps the store."""

    can_respawn = False

    def __init__(
        self, joined: AttachedCluster, engines: Sequence[Engine], facts: Warm, agent: AgentClient,
        died: Callable[[int, ProcessExit], None],
    ):  # fmt: skip
        super().__init__(agent, died, lambda event: None)
        self.joined, self.engines, self._facts = joined, list(engines), facts
        self.here, self.name = engines[0].here, str(engines[0].told["host"])
        self._ended_by_us: set[str] = set()  # uuids
        self._states: dict[int, tuple[RankStatus, str]] = {}
        self._bulk: dict[int, str] = {}
        self._asked: dict[int, Engine] = {}  # rank → which is to become it
        self._cwd = ""  # where they are to start

    @property
    def alive(self) -> bool:
        return not self.joined.lost and self.agent.alive

    @property
    def warm(self) -> Warm:
        return self._facts

    @property
    def place(self) -> tuple[str, ...]:
        return tuple(self.engines[0].told["place"])

    @property
    def on_this_machine(self) -> bool:
        """Whether it shares this machine's loopback, which processes of another container or user do."""
        from nbddp.capabilities.attached import engine_side

        return list(self.place) == engine_side.place()

    def addresses(self) -> list[str]:
        """Those of the host that others may reach, IPv4 first."""
        found = [a for i in self._facts.interfaces if not i["loopback"] for a in i["addresses"]]
        return sorted((a for a in found if not a.startswith("fe80")), key=lambda a: ":" in a)

    @property
    def given(self) -> Mapping[str, str]:
        """What the user has set there, as far as it wins over ours."""
        return dict(self.engines[0].told["env"])

    def refuse(self, nproc: int | str | None, device: str | None) -> None:
        """Raises BadInput if this host has fewer engines than are asked for, or if each sees GPUs of its own."""
        if isinstance(nproc, int) and nproc > len(self.engines):
            have = len(self.engines)
            raise BadInput(
                f"--nproc {nproc} asks for too many engines: {self.name} has {counted(have, 'engine')}. Use "
                f"--nproc {have}, or start the cluster with more"
            )
        masks = {e.told["env"].get("CUDA_VISIBLE_DEVICES") for e in self.engines}
        if len(masks) > 1 and device != "cpu":
            raise BadInput(
                f"the engines of {self.name} have different values of CUDA_VISIBLE_DEVICES, so ranks cannot find "
                "their GPUs; start the cluster without it, or add --device cpu"
            )

    # -- processes ------------------------------------------------------------------------------------

    def host(self, index: int) -> Node:
        return start_requests.host(self._facts, index, self.address, self.name)

    def take(self, places: Sequence[Worker], topology: Topology, visible: str) -> dict[int, str]:
        """What its engines are to evaluate to become these workers, by id."""
        self._cwd = existing_working_dir()
        self._asked = {place.rank: self.engines[place.local_rank] for place in places}
        asked = {}
        for place in places:
            engine, joining = self._asked[place.rank], topology.joining(place) or loopback_name()
            env = torchrun_env.of_worker(place, topology, engine.told["env"], visible=visible, joining=joining)
            roots = [e.told["pid"] for e in self.engines[: place.local_world_size]]
            request: TakeRequest = {"env": env, "cwd": self._cwd, "owner": self.joined.owner, "roots": roots}
            asked[engine.id] = f"take({request!r})"
        return asked

    def taken(self, answers: Mapping[int, tuple[str, str]]) -> list[str]:
        """They have become ranks; what a user should know, in words."""
        moved = {}
        for rank, engine in self._asked.items():
            cwd, self._bulk[rank] = answers[engine.id]
            if cwd != self._cwd:
                moved[cwd] = self._cwd
            told = engine.told
            self.workers[rank] = WorkerProcess(rank, engine.uuid, told["pid"], told["started"], "", registered=True)
            self._states[rank] = RankStatus.IDLE, ""
        self._asked = {}
        return [f"{self.name} has no folder {asked}; its ranks start in {there}" for there, asked in moved.items()]

    def signal(self, ranks: Sequence[int], number: int, asked: AgentRequests, *, group: bool = False) -> None:
        """An interrupt goes through the engine's control channel, to its program alone; what ends a process is a signal
        of this machine's, or of ipyparallel's nanny. One that nobody can end counts as ended. group: makes no
        difference, since an engine may share its own with others."""
        living = [self.workers[r] for r in ranks if r in self.workers and self.workers[r].lives]
        if number == signal.SIGINT:
            self.joined.wire.question([w.rank for w in living], Question.of("interrupt"), lambda rank, answer: None)
            return
        nannies = {e.uuid: e.told["nanny"] for e in self.engines}
        if number == signal.SIGKILL:
            self._ended_by_us |= {w.uuid for w in living}
        for worker in living:
            process = ProcessId(worker.pid, worker.started).process() if self.here else None
            if process is not None:
                process.send_signal(number)
            elif nannies[worker.uuid]:
                self.joined.signal(worker.uuid, number)
            else:
                self.left(worker, "its engine cannot be stopped from here and keeps running")

    def _gone(self) -> ProcessExit:
        """The agent kept the ranks' store, and nothing that is on them."""
        ended = (
            "the pool stopped while the cell was running, because its node agent exited; variables stay on its "
            f"engines, and %ddp start --cluster {self.joined.cluster.name} uses them again"
        )
        return ProcessExit(pool_ended=ended)

    def _clear_up(self) -> None:
        """The engines are not the agent's that has ended: they are engines again, without the cell that ran there."""
        if not self.joined.closed:
            with suppress(PoolError, KeyError, RuntimeError):  # if this fails, it notices that its owner is silent
                asked = _to_engine("abandon", pool=self.joined.owner["pool"])
                self.joined.wire.question([*self.workers], asked, lambda rank, answer: None)
        self.agent.sweep()

    def left(self, worker: WorkerProcess, why: str = LEFT, pool_ended: str = "") -> None:
        """A rank's engine is gone."""
        code = -signal.SIGKILL if worker.uuid in self._ended_by_us else None
        self.exited(worker, ProcessExit(code, lost=why, pool_ended=pool_ended))

    # -- what is not there ------------------------------------------------------------------------------

    def keep(self, seconds: float | None) -> None:
        """nbddp lets none of these survive the notebook kernel."""

    def describe(self, subject: tuple[object, ...], info: Callable[[], Json], files: list[str]) -> None:
        """There is no agent to tell."""

    def errors_of(self, number: int) -> Path:
        return Path(min(self._bulk.values(), default="/")) / "runs" / str(number)

    # -- status ------------------------------------------------------------------------------------------

    def note(self, ranks: Sequence[int], status: RankStatus, doing: str) -> None:
        self._states |= {r: (status, doing) for r in ranks if r in self.workers}

    def children(self, asked: AgentRequests) -> list[Json]:
        """Its ranks as an agent tells of its children, with their memory in bytes."""
        living = {r: w for r, w in self.workers.items() if w.lives}
        heard: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.joined.wire.ask_all([*living], _to_engine("memory"), lambda r, reply: heard.put((r, reply.answer)))
        memory: dict[int, int] = {}
        end = time.monotonic() + MEMORY_SECONDS
        with suppress(queue.Empty):
            while len(memory) < len(living):
                rank, held = heard.get(timeout=max(0.0, end - time.monotonic()))
                memory[rank] = held if isinstance(held, int) else 0
        return [
            {
                "kind": "worker", "pid": w.pid, "started": w.started, "rank": r, "status": self._states[r][0],
                "doing": self._states[r][1], "memory": memory.get(r, 0),
            }
            for r, w in living.items()
        ]  # fmt: skip

    # -- the way to the store ------------------------------------------------------------------------------

    def find_way(self, to: str) -> None:
        """Note this host's address on the way to another."""
        engine = self.engines[0].id
        self.address = str(self.joined.evaluate({engine: f"address_towards({to!r})"}, LOOK_SECONDS)[engine])


class Gatekeeper:
    """What keeps gates on a host of engines: a process that one of them has started (`pool.stores.Keeper`)."""

    def __init__(self, node: AttachedNode):
        self._node = node
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[Reply]] = {}

    @property
    def _rank(self) -> int:
        return min(self._node.workers)

    @property
    def alive(self) -> bool:
        return self._node.alive and self._node.workers[self._rank].lives

    def post(self, op: str, **fields: Any) -> int:
        """`op` is `store`: a gate that leads to one."""
        number = next(self._numbers)
        self._answers[number] = queue.SimpleQueue()
        asked = _to_engine("gate", store=number, roots=[w.pid for w in self._node.workers.values()], **fields)
        self._node.joined.wire.question([self._rank], asked, lambda rank, reply: self._answers[number].put(reply))
        return number

    def take(self, key: int, timeout: float = START_TIMEOUT) -> Message:
        end = time.monotonic() + timeout
        answer: Any = None
        while answer is None:
            stop.check()
            if time.monotonic() > end or not self.alive:
                raise AgentFailed(f"the gate to the ranks' store on {self._node.name} did not open")
            with suppress(queue.Empty):
                reply = self._answers[key].get(timeout=0.1)
                answer = reply.answer or {"error": reply.failed or "its engine does not answer"}
        why = answer.get("error")
        if why:
            raise AgentFailed(
                f"{self._node.name} cannot reach the ranks' store ({why}); the store is on this "
                "machine, and the engines' hosts must be able to reach it"
            )
        return dict(answer)

    def tell(self, op: str, **fields: Any) -> None:
        """`op` is `close_stores`."""
        asked = _to_engine("close_gates", stores=fields["stores"])
        self._node.joined.wire.question([self._rank], asked, lambda rank, answer: None)


def way_to(node: AttachedNode) -> str:
    """This machine's address on the way to another host. Raises AgentFailed."""
    from nbddp.agent.hardware import address_towards

    for address in node.addresses():
        with suppress(OSError):
            return address_towards(address)
    raise AgentFailed(f"there is no route from here to {node.name}, so its engines cannot reach the ranks' store")
