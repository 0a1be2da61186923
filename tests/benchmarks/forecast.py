"""Is the forecast right? Latency and bandwidth are fitted on 2 ranks, the step of 4 is predicted, and then measured.

Run by hand: `python tests/benchmarks/forecast.py [--rounds 12]`. One run on one pool of four: the 2-rank all-reduces
are those of the group of ranks 0 and 1, while 2 and 3 wait in a barrier without using a core; rounds of
all parts alternate, so that whatever else the machine does meets each of them.

Two things are particular to ranks that share the cores of one machine, and are accounted for:
- What 4 ranks compute in a step is measured on 4 ranks without communication: the same model with a communication hook
  that sends nothing, so that DDP's copies into buckets are in it.
- gloo moves bytes with the cores. Where n ranks share c cores each has c/n of one, so the link fitted on 2 ranks is
  shared by max(1, 4/c) / max(1, 2/c) (`Link.shared`), and communication is not hidden: it takes the cores from
  backward.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from nbddp.analysis.quantities import duration, percent
from nbddp.capabilities.bench.result import Measured
from nbddp.capabilities.forecast.cost import LinkFit, better, fit, seconds
from nbddp.capabilities.forecast.figure import link
from nbddp.capabilities.forecast.scale import Predicted, Profile, predict
from nbddp.figures.table import Table
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool

MUST = 0.25  # of the measured step, on a quiet machine
CELL = """
import random, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
width, layers, batch, rounds, largest = {width}, {layers}, {batch}, {rounds}, {largest}
before = torch.get_num_threads()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, pair, now = dist.get_rank(), dist.new_group([0, 1]), time.perf_counter
sizes = [2**k for k in range(14, largest + 1)]
buffers = {{s: torch.zeros(s // 4) for s in sizes}}
two, four = {{s: [] for s in sizes}}, {{s: [] for s in sizes}}
def timed(into, action, group=None):
    dist.barrier(group)
    began = now()
    action()
    into.append(now() - began)
def nothing(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
def build():
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    return DDP(net, gradient_as_bucket_view=True)
model, mute = build(), build()
mute.register_comm_hook(None, nothing)
x = torch.randn(batch, width)
def step(which):
    which(x).sum().backward()
    which.zero_grad(set_to_none=False)
for _ in range(3):
    step(model); step(mute)
computes, steps = [], []
order = random.Random(0)
for _ in range(rounds):
    order.shuffle(sizes)
    for s in sizes:
        if rank < 2:
            timed(two[s], lambda: dist.all_reduce(buffers[s], group=pair), pair)
    for s in sizes:
        timed(four[s], lambda: dist.all_reduce(buffers[s]))
    for _ in range(2):
        timed(computes, lambda: step(mute))
        timed(steps, lambda: step(model))
buckets = [int(b) for b in model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")]
dist.destroy_process_group()
torch.set_num_threads(before)
two, four, computes, steps, buckets
"""


@dataclass(frozen=True)
class Validation:
    """fits: of the 2-rank all-reduces. compute, step: measured on 4 ranks, seconds. predicted: the step from these.
    communication: the measured all-reduces of the buckets' sizes on 4 ranks alone, seconds. unshared: the step as it
    would be predicted if the 4 ranks did not share the cores, which shows what that assumption does."""

    two: list[Measured]
    four: list[Measured]
    chosen: LinkFit
    buckets: tuple[int, ...]
    compute: float
    step: float
    predicted: Predicted
    communication: float
    unshared: float

    @property
    def ratio(self) -> float:
        """Predicted step / measured step."""
        return self.predicted.step / self.step


def validate(
    pool: WorkerPool, *, width: int = 2048, layers: int = 4, batch: int = 2, rounds: int = 12, largest: int = 25
) -> Validation:
    """Measure on a pool of four; all-reduces of 16 KiB to 2**largest bytes."""
    code = CELL.format(width=width, layers=layers, batch=batch, rounds=rounds, largest=largest)
    found = list(pool.run_cell(code, want_value=True, timings=False, screen=NullScreen()))
    two, four = _measured([f[0] for f in found[:2]]), _measured([f[1] for f in found])
    compute, step = (statistics.median(_slowest([f[i] for f in found])) for i in (2, 3))
    buckets = found[0][4]
    chosen, _ = better(fit(two))
    cores = len(os.sched_getaffinity(0))
    shared = chosen.link.shared(max(1, 4 / cores) / max(1, 2 / cores))

    def cost(count: float) -> float:
        return seconds(chosen.algorithm, "all_reduce", 4, count, shared)

    what = Profile(0.0, compute, 0.0, tuple((compute, b) for b in buckets), 4, step)
    predicted = predict(what, 4, cost, overlapped=False)
    communication = sum(_near(four, b) for b in buckets)
    unshared = compute + sum(seconds(chosen.algorithm, "all_reduce", 4, b, chosen.link) for b in buckets)
    return Validation(two, four, chosen, tuple(buckets), compute, step, predicted, communication, unshared)


def _slowest(times: Sequence[Sequence[float]]) -> list[float]:
    """Of each repetition the rank that took longest."""
    return [max(row) for row in zip(*times, strict=True)]


def _measured(by_rank: Sequence[Mapping[int, Sequence[float]]]) -> list[Measured]:
    ranks = len(by_rank)
    return [
        Measured("all_reduce", size, ranks, tuple(_slowest([times[size] for times in by_rank])))
        for size in sorted(by_rank[0])
    ]


def _near(some: Sequence[Measured], count: int) -> float:
    """Seconds of the measured size that is nearest, in proportion."""
    nearest = min(some, key=lambda m: max(m.bytes, count) / min(m.bytes, count))
    return nearest.median * count / nearest.bytes


def table(found: Validation) -> Table:
    parts: list[tuple[str, Any, Any, float]] = [
        ("all-reduces of the buckets", found.predicted.communication, found.communication,
         found.predicted.communication / found.communication),
        ("step", found.predicted.step, found.step, found.ratio),
        ("step, were cores not shared", found.unshared, found.step, found.unshared / found.step),
    ]  # fmt: skip
    rows = [(name, duration(a), duration(b), f"{ratio:.2f}") for name, a, b, ratio in parts]
    return Table(("on 4 ranks", "predicted from 2", "measured", "ratio"), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    asked = parser.parse_args()
    with WorkerPool(nproc=4) as pool:
        found = validate(pool, rounds=asked.rounds)
    print(
        f"fitted on 2 ranks: {link(found.chosen.link)} by {found.chosen.algorithm}, error {percent(found.chosen.error)}"
    )
    print(
        f"{len(found.buckets)} buckets of {sum(found.buckets) >> 20} MiB; compute on 4 ranks {duration(found.compute)}"
    )
    print(table(found))
    good = abs(found.ratio - 1) <= MUST
    print(f"the step is {percent(abs(found.ratio - 1))} off; must be within {percent(MUST)} on a quiet machine; load "
          f"{os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
