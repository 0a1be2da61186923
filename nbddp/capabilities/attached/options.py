"""How `--cluster` goes on in a pool that runs. Pure."""

from __future__ import annotations

from nbddp.launch.options import LaunchSpec


def merged(spec: LaunchSpec, running: LaunchSpec) -> str | None:
    """The cluster of the pool that runs, unless the line names another place."""
    return spec.cluster or (None if spec.on_hosts else running.cluster)
