"""What recording DDP's steps costs: steps of three equal models in turn, one recorded, two not; then whole runs.

Run by hand: `python tests/benchmarks/draw_timings.py [--rounds 60] [--steps 12] [--runs 30] [--nproc 2]`. The second
plain model is the null pair: what the same comparison gives where there is nothing to be seen. Where a model lies in
memory makes one faster than its equal by some percent, however many steps it takes: so every round builds the models
anew, in another order, and there are many rounds of few steps. In a round they take each place in the turn equally
often. A small model stands beside the large one: what is noted of a step is much the same in both, and a large part of
a short step only.

Whole runs answer another question: whether somebody who trains the large model once recorded and once not could tell
which is which. `--runs` times a recorded and two plain runs of one cell are made, in an order drawn anew, and each
gives the median of its steps. So two plain runs differ by their standard deviation, and by chance.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from nbddp.capabilities.timings.figure import draw_timings
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.pool.test_timings import recording

CELL = """
import itertools, statistics, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
recorder = get_ipython().kernel.parts["timings"]
orders = list(itertools.permutations(range(3)))
def build(on):
    recorder.on = on
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(*[torch.nn.Linear({width}, {width}) for _ in range(10)]))
    recorder.on = True
    return model, torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(16, {width}, generator=torch.Generator().manual_seed(dist.get_rank()))
found, same = [], True
for round in range({rounds}):
    models = dict(sorted((which, build(which == 0)) for which in orders[round % 6]))
    times = [[], [], []]
    for step in range(6 + {steps}):
        for which in orders[step % 6]:
            model, optimizer = models[which]
            began = time.perf_counter()
            optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
            times[which].append(time.perf_counter() - began)
    found.append([statistics.median(a / b for a, b in zip(times[i][6:], times[1][6:])) for i in (0, 2)])
    same = same and all(torch.equal(p, q) for p, q in zip(models[0][0].parameters(), models[1][0].parameters()))
    del models, model, optimizer
step = statistics.median(times[1])
dist.destroy_process_group()
(found, same, step)
"""
RUN = """
import statistics, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(1000, 1000) for _ in range(10)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(16, 1000, generator=torch.Generator().manual_seed(dist.get_rank()))
times = []
for step in range(26):
    began = time.perf_counter()
    optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
    times.append(time.perf_counter() - began)
dist.destroy_process_group()
del model, optimizer
statistics.median(times[6:])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--steps", type=int, default=12, help="of each model in a round; of the small model, five times"
    )
    parser.add_argument("--runs", type=int, default=30, help="whole runs of each kind")
    parser.add_argument("--nproc", type=int, default=2)
    asked = parser.parse_args()
    with WorkerPool(nproc=asked.nproc) as pool:
        for width, steps in ((1000, asked.steps), (100, 5 * asked.steps)):
            cell = CELL.format(width=width, steps=steps, rounds=asked.rounds)
            tell(width, list(pool.run_cell(cell, want_value=True, screen=NullScreen())))
        if asked.runs > 1:
            tell_runs(runs(pool, asked.runs))
    made = recording(64, 1000)
    began = time.perf_counter()
    draw_timings(made, 500).png()
    print(f"figure of 64 ranks and 1000 steps: {time.perf_counter() - began:.2f} s (must be under 2)")


def tell(width: int, found: list[Any]) -> None:
    """found: of each rank its rounds' two ratios, whether the parameters were the same, and seconds of a step."""
    rounds = [
        [statistics.mean(pair) for pair in zip(*ranks, strict=True)]
        for ranks in zip(*(f[0] for f in found), strict=True)
    ]
    print(f"ten layers of {width}: a plain step {1000 * found[0][2]:.1f} ms; same bits: {all(f[1] for f in found)}")
    for name, of in (("recorded", 0), ("null pair", 1)):
        ratios = sorted(100 * (r[of] - 1) for r in rounds)
        low, middle, high = statistics.quantiles(ratios)
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        mean = f"{statistics.mean(ratios):+.1f} ± {error:.1f} % on a plain step"
        spread = f"quartiles {low:+.1f} and {high:+.1f}, all {ratios[0]:+.1f} to {ratios[-1]:+.1f}"
        print(f"  {name}: {mean}; of the rounds' ratios the median {middle:+.1f}, {spread}")


def runs(pool: WorkerPool, count: int) -> dict[str, list[float]]:
    """Seconds of a step in whole runs."""
    found: dict[str, list[float]] = {"recorded": [], "plain": [], "plain too": []}
    drawn = random.Random(0)
    for _ in range(count):
        for kind in drawn.sample([*found], 3):
            steps = pool.run_cell(RUN, timings=kind == "recorded", want_value=True, screen=NullScreen())
            found[kind].append(statistics.mean(steps))
    return found


def tell_runs(found: dict[str, list[float]]) -> None:
    medians = ", ".join(f"{kind} {1000 * statistics.median(times):.1f} ms" for kind, times in found.items())
    print(f"whole runs of the large model, {len(found['plain'])} of each kind: medians {medians}")
    for one, other in (("plain too", "plain"), ("recorded", "plain"), ("recorded", "plain too")):
        pairs = zip(found[one], found[other], strict=True)
        ratios = [100 * math.log(a / b) for a, b in pairs]
        spread = statistics.stdev(ratios)
        mean = f"{statistics.mean(ratios):+.1f} ± {spread / len(ratios) ** 0.5:.1f} %"
        print(f"  {one} on {other}: {mean}; one pair's standard deviation {spread:.1f} %")


if __name__ == "__main__":
    main()
