"""What `--debug` and `--env` have in one pool: which of its processes have to be new for a line, and what to say."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nbddp.capabilities.env import options
from nbddp.errors import BadInput
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import Topology
from nbddp.launch.torchrun_env import INTERFACES, differing
from nbddp.pool.change import EnvChange
from nbddp.protocol.request import Request

if TYPE_CHECKING:
    from nbddp.pool.state import PoolState


class EnvPart:
    """`_change`: what the line that is being met changes; `_first`: whether there were no workers before it."""

    def __init__(self, pool: PoolState):
        self._pool = pool
        self._change, self._first = EnvChange(), True

    def environment(self, spec: LaunchSpec) -> EnvChange:
        """From the variables that workers have to those of `spec`."""
        old, new = self._pool.group.variables, options.wanted(spec.debug, spec.env)
        names = differing(old, new)
        once = options.read_once(names)
        living = {name: new.get(name, os.environ.get(name)) for name in names if name not in once}
        self._first = not self._pool.group.workers
        self._change = EnvChange(
            new, names, options.at_import(names), {name: new[name] for name in options.at_import(sorted(new))},
            renews=bool(once), asks=Request("environment", {"variables": living}) if living else None,
        )  # fmt: skip
        return self._change

    def planned(self, spec: LaunchSpec, topology: Topology) -> list[str]:
        """Raises BadInput for an interface that a node does not have."""
        group, change = self._pool.group, self._change
        named = any(name in change.wanted for name in INTERFACES)
        for node in group.hosts if named else ():
            options.check_interfaces(change.wanted, node.facts.interfaces, node.name)
        if not self._first:
            once = options.read_once(change.names)
            return [options.change_words(once, change.wanted, bool(change.at_import))] if once else []
        if group.added:
            return []
        try:
            options.check_interfaces(os.environ, group.nodes[0].facts.interfaces)
        except BadInput as e:
            return [str(e)]
        return []

    def holds(self) -> list[str]:
        variables = self._pool.group.variables
        return [f"workers have {options.words(sorted(variables), variables)}"] if variables else []
