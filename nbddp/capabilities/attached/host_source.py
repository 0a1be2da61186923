"""How a pool uses the engines of a running cluster, and which requests it refuses for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nbddp.agent.client import START_TIMEOUT
from nbddp.agent.stop import uninterrupted
from nbddp.capabilities.attached.clusters import find
from nbddp.capabilities.attached.nodes import (
    LOOK_SECONDS,
    AttachedCluster,
    AttachedNode,
    Engine,
    Gatekeeper,
    by_host,
    way_to,
)  # fmt: skip
from nbddp.compat.system import LOOPBACK
from nbddp.errors import BadInput, PoolError, PoolNotRunning
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import Topology, Worker, counted, rank_words
from nbddp.output.progress import StageText
from nbddp.pool.host_source import HostSource, Progress
from nbddp.pool.stores import Keeper, RendezvousStores
from nbddp.protocol.agent import Warm
from nbddp.protocol.codec import Json, from_json

if TYPE_CHECKING:
    from nbddp.pool.change import Change, EnvChange
    from nbddp.pool.state import PoolState


class ClusterEngines(HostSource):
    """`joined`: our client of the cluster, and `nodes` its engines, once they are the pool's."""

    may_change = True

    def __init__(self, pool: PoolState):
        super().__init__(pool)
        self.joined: AttachedCluster | None = None

    @property
    def nodes(self) -> list[AttachedNode]:
        return self.joined.nodes if self.joined is not None else []

    @property
    def _name(self) -> str:
        assert self.joined is not None
        return self.joined.cluster.name

    # -- what is asked for -------------------------------------------------------------------------

    def where(self, spec: LaunchSpec) -> str:
        return f"--cluster {spec.cluster}"

    def on(self, spec: LaunchSpec) -> str:
        return f"on cluster {spec.cluster}"

    def refuse_variables(self, spec: LaunchSpec, change: EnvChange) -> None:
        if change.names:
            raise BadInput(
                f"the engines of cluster {spec.cluster} keep the environment that they have; set {change.names[0]} "
                "where the cluster is started"
            )

    def refuse_renewal(self, asked: str) -> None:
        raise BadInput(
            f"{asked} replaces the ranks' processes, but nbddp cannot replace the engines of cluster {self._name}; "
            f"restart the cluster, then %ddp stop and %ddp start --cluster {self._name}"
        )

    def refuse_one_shot(self) -> None:
        raise BadInput(
            f"a script's processes end with it, but nbddp cannot end the engines of cluster {self._name}; add --keep "
            "to run it in them"
        )

    def refuse_change(self, change: Change) -> None:
        """Engines are taken once, and none is ended or replaced."""
        name = self._name
        if dead := [r for r, w in self.group.workers.items() if not w.lives]:
            raise PoolError(
                f"the engine{'s' * (len(dead) > 1)} of {rank_words(dead)} ended, and nbddp cannot replace engines of "
                f"cluster {name}; %ddp stop, then %ddp start --cluster {name} uses those that are left"
            )
        if change.start or change.end:
            raise BadInput(
                f"a pool on cluster {name} cannot be changed; %ddp stop, then %ddp start --cluster {name} with "
                "other options"
            )

    # -- a start -----------------------------------------------------------------------------------

    def warm(self, spec: LaunchSpec, old: LaunchSpec | None, progress: Progress) -> None:
        if old is None:  # an earlier start has failed
            self.leave()
        _refuse(spec)
        self.group.warm_here(progress)
        if self.joined is not None:
            return
        try:
            self.told = self._join(spec, progress) or self.told
        except BaseException:
            self.leave()
            raise

    def _join(self, spec: LaunchSpec, progress: Progress) -> list[str]:
        """Connect to the cluster, and look at its engines; what the start is to say."""
        from IPython.paths import get_ipython_dir

        group = self.group
        joined = AttachedCluster(find(str(spec.cluster), Path(get_ipython_dir())), group.nodes[0].agent.pool_id)
        self.joined = joined
        group.borrow(joined.end)
        engines = joined.look(progress)
        hosts = by_host(engines)
        if isinstance(spec.nproc, int):
            hosts = [own[: spec.nproc] for own in hosts]
        facts = joined.evaluate({own[0].id: "facts()" for own in hosts}, LOOK_SECONDS)
        self._take(joined, [(own, from_json(Warm, facts[own[0].id])) for own in hosts])
        chosen = [engine for own in hosts for engine in own]
        return [*joined.differences(chosen), *joined.promises(chosen)]

    def _take(self, joined: AttachedCluster, hosts: Sequence[tuple[Sequence[Engine], Warm]]) -> None:
        """Have the engines for nodes, and ways between them. hosts: the engines of each, and what it has."""
        group = self.group
        died, _ = group.hears
        nodes = [AttachedNode(joined, engines, facts, group.nodes[0].agent, died) for engines, facts in hosts]
        joined.nodes, group.wire = nodes, joined.wire
        group.nodes += nodes
        if len({node.place for node in nodes}) > 1:
            for node in nodes:
                others = next(other for other in nodes if other.place != node.place)
                node.find_way(next(iter(others.addresses()), others.name))

    def leave(self) -> None:
        """This machine's agent stays."""
        if self.joined is not None:
            with uninterrupted():
                self.joined = None
                self.group.give_back()

    def plan(self, spec: LaunchSpec) -> Topology:
        for node in self.nodes if self.group.topology is None else ():
            node.refuse(spec.nproc, spec.device)
        return super().plan(spec)

    def slots(self) -> int | None:
        """How many engines each host has. Raises BadInput where they have different numbers of them."""
        counts = {len(node.engines): node.name for node in self.nodes}
        if len(counts) > 1:
            words = " and ".join(f"{name} has {counted(n, 'engine')}" for n, name in counts.items())
            raise BadInput(f"{words}; set how many to use on each host with --nproc {min(counts)}")
        return next(iter(counts))

    def connect(self, progress: Progress) -> None:
        """It runs."""
        assert self.joined is not None
        self.group.cluster = self.joined.cluster

    def start(self, topology: Topology, visible: str, change: Change, progress: Progress) -> list[str]:
        """Have engines become these ranks, all at once."""
        joined, group = self.joined, self.group
        assert joined is not None
        progress(StageText(f"importing torch in {counted(len(change.start), 'engine')}", "engines"))
        places: dict[AttachedNode, list[Worker]] = {}
        for place in (topology.workers[r] for r in change.start):
            places.setdefault(self.nodes[group.node_index(place)], []).append(place)
        asked = {
            engine: text for node, own in places.items() for engine, text in node.take(own, topology, visible).items()
        }
        try:
            answers = joined.evaluate(asked, START_TIMEOUT)
        except BaseException:
            joined.give_back([*asked])
            raise
        notes = [line for node in places for line in node.taken(answers)]
        group.wire.name_ranks({r: w.uuid for r, w in group.workers.items()})
        joined.begin()
        self._keep_stores()
        return notes

    def _keep_stores(self) -> None:
        """This machine's agent holds the stores; on other hosts an engine starts what leads there."""
        here = [node for node in self.nodes if node.here]
        far = [node for node in self.nodes if not node.here]
        elsewhere = [node for node in far if not node.on_this_machine]
        address = way_to(elsewhere[0]) if elsewhere else LOOPBACK if far else ""
        roots = [w.pid for node in here for w in node.workers.values()]
        keepers: list[Keeper] = [self.group.nodes[0].agent, *map(Gatekeeper, far)]
        keeper_of = [0 if node.here else 1 + far.index(node) for node in self.nodes]
        self.group.stores = RendezvousStores(keepers, address, roots, keeper_of)
        if far:
            self.group.stores.open_now()

    def cluster_name(self) -> str:
        return str(self.pool.spec.cluster)

    def description(self) -> Json:
        return self.joined.description() if self.joined is not None else {}

    # -- the end -----------------------------------------------------------------------------------

    def need_reachable(self) -> None:
        if self.joined is not None and self.joined.lost:
            raise PoolNotRunning(f"the pool has stopped, because {self.joined.lost}; {self.joined.again()}")

    def check(self, progress: Progress) -> None:
        self.need_reachable()

    def names_after(self) -> str:
        return f"its workers are engines of cluster {self.pool.spec.cluster} again and keep their variables"


def _refuse(spec: LaunchSpec) -> None:
    """Raises BadInput for what cannot be on a cluster."""
    interface = getattr(spec, "interface", None)
    asked = f"--interface {interface}" * bool(interface) or "--sync" * bool(getattr(spec, "sync", False))
    if asked:
        raise BadInput(f"{asked} is for other hosts; add --hosts, or remove {asked}")
    if spec.fresh:
        raise BadInput(
            f"--fresh replaces processes, but nbddp cannot replace the engines of cluster {spec.cluster}; %reset -f "
            "in a %%ddp cell deletes their variables, and restarting the cluster gives new engines"
        )
    places = {name: getattr(spec, name, None) for name in ("hosts", "slurm")}
    for option, said in {**places, "nnodes": spec.nnodes or spec.elastic}.items():
        if said:
            raise BadInput(f"the nodes of a cluster are its engines' hosts; remove --{option} or --cluster")
