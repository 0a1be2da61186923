"""Where the nodes of a worker group are: here on this machine. Rows of capabilities add others
(`Capability.sources`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nbddp.errors import BadInput
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import Topology, counted
from nbddp.output.progress import StageText
from nbddp.output.screens import Screen
from nbddp.protocol.capability import load, rows
from nbddp.protocol.codec import Json

if TYPE_CHECKING:
    from nbddp.pool.change import Change, EnvChange
    from nbddp.pool.state import PoolState
    from nbddp.pool.worker_group import WorkerGroup

Progress = Callable[[str], None]


class HostSource:
    """The nodes of one worker group: reached, checked between cells, changed. This one has the node of this machine.

    `told`: what the next start is to say of them. pool: a proxy. may_change: whether nodes may join and leave between
    cells; then each line is planned anew, and `check`, `need_reachable` and `watching` are called.
    """

    may_change = False

    def __init__(self, pool: PoolState):
        self.pool = pool
        self.told: list[str] = []

    @property
    def group(self) -> WorkerGroup:
        return self.pool.group

    # -- what is asked for -------------------------------------------------------------------------

    def where(self, spec: LaunchSpec) -> str:
        """Where the workers of `spec` are to be, as it is typed; empty: on this machine."""
        return ""

    def on(self, spec: LaunchSpec) -> str:
        """The same in words."""
        return "on this machine"

    def refuse_variables(self, spec: LaunchSpec, change: EnvChange) -> None:
        """Raises BadInput for variables that the processes there cannot have."""

    def refuse_renewal(self, asked: str) -> None:
        """Raises BadInput where the ranks' processes cannot be replaced."""

    def refuse_one_shot(self) -> None:
        """Raises BadInput where the ranks' processes cannot end with a run."""

    def refuse_change(self, change: Change) -> None:
        """Raises BadInput or PoolError where a pool that runs cannot be changed so."""

    # -- a start -----------------------------------------------------------------------------------

    def warm(self, spec: LaunchSpec, old: LaunchSpec | None, progress: Progress) -> None:
        """Have the nodes of `spec`, warm. old: of the pool that runs. Raises BadInput where that cannot be."""
        if spec.elastic:
            least, most = spec.elastic
            raise BadInput(f"--nnodes {least}:{most}: nodes cannot join or leave here; set one number")
        self.group.warm_here(progress)

    def leave(self) -> None:
        """Leave what a start that failed has reached."""

    def plan(self, spec: LaunchSpec) -> Topology:
        """Who is where, for `spec` on the nodes that there are. Raises BadInput where that cannot be."""
        return Topology.plan(
            self.pool.parts.placed_on(spec, [node.host(i) for i, node in enumerate(self.group.hosts)]),
            nproc=spec.nproc or self.slots(),
            nnodes=spec.nnodes or self.wanted(),
            gpus_per_proc=spec.gpus_per_proc,
            oversubscribe=spec.oversubscribe,
            device=spec.device or "auto",
        )

    def slots(self) -> int | None:
        """How many workers each host is to have if the line does not say it; None: as its devices have it."""
        return None

    def wanted(self) -> int:
        """The number of nodes if the line does not say it."""
        return len(self.group.hosts)

    def connect(self, progress: Progress) -> None:
        """Have a controller, and be connected to it."""
        self.group.start_cluster(progress)

    def start(self, topology: Topology, visible: str, change: Change, progress: Progress) -> list[str]:
        """Have the processes that a change starts; what a user should know, in words."""
        progress(StageText(f"starting {counted(len(change.start), 'worker')}", "engines"))
        self.group.start_workers(topology, visible, change.start, progress)
        return [*change.notes]

    def settled(self, spec: LaunchSpec) -> None:
        """The workers are those of `spec`."""

    def cluster_name(self) -> str:
        """By which ipyparallel's clients find the workers."""
        return f"nbddp-{self.group.nodes[0].agent.pool_id}"

    def description(self) -> Json:
        """What `status` and `stacks` in a terminal need to know of them."""
        return {}

    # -- nodes that go, and come ---------------------------------------------------------------------

    def need_reachable(self) -> None:
        """Raises PoolNotRunning if they cannot be reached any more."""

    def check(self, progress: Progress) -> None:
        """Between two cells: which are gone. Raises PoolNotRunning where the pool cannot go on without them."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While a run goes on: end it when the nodes are to change."""
        yield

    def renew(self, screen: Screen) -> None:
        """New processes under all ranks, before a run is tried again."""
        self.pool.renew_all()

    # -- the end -----------------------------------------------------------------------------------

    def end(self) -> None:
        """The group has ended: so does what was on its way to it."""

    def names_after(self) -> str:
        """What becomes of the ranks' names when the pool is stopped."""
        return "variables on its workers are lost"


def kind_of(spec: LaunchSpec) -> Callable[[PoolState], HostSource]:
    """The source of nodes that `spec` asks for."""
    asked = [t for row in rows() for option, t in row.sources.items() if getattr(spec, option)]
    return load(asked[-1]) if asked else HostSource
