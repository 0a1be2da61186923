"""How a pool comes to nodes of Slurm."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from nbddp.capabilities.hosts.elastic import NodePlace
from nbddp.capabilities.hosts.names import Host
from nbddp.capabilities.hosts.remote_nodes import RemoteNodes
from nbddp.capabilities.hosts.transports import AGENT, Transport
from nbddp.capabilities.slurm import commands
from nbddp.capabilities.slurm.allocation import Allocation
from nbddp.capabilities.slurm.commands import Slurm
from nbddp.capabilities.slurm.held_jobs import HeldJobs
from nbddp.launch.options import LaunchSpec
from nbddp.pool.host_source import Progress


class SrunTransport(Transport):
    """By one srun for each node of a Slurm job. addresses: node → where others reach it."""

    name = "srun"
    survives = False

    def __init__(
        self, job: int, addresses: Mapping[str, str], state: Callable[[], str], python: str = "python3", setup: str = ""
    ):
        super().__init__(python, setup)
        self.job, self._addresses, self._state = job, addresses, state

    def command(self, host: Host, module: Sequence[str] = AGENT) -> list[str]:
        # one for each node: the lines of one srun for all mix. A step without --exact has all of the job's node.
        options = [f"--jobid={self.job}", f"--nodelist={host.name}", "--nodes=1", "--ntasks=1", "--overlap",
                   "--mpi=none", "--cpu-bind=none", "--unbuffered"]  # fmt: skip
        return ["srun", *options, *self.start(host, module)]

    def environment(self) -> dict[str, str]:
        return commands.outside(os.environ)

    def address(self, host: Host) -> str:
        return self._addresses.get(host.name, "")

    def failure(self, host: Host, code: int | None, said: str) -> str:
        gone = self.ended(host, said)
        if gone:
            return f"{host} cannot be reached: {gone}"
        if code is not None and "Unable to " in said:
            told = next(line for line in said.splitlines() if "Unable to " in line)
            return f"{host} cannot be reached: {told.strip()}; squeue -j {self.job} shows the job's state"
        return super().failure(host, code, said)

    def ended(self, host: Host, said: str) -> str:
        return commands.ended_words(self.job, said, self._state())


class SlurmNodes(RemoteNodes):
    """Nodes of other hosts whose agents srun starts."""

    @property
    def _jobs(self) -> HeldJobs:
        jobs: HeldJobs = self.pool.parts.of("slurm")
        return jobs

    def where(self, spec: LaunchSpec) -> str:
        return commands.line_of(spec.slurm or Slurm())

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
