"""Lesson 11's explorer: a layout on paper, and its start on a cluster. Pure: plans and text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbddp.analysis.placement import planned
from nbddp.capabilities.export.sbatch import sbatch_script
from nbddp.capabilities.export.torchrun_line import C10D, SRUN, STATIC, Launch, torchrun_line
from nbddp.errors import several
from nbddp.launch.topology import Topology

NCCL, GLOO = "nccl", "gloo"
FOUND = {
    C10D: "c10d: the line is the same on every node; the nodes agree on which of them is node 0",
    STATIC: "static: the lines differ only in --node-rank; node 0 is the host in --master-addr",
    SRUN: "srun: no torchrun; Slurm starts every process and sets its own variables",
}


@dataclass(frozen=True)
class LaunchPlan:
    """A layout and its launch."""

    placed: Topology
    launch: Launch

    def lines(self) -> list[tuple[tuple[int, ...], str]]:
        """What starts the processes of which nodes: equal lines once, with all nodes that they are for."""
        found: dict[str, list[int]] = {}
        for node in range(self.launch.nnodes):
            found.setdefault(self._line(node), []).append(node)
        return [(tuple(nodes), line) for line, nodes in found.items()]

    def _line(self, node: int) -> str:
        if self.launch.rendezvous != SRUN:
            return torchrun_line(self.launch, node)
        group = self.placed.on_node(node)
        return (
            f"SLURM_NODEID={node}  SLURM_PROCID={_span([w.rank for w in group])}  "
            f"SLURM_LOCALID={_span([w.local_rank for w in group])}  SLURM_NTASKS={self.placed.world_size}"
        )

    def program(self) -> tuple[str, ...]:
        """The lines of the program that depend on the backend."""
        if self.launch.backend == GLOO:
            return ('dist.init_process_group("gloo")', "model = DDP(model)")
        return (
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
            'dist.init_process_group("nccl")',
            'model = DDP(model, device_ids=[int(os.environ["LOCAL_RANK"])])',
        )

    def sbatch(self) -> str:
        return sbatch_script(self.launch)

    def verdict(self) -> str:
        """How the ranks find each other, in a sentence."""
        if self.launch.nnodes == 1 and self.launch.rendezvous != SRUN:
            return "one node: nothing to agree on; --standalone chooses a free port"
        return FOUND[self.launch.rendezvous]

    def describe(self) -> str:
        starts = [f"{where(nodes)}: {line}" for nodes, line in self.lines()]
        program = ["in the program:", *(f"  {line}" for line in self.program())]
        batch = ["the batch script:", *(f"  {line}".rstrip() for line in self.sbatch().splitlines())]
        return "\n".join([self.placed.equation(), self.verdict(), *starts, *program, *batch])


def where(nodes: Sequence[int]) -> str:
    """`on node 0`, `on nodes 0–3`."""
    return f"on {several('node', nodes)}"


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}…{numbers[-1]}"


def plan_launch(nodes: int = 2, processes: int = 4, backend: str = NCCL, rendezvous: str = C10D) -> LaunchPlan:
    """`nodes` nodes with `processes` processes each: a GPU for each under nccl, none under gloo."""
    gpus = processes if backend == NCCL else 0
    placed = planned(nnodes=nodes, gpus_per_node=gpus, nproc=processes)
    return LaunchPlan(
        placed, Launch(nnodes=nodes, nproc=processes, gpus_per_proc=int(bool(gpus)), rendezvous=rendezvous)
    )
