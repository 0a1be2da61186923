"""How often a rank is called slow that is not, and how often one is that is: many short recordings on one pool.

Run by hand, on a quiet machine and beside other work: `python tests/benchmarks/equal.py [--runs 300] [--planted 40]
[--nproc 2]`. Equal ranks train one of several small models for 3 to 100 steps; a run counts as wrong if `%ddp timings`
names a rank, and, counted by itself, if `%ddp timings --collectives` does (must be 1 % at most). Then one rank works
longer in one part of each step, by 10 % of a step for 30 steps and by 5 % for 100. How long a step lasts depends on
what else runs, so the delay follows the last steps. It is right if that rank is named with that part.

`--keep FILE` keeps what was recorded, and `--judge FILE…` judges that again, after a change of the test.
"""

from __future__ import annotations

import argparse
import pickle
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from nbddp.analysis.cause import BACKWARD, FORWARD, OPTIMIZER
from nbddp.analysis.steps import Recording
from nbddp.capabilities.timings.analysis import BETWEEN, verdict
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests import warm

CELL = """
import collections, statistics, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
def burn(where):
    if where == {where!r} and dist.get_rank() == {rank}:
        end = time.thread_time() + {share} * step
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
    global step
    model = DDP(Net())
    optimizer = {optimizer}(model.parameters(), lr=0.001)
    optimizer.register_step_pre_hook(lambda *_: burn("optimizer"))
    began = time.perf_counter()
    for _ in range(steps):
        burn("between steps")
        optimizer.zero_grad()
        model(torch.randn({batch}, {width})).square().mean().backward()
        optimizer.step()
        began, before = time.perf_counter(), began
        times.append((began - before) / (1 + {share}))
        step = statistics.median(times)
step, times = 0.0, collections.deque(maxlen=10)
if {share}: train(12)
train({steps})
dist.destroy_process_group()
"""
MODELS = [(64, 3, 16, "SGD"), (256, 4, 32, "SGD"), (200, 4, 32, "Adam"), (500, 3, 32, "SGD")]
PARTS = {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER, "between steps": BETWEEN}


@dataclass(frozen=True)
class Run:
    """What was recorded, and the delay planted in it: a share of a step, in one part, on one rank."""

    steps: int
    share: float
    where: str
    rank: int
    recording: Recording


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300, help="of equal ranks")
    parser.add_argument("--planted", type=int, default=40, help="runs of each size of a planted delay")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="file for what is recorded")
    parser.add_argument("--judge", type=Path, nargs="+", default=(), help="files of --keep")
    asked = parser.parse_args()
    kept = [run for file in asked.judge for run in pickle.loads(file.read_bytes())] or record(asked)
    if asked.keep:
        asked.keep.write_bytes(pickle.dumps(kept))
    judge(kept)


def record(asked: argparse.Namespace) -> list[Run]:
    dice = random.Random(asked.seed)
    with warm.pool(asked.nproc) as pool:
        kept = equal(pool, dice, asked.runs)
        for share, steps in ((0.1, 32), (0.05, 102)):
            kept += planted(pool, dice, asked.planted, share, steps)
    warm.end()
    return kept


def run(pool: WorkerPool, dice: random.Random, steps: int, share: float = 0.0, where: str = "", rank: int = -1) -> Run:
    width, depth, batch, optimizer = dice.choice(MODELS)
    pool.run_cell(
        CELL.format(width=width, depth=depth, batch=batch, optimizer=f"torch.optim.{optimizer}", steps=steps,
                    share=share, where=where, rank=rank),
        screen=NullScreen(),
    )  # fmt: skip
    return Run(steps, share, where, rank, pool.timings())


def equal(pool: WorkerPool, dice: random.Random, runs: int) -> list[Run]:
    kept, late = [], 0
    for _ in range(runs):
        kept.append(run(pool, dice, dice.choice([3, 10, 20, 32, 102])))
        met = pool.collectives()
        if met.late is not None:
            late += 1
            print(f"  {kept[-1].steps} steps of equal ranks: {met.late} {met.why}", flush=True)
    print(f"collectives named a rank in {late} of {runs} runs of equal ranks")
    return kept


def planted(pool: WorkerPool, dice: random.Random, runs: int, share: float, steps: int) -> list[Run]:
    ranks = pool.placed().world_size
    return [run(pool, dice, steps, share, dice.choice(list(PARTS)), dice.randrange(ranks)) for _ in range(runs)]


def judge(kept: Sequence[Run]) -> None:
    """What `%ddp timings` says of these runs."""
    for share, steps in sorted({(run.share, run.steps) for run in kept}):
        found, causes = Counter[str](), Counter[str]()
        for one in (run for run in kept if (run.share, run.steps) == (share, steps)):
            judged = verdict(one.recording)
            slow = judged.slow if judged is not None else None
            if slow is None:
                found["no rank"] += 1
            elif slow.rank == one.rank:
                found["the rank"] += 1
                right = slow.cause.what == PARTS[one.where]
                causes["right" if right else f"{slow.cause.what} for {one.where}"] += 1
            else:
                found["another rank" if share else "a rank"] += 1
                print(f"  {share:.0%} {one.where}, {steps} steps: {'; '.join(slow.describe())}")
        print(f"{share:.0%} of a step planted, {steps} steps: named {dict(found)}, causes {dict(causes)}")


if __name__ == "__main__":
    main()
