"""What the quiet line costs an ordinary DDP run: equal models step in turn, with the hook, without, and a null pair.

Run by hand: `python tests/benchmarks/hints.py [--rounds 20] [--steps 60] [--width 100]`. Then whole cells, with
the part and without, in turn. A small model shows a cost best: a step of ten layers of width 100 takes about 1 ms.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool

CELL = """
import itertools, statistics, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
hints = get_ipython().kernel.parts["hints"]
orders = list(itertools.permutations(range(3)))
def build():
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(*[torch.nn.Linear({width}, {width}) for _ in range(10)]))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(16, {width}, generator=torch.Generator().manual_seed(dist.get_rank()))
found, step, seen = [], [], 0
for round in range({rounds}):
    models = dict(sorted((which, build()) for which in orders[round % 6]))
    times, work = [[], [], []], [[], [], []]
    hints._watched.clear()
    for number in range(6 + {steps}):
        for which in orders[number % 6]:
            hints.on = which == 0
            model, optimizer = models[which]
            began, worked = time.perf_counter(), time.thread_time()
            optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
            times[which].append(time.perf_counter() - began)
            work[which].append(time.thread_time() - worked)
    seen += sum(each.steps for each in hints._watched.values())
    found.append([
        statistics.median(a / b for a, b in zip(each[i][6:], each[1][6:])) for each in (times, work) for i in (0, 2)
    ])
    step += times[1]
    del models, model, optimizer
hints.on = True
dist.destroy_process_group()
(found, statistics.median(step), seen)
"""
RUN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
get_ipython().kernel.parts["hints"].on &= {on}
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 8)); optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(16, 8)
for step in range(10): optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
dist.destroy_process_group()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60, help="of each model in a round")
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("--cells", type=int, default=30, help="whole cells of each kind")
    asked = parser.parse_args()
    with WorkerPool(nproc=2) as pool:
        cell = CELL.format(rounds=asked.rounds, steps=asked.steps, width=asked.width)
        values = pool.run_cell(cell, want_value=True, screen=NullScreen())
        for rank, (found, step, seen) in enumerate(values):
            pairs = [statistics.median(each) for each in zip(*found, strict=True)]
            print(
                f"rank {rank}: a step of {1000 * step:.2f} ms ({seen} seen); with the hook {pairs[0] - 1:+.1%}, null "
                f"pair {pairs[1] - 1:+.1%}; of its CPU time {pairs[2] - 1:+.1%}, null pair {pairs[3] - 1:+.1%}"
            )
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(asked.cells):
            for on in times:
                began = time.perf_counter()
                pool.run_cell(RUN.format(on=on), screen=NullScreen())
                times[on].append(time.perf_counter() - began)
        without, with_it = (1000 * statistics.median(times[on]) for on in (False, True))
        print(f"whole cells of ten steps: {without:.1f} ms without the part, {with_it:.1f} ms with it")


if __name__ == "__main__":
    main()
