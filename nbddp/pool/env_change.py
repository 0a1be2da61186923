"""What `--debug` and `--env` ask of a pool: which of its processes have to be new, and what to say of it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from nbddp.errors import BadInput
from nbddp.launch import env_options
from nbddp.launch.options import LaunchSpec
from nbddp.launch.torchrun_env import INTERFACES
from nbddp.pool.worker_group import WorkerGroup


class EnvChange:
    """From the variables that workers have to those of `spec`.

    `wanted`: these. `once`: what changes and is read once per process; `imports`: whether torch has to be imported
    anew, with `imported`. `living`: what living workers can take, None to take one away. `first`: there are no workers
    yet. `names`: all that changes; `at_import`: what of it is read while torch is imported.
    """

    def __init__(self, old: Mapping[str, str], spec: LaunchSpec, first: bool):
        self.wanted = env_options.wanted(spec.debug, spec.env)
        changed = env_options.differing(old, self.wanted)
        self.once = env_options.read_once(changed)
        self.names, self.at_import = changed, env_options.at_import(changed)
        self.imports = bool(self.at_import)
        self.imported = {name: self.wanted[name] for name in env_options.at_import(sorted(self.wanted))}
        self.living = {n: self.wanted.get(n, os.environ.get(n)) for n in changed if n not in self.once}
        self.first = first

    def checked(self, group: WorkerGroup) -> list[str]:
        """What is to be said before workers start. Raises BadInput for an interface that a node does not have."""
        named = any(name in self.wanted for name in INTERFACES)
        for node in group.hosts if named else ():
            env_options.check_interfaces(self.wanted, node.facts.interfaces, node.name)
        if not self.first:
            return [env_options.change_words(self.once, self.wanted, self.imports)] if self.once else []
        if group.added:
            return []
        try:
            env_options.check_interfaces(os.environ, group.nodes[0].facts.interfaces)
        except BadInput as e:
            return [str(e)]
        return []
