"""What `--check` costs: an all_reduce of four numbers, checked and not, in turn on one pool.

Run by hand: `python tests/benchmarks/check.py [--rounds 5] [--nproc 2]`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool

CELL = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.ones(4)
for _ in range(20): dist.all_reduce(t)
began = time.perf_counter()
for _ in range(300): dist.all_reduce(t)
seconds = (time.perf_counter() - began) / 300
dist.destroy_process_group()
seconds
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nproc", type=int, default=2)
    asked = parser.parse_args()
    times: dict[bool, list[float]] = {False: [], True: []}
    with WorkerPool(nproc=asked.nproc) as pool:
        for _ in range(asked.rounds):
            for check in times:
                times[check] += [max(pool.run_cell(CELL, check=check, want_value=True, screen=NullScreen()))]
    plain, checked = (1000 * statistics.median(times[check]) for check in (False, True))
    print(f"all_reduce on {asked.nproc} ranks: {plain:.2f} ms, checked {checked:.2f} ms, ratio {checked / plain:.1f}")


if __name__ == "__main__":
    main()
