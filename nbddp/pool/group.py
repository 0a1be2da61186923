"""The worker group: the nodes with their processes, the ipyparallel cluster that carries the messages, and the stores
where runs meet. It starts and ends processes until they are those of a topology; engine id == rank, always.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from nbddp.agent.controller import LOOPBACK
from nbddp.agent.far import FarAgent
from nbddp.agent.handle import START_TIMEOUT, Agent
from nbddp.agent.reached import address_towards
from nbddp.base import stop
from nbddp.base.stop import uninterrupted
from nbddp.errors import PoolError, PoolNotRunning
from nbddp.plan.topology import Topology, Worker, counted
from nbddp.pool import requests
from nbddp.pool.change import Layout, plan_change
from nbddp.pool.node import Cluster, FarNode, Living, Node, Starts, weakly
from nbddp.pool.stores import RendezvousStores

REGISTER_TIMEOUT = 60.0
AT_ONCE = 16  # workers started between two moments at which Stop is heard
NO_POOL = "there is no pool; %ddp start --nproc 4 or a %%ddp cell starts one"


class WorkerGroup:
    """What lives of a pool; a pool that has ended gets an empty one.

    `topology`, `visible`: who is where, once a plan has been carried out. `broken`: whether the ranks' process group is
    to be ended before the next run.
    """

    def __init__(self, remains: Remains):
        self.nodes: list[Node] = []
        self.topology: Topology | None = None
        self.visible = "all"
        self.broken = False
        self.wire: Any = None
        self.stores: RendezvousStores | None = None
        self.files: list[str] = []
        self.cluster: Any = None
        self._remains = remains

    @property
    def agent(self) -> Agent | None:
        """The agent of the node where the controller runs."""
        return self.nodes[0].agent if self.nodes else None

    @property
    def workers(self) -> dict[int, Living]:
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
    def world_size(self) -> int:
        return self.topology.world_size if self.topology else 0

    def placed(self) -> Topology:
        """Who is where. Raises PoolNotRunning."""
        if self.topology is None:
            raise PoolNotRunning(NO_POOL)
        return self.topology

    def need_running(self) -> None:
        if not self.running or self.topology is None:
            raise PoolNotRunning(NO_POOL)

    def node_with(self, rank: int) -> Node:
        """The node on which a rank's process is."""
        return next(node for node in self.nodes if rank in node.workers)

    # -- life ------------------------------------------------------------------------------------

    def take(
        self, agent: Agent, died: Callable[[int, dict[str, Any]], None], tried: Callable[[dict[str, Any]], None]
    ) -> None:
        """Have an agent's node. died, tried: as `Node` takes them."""
        kind = FarNode if isinstance(agent, FarAgent) else Node
        self.nodes.append(kind(agent, weakly(died), weakly(tried)))
        self._remains.take(agent)

    @property
    def spread(self) -> list[FarNode]:
        """The nodes of other hosts; where there are any, all ranks are there, and this machine's node has none."""
        return [node for node in self.nodes if isinstance(node, FarNode)]

    @property
    def hosts(self) -> list[Node]:
        """The nodes that workers are placed on."""
        return [*self.spread] or self.nodes[:1]

    def home_of(self, place: Worker) -> Node:
        """The node of a place; simulated nodes are all this machine."""
        return self.hosts[place.node] if self.spread else self.nodes[0]

    def find_ways(self) -> None:
        """Have every node know the address at which others reach it."""
        hosts = self.spread
        for node in hosts:
            others = [other.agent.route_to() for other in hosts if other is not node]
            node.find_way(others[0] if others else node.agent.route_to())
        if hosts:
            self.nodes[0].address = address_towards(hosts[0].agent.route_to())

    def start_cluster(self, progress: Callable[[str], None]) -> None:
        """Start the controller, and connect to it."""
        progress("starting the controller")
        from ipyparallel import Cluster as Parallel

        from nbddp.pool.launcher import AgentControllerLauncher, AgentEngineSetLauncher
        from nbddp.pool.wire import Wire

        assert self.agent is not None
        cluster = Parallel(
            cluster_id=f"nbddp-{self.agent.pool_id}",
            controller_launcher_class=AgentControllerLauncher,
            engine_launcher_class=AgentEngineSetLauncher,
            shutdown_atexit=False,
            log_level=40,
        )
        self.stores = RendezvousStores([node.agent for node in self.hosts], self.hosts[0].address)
        cluster.start_controller_sync(agent=self.agent, ip=self.nodes[0].address or LOOPBACK)
        self.cluster = cluster
        self.files = [cluster.cluster_file, *cluster.controller.connection_files.values()]
        self.describe()
        self.wire = self._remains.wire = Wire(cluster.connect_client_sync)

    def describe(self) -> None:
        """Tell the agents what `status` shows, if it has changed."""
        placed = self.topology
        subject = (placed, os.getcwd(), len(self.files))
        for node in self.nodes:
            node.describe(subject, lambda: requests.description(placed), self.files)

    def note(self, ranks: Sequence[int], state: str) -> None:
        """What `status` is to say of these ranks."""
        for node in self.nodes:
            node.note(ranks, state)

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
        if any(not w.registered and w.lives for w in self.workers.values()):
            self._wait_registered()
        old = None if self.topology is None else Layout(self.topology, self.visible)
        living = {r: w.lives for r, w in self.workers.items()}
        change = plan_change(old, Layout(topology, visible), living, fresh)
        before_end(change.end)
        self.end(change.end)
        if change.start:
            progress(f"starting {counted(len(change.start), 'worker')}")
            self._start_workers(topology, visible, change.start)
        return [*change.notes]

    def renew(self) -> list[str]:
        """Give every rank of the plan a process that lives; what a user should know, in words."""
        return self.match(self.placed(), self.visible)

    def _start_workers(self, topology: Topology, visible: str, ranks: Sequence[int]) -> None:
        cluster = Cluster(self.cluster.profile_dir, self.cluster.controller.connection_files["engine"])
        starts: dict[Node, Starts] = {}
        for place in (topology.workers[r] for r in ranks):
            node = self.home_of(place)
            starts.setdefault(node, []).append(node.request(place, topology, visible, cluster))
        for node, own in starts.items():
            for i in range(0, len(own), AT_ONCE):
                with uninterrupted():
                    node.start(own[i : i + AT_ONCE], functools.partial(self._launch, node))
        self._wait_registered()

    def _wait_registered(self) -> None:
        """Wait until every started worker can be reached, also those whose start was left by a Stop.

        A worker that has begun to register is not ended before it has: the hub would hold its rank for seconds.
        """
        new = {r: w for r, w in self.workers.items() if not w.registered and w.lives}
        imports = any(node.warm.get("spawn") for node in self.nodes)  # each worker by itself, perhaps from a slow disk
        uuids = {r: w.uuid for r, w in new.items()}
        self.wire.wait_for(uuids, self._check_starting, START_TIMEOUT if imports else REGISTER_TIMEOUT)
        for worker in new.values():
            worker.registered = True
        self.note(list(new), "idle")

    def _launch(self, node: Node, starts: Starts) -> Starts:
        """Start processes through an engine set of the cluster, which `ipcluster list` counts; each node has one."""
        cluster, name = self.cluster, f"workers-{self.nodes.index(node)}"
        if name in cluster.engines:
            answers: Starts = cluster.engines[name].start_workers(starts)
        else:
            cluster.start_engines_sync(len(starts), engine_set_id=name, agent=node.agent, starts=starts)
            answers = cluster.engines[name].started
        cluster.update_cluster_file()
        return answers

    def _check_starting(self) -> None:
        workers = self.workers.values()
        if any(w.exit is not None and w.exit.get("pool_ended") for w in workers):
            raise PoolNotRunning("the pool's controller has ended; run the cell again to start a new pool")
        for worker in workers:
            if worker.exit is not None and not worker.registered:
                words = self.node_with(worker.rank).last_words(worker.rank)
                raise PoolError(
                    f"rank {worker.rank} ended while it started (exit code {worker.exit['code']}): "
                    f"{words or 'it left no message'}"
                )
        if not self.alive:
            raise PoolNotRunning("the node agent has ended; run the cell again to start a new pool")

    def signal(self, ranks: Sequence[int], number: int) -> None:
        for node in self.nodes:
            node.signal(ranks, number)

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
            for rank in ranks:
                node = self.node_with(rank)
                self.wire.forget(rank, node.workers.pop(rank).uuid)


class Remains:
    """What outlives a pool that is dropped, and is to end with it: its agents, with all processes, and its client."""

    def __init__(self) -> None:
        self.agents: list[Agent] = []
        self.wire: Any = None

    def take(self, agent: Agent) -> None:
        self.agents.append(agent)
        atexit.register(self._at_exit)

    def end(self, keep: bool = False) -> None:
        """keep: whether the warm process of this machine may go on."""
        agents, self.agents = self.agents, []
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.close()
        for agent in reversed(agents):
            agent.close() if keep else agent.stop()
        atexit.unregister(self._at_exit)

    def end_elsewhere(self) -> None:
        """As `end`; a pool may be dropped in any thread, also in one that `end` waits for."""
        if self.agents:
            threading.Thread(target=self.end, name="nbddp-ending").start()

    def _at_exit(self) -> None:
        for agent in self.agents:
            agent.close(timeout=2)


def _until(done: Callable[[], bool], timeout: float, why: str) -> None:
    end = time.monotonic() + timeout
    while not done():
        stop.check()
        if time.monotonic() > end:
            raise PoolError(f"{why} within {timeout:.0f} s; %ddp stop, then start again")
        time.sleep(0.002)
