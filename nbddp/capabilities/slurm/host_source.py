"""How a pool comes to nodes of Slurm."""

from __future__ import annotations

import sys

from nbddp.capabilities.hosts.elastic import NodePlace
from nbddp.capabilities.hosts.remote_nodes import RemoteNodes
from nbddp.capabilities.slurm.allocation import Allocation
from nbddp.capabilities.slurm.commands import Slurm
from nbddp.capabilities.slurm.held_jobs import HeldJobs
from nbddp.capabilities.slurm.transport import SrunTransport
from nbddp.launch.options import LaunchSpec
from nbddp.pool.host_source import Progress


class SlurmNodes(RemoteNodes):
    """Nodes of other hosts whose agents srun starts."""

    @property
    def _jobs(self) -> HeldJobs:
        jobs: HeldJobs = self.pool.parts.of("slurm").jobs
        return jobs

    def where(self, spec: LaunchSpec) -> str:
        return (spec.slurm or Slurm()).line()

    def on(self, spec: LaunchSpec) -> str:
        return f"in Slurm ({self.where(spec)})"

    def places(self, spec: LaunchSpec, progress: Progress) -> list[NodePlace]:
        held = self._jobs.have(spec, spec.slurm or Slurm(), self.group.nodes[0].agent.home, progress)
        return [place for job in held for place in _of(job, spec)]

    def more(self, spec: LaunchSpec, nodes: int, progress: Progress) -> list[NodePlace]:
        home = self.group.nodes[0].agent.home
        return _of(self._jobs.more(spec, spec.slurm or Slurm(), nodes, home, progress), spec)

    def still_held(self) -> str:
        return self._jobs.still_held()

    def settled(self, spec: LaunchSpec) -> None:
        self._jobs.keep(spec)


def _of(held: Allocation, spec: LaunchSpec) -> list[NodePlace]:
    way = SrunTransport(held.job, held.addresses(), held.state, spec.python or sys.executable, spec.setup or "")
    return [NodePlace(host, way) for host in held.hosts]
