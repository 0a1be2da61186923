"""The worker group: the nodes with their processes, the ipyparallel cluster that carries the messages, and the stores
where runs meet. It starts and ends processes until they are those of a topology; engine id == rank, always.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nbddp.agent import stop
from nbddp.agent.client import START_TIMEOUT, AgentClient
from nbddp.agent.gather import AgentRequests, end_all
from nbddp.agent.stop import uninterrupted
from nbddp.compat.system import LOOPBACK, existing_working_dir, working_dir
from nbddp.errors import AgentFailed, BadInput, PoolError, PoolNotRunning, RankStatus
from nbddp.launch.topology import Topology, Worker, rank_words
from nbddp.output.progress import Progress, StageText, counting
from nbddp.pool import start_requests
from nbddp.pool.change import RankLayout, plan_change
from nbddp.pool.host_source import HostSource
from nbddp.pool.node import ClusterFiles, PoolNode, WorkerProcess, weakly
from nbddp.pool.stores import RendezvousStores
from nbddp.protocol.agent import StartWorker
from nbddp.protocol.codec import Json, Message
from nbddp.protocol.outcome import ProcessExit

REGISTER_TIMEOUT = 60.0
AT_ONCE = 16  # workers that a node starts between two moments at which Stop is heard
NO_POOL = "no workers are running; start some with %ddp start --nproc 4, a %%ddp cell or pool.start()"


class EndedStarting(PoolError):
    """A worker ended before it could be reached."""


class WorkerGroup:
    """What lives of a pool; a pool that has ended gets an empty one.

    `topology`, `visible`: who is where, once a plan has been carried out. `broken`: whether the ranks' process group is
    to be ended before the next run. `hears`: of a rank's end, and of another process's, as `PoolNode` says it.
    """

    def __init__(self, remains: OwnedProcesses, source: HostSource):
        self.source = source
        self.nodes: list[PoolNode] = []
        self.topology: Topology | None = None
        self.visible = "all"
        self.broken = False
        self.wire: Any = None
        self.stores: RendezvousStores | None = None
        self.files: list[str] = []
        self.cluster: Any = None
        self._remains = remains
        self._numbers = itertools.count()
        self.variables: Mapping[str, str] = {}  # of `--debug` and `--env`; workers that start have them
        self.options: Json = {}  # of the pool, that workers get when they start
        self.hears: tuple[Callable[..., None], Callable[..., None]] = (_nobody, _nobody)

    def report_to(self, died: Callable[[int, ProcessExit], None], process_ended: Callable[[Message], None]) -> None:
        """Who hears of what nodes tell, as `PoolNode` says it; held weakly."""
        self.hears = weakly(died), weakly(process_ended)

    @property
    def agent(self) -> AgentClient | None:
        """The agent of the node where the controller runs."""
        return self.nodes[0].agent if self.nodes else None

    @property
    def workers(self) -> dict[int, WorkerProcess]:
        """Rank → its process, on all nodes."""
        return {r: w for node in self.nodes for r, w in node.workers.items()}

    @property
    def alive(self) -> bool:
        """Whether there are nodes, and all live."""
        return bool(self.nodes) and all(node.alive for node in self.nodes)

    @property
    def running(self) -> bool:
        return self.cluster is not None and self.alive

    @property
    def whole(self) -> bool:
        """Whether every rank has its process for the next run, and neither a process nor a node has ended."""
        workers = self.workers.values()
        serve = all(w.registered and w.lives and not w.retired for w in workers)
        return serve and len(workers) == self.world_size and self.running

    @property
    def world_size(self) -> int:
        return len(self.topology.workers) if self.topology else 0

    def placed(self) -> Topology:
        """Who is where. Raises PoolNotRunning."""
        if self.topology is None:
            raise PoolNotRunning(NO_POOL)
        return self.topology

    def need_running(self) -> None:
        if self.source.may_change:
            self.source.need_reachable()
        if self.running and self.topology is not None:
            return
        raise PoolNotRunning(f"{self.ended}; the next %%ddp cell or %ddp start replaces it" if self.ended else NO_POOL)

    @property
    def ended(self) -> str:
        """That the pool has ended by itself, and with what; empty if it has not, or if there was none."""
        if self.topology is None or not self.nodes or self.alive:
            return ""
        return f"the pool has stopped with its {self.nodes[0].lost or 'node agent'}"

    def node_with(self, rank: int) -> PoolNode:
        """The node on which a rank's process is."""
        return next(node for node in self.nodes if rank in node.workers)

    # -- life ------------------------------------------------------------------------------------

    def take(self, node: PoolNode) -> None:
        """Have a node, whose agent ends with the pool. The first is this machine's."""
        node.number = next(self._numbers)
        self.nodes.append(node)
        self._remains.take(node.agent)

    @property
    def added(self) -> list[Any]:
        """The nodes that the source has besides this machine's; where there are any, all ranks are there."""
        return self.nodes[1:]

    @property
    def hosts(self) -> list[PoolNode]:
        """The nodes that workers are placed on."""
        return self.nodes[1:] or self.nodes[:1]

    @property
    def sees_files(self) -> bool:
        """Whether files of ranks are read by their paths, as files of this machine."""
        return all(node.sees_files for node in self.hosts)

    @property
    def can_respawn(self) -> bool:
        """Whether all ranks' processes can be ended, and new ones started."""
        return all(node.can_respawn for node in self.hosts)

    def node_index(self, place: Worker) -> int:
        """Which of `hosts` a place is on; simulated nodes are all this machine."""
        return place.node if len(self.hosts) > 1 else 0

    def borrow(self, give_back: Callable[[bool], None]) -> None:
        """Have processes that somebody else has started. give_back: what gives them back when the pool ends, called
        with whether this process ends as well."""
        self._remains.give_back = give_back

    def give_back(self) -> None:
        """Be without them again; this machine's agent stays."""
        self._remains.end_borrowed()
        self.nodes, self.wire, self.cluster, self.stores = self.nodes[:1], None, None, None

    def warm_here(self, progress: Callable[[str], None]) -> None:
        """Wait until the agent of this machine is warm."""
        node = self.nodes[0]
        if node.warm:
            node.agent.wait_warm()  # which raises if a package is missing
            return
        only = node.agent.controls_only
        words = "waiting for the node agent" if only else "importing torch in the warm process, once"
        node.agent.wait_warm(waits=counting(progress, words, "agent"))

    def leave(self, gone: Sequence[PoolNode]) -> None:
        """Go on without these nodes, which have no workers any more. Ranks meet at new stores from here on."""
        self.nodes = [node for node in self.nodes if node not in gone]
        self._remains.end_some([node.agent for node in gone])

    def meet_anew(self) -> None:
        """Stores for the nodes that there are now."""
        if self.stores is not None:
            self.stores.end()
            self._open_stores()

    def _open_stores(self) -> None:
        self.stores = RendezvousStores([node.agent for node in self.hosts], self.hosts[0].address)
        for node in self.hosts:
            node.agent.on_event(weakly(self.stores.heard))

    def start_cluster(self, progress: Callable[[str], None]) -> None:
        """Start the controller, and connect to it."""
        progress(StageText("starting the controller", "controller"))
        from ipyparallel import Cluster as Parallel

        from nbddp.pool.launcher import AgentControllerLauncher, AgentEngineSetLauncher
        from nbddp.pool.rpc import RankRpc

        assert self.agent is not None
        cluster = Parallel(
            cluster_id=f"nbddp-{self.agent.pool_id}",
            controller_launcher_class=AgentControllerLauncher,
            engine_launcher_class=AgentEngineSetLauncher,
            shutdown_atexit=False,
            log_level=40,
        )
        self._open_stores()
        try:
            cluster.start_controller_sync(agent=self.agent, ip=self.nodes[0].address or LOOPBACK)
            self.cluster = cluster
            self.files = [cluster.cluster_file, *cluster.controller.connection_files.values()]
            self.describe()
            self.wire = self._remains.wire = RankRpc(cluster.connect_client_sync, patience=REGISTER_TIMEOUT)
        except RuntimeError as e:  # ipyparallel's, or of a pool that ends with its controller
            ended = cluster.controller.ended() if cluster.controller is not None else None
            failed = e if isinstance(e, PoolError) else PoolError(f"the pool's controller did not start: {e}")
            raise ended or failed from None

    def describe(self) -> None:
        """Tell the agents what `status` shows, if it has changed."""
        placed = self.topology
        more = self.source.description()
        subject = (placed, working_dir(), len(self.files), repr(more))
        info = functools.cache(lambda: {**start_requests.description(placed), **more})
        for node in self.nodes:
            node.describe(subject, info, self.files)

    def note(self, ranks: Sequence[int], status: RankStatus, doing: str = "") -> None:
        """What `status` is to say of these ranks. doing: the same in words, such as "running Cell In[3]"."""
        for node in self.nodes:
            node.note(ranks, status, doing)

    # -- processes ---------------------------------------------------------------------------------

    def match(
        self,
        topology: Topology,
        visible: str,
        *,
        fresh: bool = False,
        before_end: Callable[[Sequence[int]], None] = lambda ranks: None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> list[str]:
        """Start and end processes until they are those of `topology`; what a user should know, in words.

        before_end: called with the ranks whose processes end.
        """
        self._settle()
        old = None if self.topology is None else RankLayout(self.topology, self.visible)
        living = {r: w.lives for r, w in self.workers.items()}
        change = plan_change(old, RankLayout(topology, visible), living, fresh)
        if change.start:
            self.need_folder()
        if old is not None:
            self.source.refuse_change(change)
        if change.end:
            before_end(change.end)
            self.end(change.end)
        if not change.start:
            return [*change.notes]
        notes = self.source.start(topology, visible, change, progress)
        progress(StageText(f"devices assigned ({topology.devices_words()})", "devices"))
        return notes

    def need_folder(self) -> None:
        """New processes start in this one's working folder. Raises BadInput, before any has ended, if it is gone."""
        if self.sees_files:
            existing_working_dir()

    def end_retired(self) -> None:
        """End processes that have served their one run; the next run starts new ones."""
        if over := sorted(r for r, w in self.workers.items() if w.retired):
            before = self.broken
            self.end(over)
            self.broken = before and bool(self.workers)

    def renew(self) -> list[str]:
        """Give every rank of the plan a process that lives; what a user should know, in words."""
        return self.match(self.placed(), self.visible)

    def start_workers(
        self, topology: Topology, visible: str, ranks: Sequence[int], progress: Callable[[str], None]
    ) -> None:
        """Have the nodes' agents start these ranks' processes, and wait until they can be reached."""
        cluster = ClusterFiles(self.cluster.profile_dir, self.cluster.controller.connection_files["engine"])
        places: dict[PoolNode, list[Worker]] = {}
        hosts = self.hosts
        for place in (topology.workers[r] for r in ranks):
            places.setdefault(hosts[self.node_index(place)], []).append(place)
        for node in places:
            node.prepare(cluster)
            node.variables, node.options = self.variables, self.options
        starts = {node: [node.request(p, topology, visible, cluster) for p in own] for node, own in places.items()}
        for i in range(0, max(map(len, starts.values())), AT_ONCE):
            with uninterrupted():
                self._start_some({node: own[i : i + AT_ONCE] for node, own in starts.items() if own[i:]})
        self._wait_registered(ranks, progress)

    def _start_some(self, starts: Mapping[PoolNode, Sequence[StartWorker]]) -> None:
        """All nodes are asked before one is waited for. What a node has started is noted, also where another fails."""
        failed: list[AgentFailed] = []
        for node, posted in [(node, node.post_starts(own)) for node, own in starts.items()]:
            try:
                node.take_starts(posted, functools.partial(self._launched, node))
            except AgentFailed as e:
                failed.append(e)
        self.cluster.update_cluster_file()
        if failed:
            raise failed[0]

    def _settle(self) -> None:
        """Wait until the workers of a start that was left, by a Stop or since one of them ended, have come or ended.

        A worker that has begun to register is not ended before it has: the hub would hold its rank for seconds.
        """
        while begun := [r for r, w in self.workers.items() if not w.registered and w.lives]:
            with suppress(EndedStarting):  # that was said of the start which was left
                self._wait_registered(begun)

    def _wait_registered(self, ranks: Sequence[int], progress: Callable[[str], None] = lambda text: None) -> None:
        """Wait until these workers can be reached. Raises EndedStarting if one has ended."""
        new = {r: w for r, w in self.workers.items() if r in ranks and not w.registered}
        imports = any(w.spawned for w in new.values())  # perhaps from a slow disk
        uuids = {r: w.uuid for r, w in new.items()}
        there = functools.partial(_engines_words, progress, len(uuids))
        check = functools.partial(self._check_starting, new.values())
        self.wire.wait_for(uuids, check, START_TIMEOUT if imports else REGISTER_TIMEOUT, there)
        for worker in new.values():
            worker.registered = True
        self.note(list(new), RankStatus.IDLE)

    def _launched(self, node: PoolNode, started: Mapping[int, int]) -> None:
        """Have processes in an engine set of the cluster, which `ipcluster list` counts; each node has one."""
        cluster, name = self.cluster, f"workers-{node.number}"
        if name in cluster.engines:
            cluster.engines[name].note(started)
        elif started:
            cluster.start_engines_sync(len(started), engine_set_id=name, agent=node.agent, started=dict(started))

    def _check_starting(self, workers: Collection[WorkerProcess]) -> None:
        if any(w.ended_with_pool for w in workers):
            raise PoolNotRunning("the pool's controller has exited; run the cell again to start a new pool")
        for worker in workers:
            if worker.exit is not None:
                node = self.node_with(worker.rank)
                words = node.last_words(worker.rank)
                failed = EndedStarting(
                    f"rank {worker.rank} exited while starting (exit code {worker.exit.code}): "
                    f"{words or 'it left no message'}"
                )
                failed.log = str(worker.log) if node.sees_files else ""
                raise failed
        if not self.alive:
            raise PoolNotRunning("the node agent has exited; run the cell again to start a new pool")

    def signal(self, ranks: Sequence[int], number: int, *, group: bool = False) -> None:
        asked = AgentRequests()
        for node in self.nodes:
            node.signal(ranks, number, asked, group=group)
        asked.take()

    def begin_logs(self, ranks: Sequence[int]) -> None:
        """Text of earlier cells does not belong to the next run's last output."""
        there = {node: own for node in self.nodes if (own := node.begin_logs(ranks))}
        if there:  # waited for: a rank may die before the agent has read it
            asked = AgentRequests()
            for node, own in there.items():
                asked.post_if_alive(node.agent, "begin_logs", ranks=own)
            asked.take()

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill processes, and wait until they have ended."""
        import signal

        self.signal(ranks, signal.SIGKILL)
        workers = self.workers
        for rank in ranks:
            _until(lambda w=workers[rank]: not w.lives, 10.0, f"rank {rank} did not end")  # type: ignore[misc]

    def end(self, ranks: Sequence[int]) -> None:
        """End these ranks' processes and have hub and client forget them."""
        self.broken = self.broken or bool(ranks)  # whatever Stop leaves undone below
        self.kill(ranks)
        with uninterrupted():
            self.wire.forget({rank: self.node_with(rank).workers.pop(rank).uuid for rank in ranks})


class OwnedProcesses:
    """The processes that survive a pool that is dropped, and are to end with it: its agents, with all processes, and
    its client."""

    def __init__(self) -> None:
        self.agents: list[AgentClient] = []
        self.wire: Any = None
        self.give_back: Callable[[bool], None] | None = None  # as `WorkerGroup.borrow` has it
        self._owner = os.getpid()

    def take(self, agent: AgentClient) -> None:
        self.agents.append(agent)
        atexit.register(self._at_exit)

    def end(self, keep: bool = False) -> None:
        """keep: whether the warm process of this machine may go on."""
        if os.getpid() != self._owner:  # a forked child has our connections, and would end what is ours
            return
        agents, self.agents = self.agents, []
        self.end_borrowed()
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.close()
        here, far = agents[:1], agents[1:]  # the controller is the first one's
        end_all(far)
        end_all(here, keep)
        atexit.unregister(self._at_exit)

    def end_borrowed(self) -> None:
        give_back, self.give_back = self.give_back, None
        if give_back is not None:
            give_back(False)

    def end_some(self, agents: Sequence[AgentClient]) -> None:
        self.agents = [agent for agent in self.agents if agent not in agents]
        end_all(agents)

    def end_elsewhere(self) -> None:
        """As `end`; a pool may be dropped in any thread, also in one that `end` waits for."""
        if self.agents:
            threading.Thread(target=self.end, name="nbddp-ending").start()

    def _at_exit(self) -> None:
        if os.getpid() != self._owner:
            return
        if self.give_back is not None:
            self.give_back(True)
        end_all(self.agents, keep=True, timeout=2)


def check_ranks(asked: Sequence[int] | None, world_size: int, option: str) -> tuple[int, ...]:
    """The ranks that are meant; all if None. Raises BadInput for a rank that is not there."""
    if asked is None:
        return tuple(range(world_size))
    beyond = [r for r in asked if r >= world_size]
    if beyond:
        raise BadInput(
            f"{option} names {rank_words(beyond)}, but the pool has {rank_words(range(world_size))}; "
            f"use ranks below {world_size}"
        )
    return tuple(asked)


def _engines_words(progress: Callable[[str], None], of: int, count: int) -> None:
    progress(Progress("engines registered", count, of, "engines"))


def _nobody(*told: Any) -> None:
    pass


def _until(done: Callable[[], bool], timeout: float, why: str) -> None:
    end = time.monotonic() + timeout
    while not done():
        stop.check()
        if time.monotonic() > end:
            raise PoolError(f"{why} within {timeout:.0f} s; %ddp stop, then start again")
        time.sleep(0.002)
