"""Draws the pictures of the gallery that need no measurement: recorded facts of machines, made-up recordings.

`python -m docs.gallery` from the checkout's root writes them beside this file. Those of real runs (timings.png,
bench.png, memory.png and those in looks/) are made by `python -m tests.looks --gallery`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from nbddp.analysis.placement import planned
from nbddp.analysis.steps import Bucket, Recording, Step
from nbddp.analysis.wait_time import typical
from nbddp.capabilities.bench.result import Measured
from nbddp.capabilities.collectives.figure import draw_program
from nbddp.capabilities.collectives.program import program
from nbddp.capabilities.forecast.cost import Link, seconds
from nbddp.capabilities.forecast.figure import draw_forecast
from nbddp.capabilities.forecast.scale import forecast
from nbddp.capabilities.memory.figure import draw_memory
from nbddp.capabilities.memory.parts import RankMemory
from nbddp.capabilities.timings.figure import draw_timings
from nbddp.capabilities.topology.figure import draw_topology
from nbddp.figures.figure import DescribedFigure
from nbddp.launch.machine import Interface
from nbddp.launch.topology import Topology
from tests.handmade import ENGINE, MAIN, NCCL_STREAM, Made, merged
from tests.machines import nvswitch_machine
from tests.pool.test_topology import cpu, host_of

HERE = Path(__file__).parent
MS = 1_000_000
NVLINK = Link(6e-6, 220e9)


def recording(ranks: int, per_node: int, steps: int = 40, late: int = 3) -> Recording:
    """A training of 360 M parameters in buckets of 25 MB on 8-GPU nodes, with a rank that comes late."""
    dice = random.Random(1)
    link = NVLINK if ranks <= per_node else Link(2e-5, 20e9)
    sizes = [1 << 20, *[25 << 20] * 12]
    names = [f"layers.{23 - 2 * i}" for i in range(len(sizes))]
    steps_of: dict[int, list[Step]] = {r: [] for r in range(ranks)}
    free = [0.0] * ranks
    for number in range(steps):
        slow = {r: (1.08 if r == late else 1.0) * dice.uniform(0.99, 1.01) for r in range(ranks)}
        begins = dict(enumerate(free))
        starts = {r: begins[r] + 9.0 * slow[r] for r in range(ranks)}
        ends = {r: starts[r] + 21.0 * slow[r] for r in range(ranks)}
        buckets: dict[int, list[Bucket]] = {r: [] for r in range(ranks)}
        network = 0.0
        for i, size in enumerate(sizes):
            ready = {r: starts[r] + 21.0 * slow[r] * (i + 1) / len(sizes) for r in range(ranks)}
            network = max(network, *ready.values()) + 1e3 * seconds("ring", "all_reduce", ranks, size, link)
            for r in range(ranks):
                at = [int(t * MS) for t in (ready[r], ready[r], network + dice.uniform(0.01, 0.05))]
                buckets[r].append(Bucket(i, size, *at, (f"{names[i]}.mlp.weight", f"{names[i]}.attention.weight")))
        for r in range(ranks):
            done = max(int(ends[r] * MS), buckets[r][-1].done)
            free[r] = done / MS + 2.5
            times = (int(starts[r] * MS), int(ends[r] * MS), done)
            spans = (int(begins[r] * MS), times[0]), times, (times[2], int(free[r] * MS))
            steps_of[r].append(Step(number, *spans, tuple(buckets[r]), True, number == 0, number == 1))
    return Recording(steps_of, residual=0 if ranks <= per_node else 2_000, model="GPT-2 medium")


def of_timings(ranks: int) -> DescribedFigure:
    made = recording(ranks, 8)
    number = typical(made)
    assert number is not None
    return draw_timings(made, number)


def of_program(late: int = 5, steps: int = 6) -> DescribedFigure:
    """Eight GPUs that shard a model by FSDP2, one of which gets longer sequences."""
    ranks, at = [Made() for _ in range(8)], dict.fromkeys(range(8), 0)
    dice = random.Random(2)

    def together(name: str, call: str, kernel: str, took: int) -> dict[int, int]:
        done = max(at.values()) + took
        for rank, made in enumerate(ranks):
            line = 2 if name == "all_gather" else 3
            made.called(call, f"nccl:{name}", at[rank] - 30, at[rank] - 20, place=(3, line))
            made.kernel(kernel, at[rank], done, launched=at[rank] - 25, stream=NCCL_STREAM)
        return dict.fromkeys(at, done)

    for _ in range(steps):
        at = {r: t + 400 + dice.randrange(40) for r, t in at.items()}
        for rank, made in enumerate(ranks):
            made.memcpy("Memcpy HtoD (Pinned -> Device)", at[rank] - 120, at[rank] - 60)
        at = together("all_gather", "_allgather_base_", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 350)
        for phase, took in (("forward", 1200), ("backward", 2400)):
            for rank, made in enumerate(ranks):
                end = at[rank] + int(took * dice.uniform(0.99, 1.01) * (1.3 if rank == late else 1))
                begin = at[rank] - 15
                if phase == "backward":
                    made.span("autograd::engine::evaluate_function: MmBackward0", begin, begin + 10, ENGINE)
                thread = ENGINE if phase == "backward" else MAIN
                made.kernel(f"flash_{phase[:3]}_kernel", at[rank], end - 500, launched=begin + 2, thread=thread)
                made.kernel("cutlass::gemm_bf16_kernel", end - 500, end, launched=begin + 4, thread=thread)
                at[rank] = end
        at = together("reduce_scatter", "_reduce_scatter_base_", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL()", 400)
        for rank, made in enumerate(ranks):
            made.annotation("Optimizer.step#AdamW.step", at[rank] - 10, at[rank])
            made.kernel("multi_tensor_apply_kernel", at[rank], at[rank] + 300, launched=at[rank] - 5)
            at[rank] += 300
    return draw_program(program(merged(*ranks).data["traceEvents"]))


def cluster(count: int) -> Topology:
    """Equal nodes of eight GPUs on NVSwitches, joined by a network."""
    host = replace(host_of(nvswitch_machine()), interface=Interface("eth0", 25_000))
    return Topology.plan([replace(host, index=i, host=f"host{i}") for i in range(count)], nnodes=count)


def of_forecast() -> DescribedFigure:
    measured = [
        Measured("all_reduce", 1 << k, n, (seconds("ring", "all_reduce", n, 1 << k, NVLINK) * (1 + 0.01 * (k % 3)),))
        for n in (4, 8)
        for k in range(12, 27)
    ]
    return draw_forecast(forecast(recording(8, 8), measured, inter_node=25e9, latency=1e-5, ranks_per_node=8))


def of_memory() -> DescribedFigure:
    gib = 1 << 30
    parts = {"parameters": 6 * gib, "buffers": 1 << 20, "gradients": 6 * gib, "optimizer": 12 * gib, "buckets": 6 * gib}
    return draw_memory([RankMemory(rank=r, kind="cuda", **parts, peak=30 * gib + (16 + r) * gib) for r in range(16)])


PICTURES = {
    "topology": lambda: draw_topology(planned(nnodes=2, gpus_per_node=4, gpus_per_proc=2)),
    "topology-nvlink": lambda: draw_topology(cluster(1)),
    "topology-2-nodes": lambda: draw_topology(cluster(2)),
    "topology-16-nodes": lambda: draw_topology(cluster(16)),
    "topology-cpu": lambda: draw_topology(cpu(8, 1, nproc=2)),
    "timings-8": lambda: of_timings(8),
    "timings-16": lambda: of_timings(16),
    "program": of_program,
    "forecast-nvlink": of_forecast,
    "memory-16": of_memory,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        draw().save(HERE / f"{name}.png")
