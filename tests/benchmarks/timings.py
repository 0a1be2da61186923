"""What recording DDP's steps costs: steps of three equal models in turn, one recorded, two not.

Run by hand: `python tests/benchmarks/timings.py [--steps 150] [--nproc 2]`. The second plain model is the null
pair: what the same comparison gives where there is nothing to be seen.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import nbddp
from nbddp.draw.timings import timings
from nbddp.run.screen import Silent
from tests.test_timings import recording

CELL = """
import statistics, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
recorder = get_ipython().kernel.recorder
def build(on):
    recorder.on = on
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(*[torch.nn.Linear(1000, 1000) for _ in range(10)]))
    recorder.on = True
    return model, torch.optim.SGD(model.parameters(), lr=0.01)
models = [build(True), build(False), build(False)]
x = torch.randn(16, 1000, generator=torch.Generator().manual_seed(dist.get_rank()))
times = [[], [], []]
for step in range({steps}):
    for which in ((0, 1, 2) if step % 2 else (2, 1, 0)):
        model, optimizer = models[which]
        began = time.perf_counter()
        optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
        times[which].append(time.perf_counter() - began)
ratios = [statistics.median(a / b for a, b in zip(times[i][10:], times[1][10:])) for i in (0, 2)]
same = all(torch.equal(p, q) for p, q in zip(models[0][0].parameters(), models[1][0].parameters()))
dist.destroy_process_group()
(*ratios, same)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--nproc", type=int, default=2)
    asked = parser.parse_args()
    with nbddp.Pool(nproc=asked.nproc) as pool:
        found = list(pool.run_cell(CELL.format(steps=asked.steps), want_value=True, screen=Silent()))
    recorded, null = (statistics.mean(f[i] for f in found) for i in (0, 1))
    same = all(f[2] for f in found)
    print(f"a recorded step against a plain one: {recorded:.3f}; null pair {null:.3f}; same bits: {same}")
    made = recording(64, 1000)
    began = time.perf_counter()
    timings(made, 500).png()
    print(f"figure of 64 ranks and 1000 steps: {time.perf_counter() - began:.2f} s (must be under 2)")


if __name__ == "__main__":
    main()
