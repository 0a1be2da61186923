"""`--debug` and `--env` in one pool: which processes a line has to replace, and the message about it."""

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
    def __init__(self, pool: PoolState):
        self._pool = pool
        self._first = True  # whether the line that is met starts the pool

    def environment(self, spec: LaunchSpec) -> EnvChange:
        """From the variables that workers have to those of `spec`."""
        group, new = self._pool.group, options.wanted(spec.debug, spec.env)
        self._first = group.topology is None
        names = differing(group.variables, new)
        once, at_import = options.read_once(names), options.at_import(names)
        living = {name: new.get(name, os.environ.get(name)) for name in names if name not in once}
        return EnvChange(
            new, names, at_import, {name: new[name] for name in options.at_import(sorted(new))}, renews=bool(once),
            notes=[options.change_words(once, new, bool(at_import))] if once and group.workers else [],
            asks=Request("environment", {"variables": living}) if living else None,
        )  # fmt: skip

    def planned(self, spec: LaunchSpec, topology: Topology) -> list[str]:
        """Raises BadInput for an interface that a node does not have. One that the notebook's own environment names is
        noted at the first start."""
        group, new = self._pool.group, options.wanted(spec.debug, spec.env)
        for node in group.hosts if any(name in new for name in INTERFACES) else ():
            if lost := options.missing_interface(new, node.facts.interfaces, node.name):
                raise BadInput(lost)
        first = self._first and not group.added
        lost = options.missing_interface(os.environ, group.nodes[0].facts.interfaces) if first else ""
        return [lost] if lost else []

    def holds(self) -> list[str]:
        variables = self._pool.group.variables
        return [f"workers have {options.describe(sorted(variables), variables)}"] if variables else []
