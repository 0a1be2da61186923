"""How often a rank is called slow that is not, and how often one is that is: many short recordings on one pool.

Run by hand, on a quiet machine and beside other work: `python tests/benchmarks/equal.py [--runs 300] [--planted 40]
[--nproc 2]`. Equal ranks train one of several small models for 3 to 100 steps; a run counts as wrong if `%ddp timings`
names a rank, and, counted by itself, if `%ddp timings --collectives` does (must be 1 % at most). Then one rank works
longer in one part of each step, by 10 % of a step for 30 steps and by 5 % for 100: the step is measured in the same
cell, with equal ranks, before the model that is recorded. It is right if that rank is named with that part.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import nbddp
from nbddp.analysis.cause import BACKWARD, FORWARD, OPTIMIZER
from nbddp.capabilities.timings.analysis import BETWEEN, verdict
from nbddp.output.screens import NullScreen
from tests import warm

CELL = """
import statistics, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
def burn(where):
    if where == {where!r} and dist.get_rank() == {rank}:
        end = time.thread_time() + more
        while time.thread_time() < end: pass
class Burn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        burn("backward")
        return gradient
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        width, relu = {width}, torch.nn.ReLU
        self.layers = torch.nn.Sequential(*[m for _ in range({depth}) for m in (torch.nn.Linear(width, width), relu())])
    def forward(self, x):
        burn("forward")
        return Burn.apply(self.layers(x))
def train(steps):
    model = DDP(Net())
    optimizer = {optimizer}(model.parameters(), lr=0.001)
    optimizer.register_step_pre_hook(lambda *_: burn("optimizer"))
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        burn("between steps")
        optimizer.zero_grad()
        model(torch.randn({batch}, {width})).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:] or times)
more = 0.0
if {share}:
    step = torch.tensor(train(30))
    dist.all_reduce(step, op=dist.ReduceOp.MAX)
    more = {share} * step.item()
train({steps})
dist.destroy_process_group()
"""
MODELS = [(64, 3, 16, "SGD"), (256, 4, 32, "SGD"), (200, 4, 32, "Adam"), (500, 3, 32, "SGD")]
PARTS = {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER, "between steps": BETWEEN}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300, help="of equal ranks")
    parser.add_argument("--planted", type=int, default=40, help="runs of each size of a planted delay")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    dice = random.Random(asked.seed)
    with warm.pool(asked.nproc) as pool:
        equal(pool, dice, asked.runs)
        for share, steps in ((0.1, 32), (0.05, 102)):
            planted(pool, dice, asked.planted, share, steps)
    warm.end()


def run(pool: nbddp.Pool, dice: random.Random, steps: int, share: float = 0.0, where: str = "", rank: int = -1) -> None:
    width, depth, batch, optimizer = dice.choice(MODELS)
    pool.run_cell(
        CELL.format(width=width, depth=depth, batch=batch, optimizer=f"torch.optim.{optimizer}", steps=steps,
                    share=share, where=where, rank=rank),
        screen=NullScreen(),
    )  # fmt: skip


def equal(pool: nbddp.Pool, dice: random.Random, runs: int) -> None:
    named, late, of = Counter[int](), Counter[int](), Counter[int]()
    for number in range(runs):
        steps = dice.choice([3, 10, 20, 32, 102])
        run(pool, dice, steps)
        of[steps] += 1
        found, met = verdict(pool.timings()), pool.collectives()
        if found is not None and found.slow is not None:
            named[steps] += 1
            print(f"  {steps} steps of equal ranks: {'; '.join(found.words())}", flush=True)
        if met.late is not None:
            late[steps] += 1
            print(f"  {steps} steps of equal ranks: {met.late} {met.why}", flush=True)
        if (number + 1) % 50 == 0 or number + 1 == runs:
            by = ", ".join(f"{named[s]} and {late[s]} of {of[s]} with {s} steps" for s in sorted(of))
            print(
                f"{number + 1} runs of equal ranks: timings named a rank in {named.total()}, collectives in "
                f"{late.total()} ({by})", flush=True,
            )  # fmt: skip


def planted(pool: nbddp.Pool, dice: random.Random, runs: int, share: float, steps: int) -> None:
    found, causes = Counter[str](), Counter[str]()
    for _ in range(runs):
        where, rank = dice.choice(list(PARTS)), dice.randrange(pool.placed().world_size)
        run(pool, dice, steps, share, where, rank)
        judged = verdict(pool.timings())
        slow = judged.slow if judged is not None else None
        if slow is None:
            found["missed"] += 1
        elif slow.rank != rank:
            found["another rank"] += 1
        else:
            found["named"] += 1
            right = slow.cause.what == PARTS[where]
            causes["right" if right else f"{slow.cause.what} for {where}"] += 1
    print(f"a rank that works {share:.0%} of a step longer, {steps} steps: {dict(found)}; causes: {dict(causes)}")


if __name__ == "__main__":
    main()
