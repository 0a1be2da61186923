"""`--start-method` in one pool: where it cannot be met, and which line has all workers replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbddp.capabilities.start_method.on_agent import SPAWN
from nbddp.errors import BadInput
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import Topology

if TYPE_CHECKING:
    from nbddp.pool.node import PoolNode
    from nbddp.pool.state import PoolState


class StartMethodPart:
    def __init__(self, pool: PoolState):
        self._pool = pool

    def planned(self, spec: LaunchSpec, topology: Topology) -> list[str]:
        """That the workers are replaced. Raises BadInput where none can be started so."""
        group, asked = self._pool.group, f"--start-method {spec.start_method}"
        if spec.start_method is None:
            return []
        if not group.can_respawn:
            raise BadInput(f"{asked} needs processes that nbddp starts, and a cluster has its own; remove --cluster")
        if why := "" if spec.start_method == SPAWN else next(filter(None, map(self._not_forked, group.hosts)), ""):
            raise BadInput(f"{asked}: {why}; remove --start-method fork")
        told = self.renews(spec) and not spec.fresh and group.workers
        return [f"{asked}: all workers were replaced, and their variables are lost"] if told else []

    def _not_forked(self, node: PoolNode) -> str:
        """Why a node cannot fork workers; empty if it can."""
        why = node.facts.spawn
        return f"{node.name}: {why}" if why and self._pool.group.added else why

    def renews(self, spec: LaunchSpec) -> bool:
        """Whether a node that has workers started them in another way."""
        group, old = self._pool.group, self._pool.spec.start_method
        stands = group.topology is not None
        return stands and any((spec.start_method == SPAWN) != (old == SPAWN) and not n.facts.spawn for n in group.hosts)

    def holds(self) -> list[str]:
        """The lines of `status` below its table."""
        method = self._pool.spec.start_method
        return [f"workers start by {method} (--start-method)"] if method and self._pool.group.topology else []
