"""What `--sanitize` costs: steps of three equal models in turn, one recorded, two not; then whole runs.

Run by hand: `python tests/benchmarks/sanitizer.py [--rounds 30] [--steps 12] [--runs 10] [--nproc 2]`. The second plain
model is the null pair: what the same comparison gives where there is nothing to be seen. Every round builds the models
anew, in another order, since where a model lies in memory makes it faster or slower than its equal. Parameters of the
recorded model are compared bit by bit with those of a plain one. On a busy machine CPU time says more than time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.benchmarks.timings import RUN

CELL = """
import itertools, statistics, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
recorder = get_ipython().kernel.parts["sanitizer"]
orders = list(itertools.permutations(range(3)))
def build():
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(*[torch.nn.Linear(1000, 1000) for _ in range(10)]))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(16, 1000, generator=torch.Generator().manual_seed(dist.get_rank()))
found, same, step = [], True, []
for round in range({rounds}):
    models = dict(sorted((which, build()) for which in orders[round % 6]))
    times, work = [[], [], []], [[], [], []]
    for number in range(6 + {steps}):
        for which in orders[number % 6]:
            recorder.on = which == 0
            model, optimizer = models[which]
            began, worked = time.perf_counter(), time.process_time()
            optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
            times[which].append(time.perf_counter() - began)
            work[which].append(time.process_time() - worked)
    found.append([
        statistics.median(a / b for a, b in zip(each[i][6:], each[1][6:])) for each in (times, work) for i in (0, 2)
    ])
    same = same and all(torch.equal(p, q) for p, q in zip(models[0][0].parameters(), models[1][0].parameters()))
    step += times[1]
    del models, model, optimizer
recorder.on = True
dist.destroy_process_group()
(found, same, statistics.median(step))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=12, help="of each model in a round")
    parser.add_argument("--runs", type=int, default=10, help="whole runs of each kind")
    parser.add_argument("--nproc", type=int, default=2)
    asked = parser.parse_args()
    with WorkerPool(nproc=asked.nproc) as pool:
        cell = CELL.format(rounds=asked.rounds, steps=asked.steps)
        values = pool.run_cell(cell, sanitize=True, want_value=True, screen=NullScreen())
        for rank, (found, same, step) in enumerate(values):
            pairs = [statistics.median(each) for each in zip(*found, strict=True)]
            bits = "equal bit by bit" if same else "DIFFER"
            print(
                f"rank {rank}: a step of {1000 * step:.1f} ms; recorded {pairs[0] - 1:+.1%}, null pair "
                f"{pairs[1] - 1:+.1%}; of its CPU time {pairs[2] - 1:+.1%}, null pair {pairs[3] - 1:+.1%}; "
                f"parameters {bits}"
            )
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(asked.runs):
            for sanitize in times:
                value = pool.run_cell(RUN, sanitize=sanitize, want_value=True, screen=NullScreen())
                times[sanitize].append(max(value))
        plain, recorded = (statistics.median(times[sanitize]) for sanitize in (False, True))
        more = recorded / plain - 1
        print(f"whole runs: {1000 * plain:.1f} ms a step, with --sanitize {1000 * recorded:.1f} ms, {more:+.1%}")


if __name__ == "__main__":
    main()
