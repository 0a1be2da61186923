"""A thousand cells with random faults and Stops on one pool: what is lost, what is left, what grows.

Run by hand: `python tests/benchmarks/soak.py [--cells 1000] [--nproc 4] [--seed 1] [--figures 5]`. Every cell prints a
numbered line on every rank before its fault, and every rank counts its cells; after each cell names, output and
counts are compared with what must be. After each so many cells (`--figures`) a model is trained and timings, memory
and topology are drawn and kept, as a notebook's `Out` keeps them. The last line gives the counts.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
import nbddp
from nbddp.analysis.wait_time import typical
from nbddp.capabilities.memory.figure import draw_memory
from nbddp.capabilities.timings.figure import draw_timings
from nbddp.capabilities.topology.figure import draw_topology
from nbddp.figures.figure import DescribedFigure
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.pool.faults import CALLS, SET_UP, StopWhenReady, cases
from tests.processes import still_running

COUNT = (
    "import os; kept = globals().get('kept', 0) + 1; print('cell', {number}, 'rank', os.environ['RANK'], flush=True)\n"
)

TRAIN = """
import torch, torch.distributed as dist
if dist.is_initialized(): dist.destroy_process_group()
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    model(torch.randn(8, 100)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def proportional(process: psutil.Process) -> float:
    """MiB of a process, shared pages in proportion."""
    return float(process.memory_full_info().pss / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--figures", type=int, default=5, help="cells between figures; 0: none")
    asked = parser.parse_args()
    dice = random.Random(asked.seed)
    choices = list(cases())
    tally: dict[str, int] = {}
    lost_output = lost_names = reported = 0
    slowest = 0.0
    kept: list[DescribedFigure] = []
    with WorkerPool(nproc=asked.nproc) as pool:
        expected = [0] * asked.nproc
        in_use: list[tuple[float, float]] = []
        assert pool.agent is not None
        agent = psutil.Process(pool.agent.hello.pid)
        for number in range(1, asked.cells + 1):
            call, fault = ("", "") if dice.random() < 0.3 else dice.choice(choices)
            body = SET_UP.format(fault=fault) + CALLS[call] if call else "pass"
            ended, took = run(pool, COUNT.format(number=number) + body)
            slowest = max(slowest, took)
            tally[ended] = tally.get(ended, 0) + 1
            for rank in range(asked.nproc):
                expected[rank] += 1
                if f"cell {number} rank {rank}\n" not in printed(pool, rank):
                    lost_output += 1
                    print(f"cell {number}: no line of rank {rank} ({call}, {fault}, {ended})", flush=True)
            gone = [r for r, e in pool.last_run.ended.items() if e.status in ("died", "replaced")]  # type: ignore[union-attr]
            reported += len(gone)
            for rank in gone:
                expected[rank] = 0
            pool.ensure(LaunchSpec())
            found = list(pool.run_cell("globals().get('kept', 0)", want_value=True, screen=NullScreen()))
            lost_names += sum(f != e for f, e in zip(found, expected, strict=True))
            expected = found
            if asked.figures and number % asked.figures == 0:
                kept += figures(pool)
            if number % max(1, asked.cells // 10) == 0:
                in_use.append((proportional(agent), proportional(psutil.Process())))
                print(
                    f"{number} cells, {len(kept)} figures: agent {in_use[-1][0]:.0f}, kernel {in_use[-1][1]:.0f} MiB",
                    flush=True,
                )
        family = agent.children(recursive=True)
        home = pool.agent.home
    left = len(still_running([agent, *family])) + home.exists()
    print(", ".join(f"{how}: {count}" for how, count in sorted(tally.items())), f"slowest {slowest:.1f} s")
    growth = [in_use[-1][i] - in_use[0][i] for i in (0, 1)]
    print(
        f"{asked.cells} cells on {asked.nproc} ranks: {lost_output} lines lost, {lost_names} names lost beyond the "
        f"{reported} reported, {left} processes left, memory {growth[0]:+.0f} MiB agent {growth[1]:+.0f} MiB kernel"
    )


def figures(pool: WorkerPool) -> list[DescribedFigure]:
    """As `%ddp draw_timings`, `%ddp draw_memory` and `%ddp draw_topology` show them."""
    pool.run_cell(TRAIN, screen=NullScreen())
    recording = pool.timings()
    drawn = [draw_timings(recording, typical(recording) or 0), draw_memory(pool.memory()), draw_topology(pool.placed())]
    for shown in drawn:
        shown.draw()
        shown._repr_mimebundle_()
    return drawn


def run(pool: WorkerPool, code: str) -> tuple[str, float]:
    began = time.monotonic()
    try:
        pool.run_cell(code, screen=StopWhenReady(), hang_after=0.3)
    except nbddp.RunFailed as error:
        return type(error).__name__, time.monotonic() - began
    return "ok", time.monotonic() - began


def printed(pool: WorkerPool, rank: int) -> str:
    run: Any = pool.last_run
    log = run.outputs[rank].log
    return log.read_text() if os.path.exists(log) else ""


if __name__ == "__main__":
    main()
