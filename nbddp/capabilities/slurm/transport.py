"""How the agent of a node of Slurm is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from nbddp.capabilities.hosts.names import Host
from nbddp.capabilities.hosts.transports import AGENT, Transport
from nbddp.capabilities.slurm import commands


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
