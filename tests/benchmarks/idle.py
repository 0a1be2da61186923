"""What a pool costs that does nothing: memory and CPU time of each kind of process.

python tests/benchmarks/idle.py [WORKERS ...] [--seconds S]
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict

import psutil

from nbddp.pool.pool import WorkerPool


def processes() -> dict[str, list[psutil.Process]]:
    """The processes that this one has started, by what they are. A worker's has a rank."""
    found = defaultdict(list)
    for process in psutil.Process().children(recursive=True):
        words = " ".join(process.cmdline())
        kind = "controller" if "controller" in words else "agent" if "agent" in words else "other"
        found[kind].append(process)
    return found


def memory(process: psutil.Process) -> float:
    return float(process.memory_full_info().pss) / 2**20


def cpu(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def measure(workers: int, seconds: float) -> None:
    before = memory(psutil.Process())
    with WorkerPool(nproc=workers, oversubscribe=True) as pool:
        pool.start()
        pool.run_cell("import torch")
        time.sleep(3)
        ranks = set(pool.run(os.getpid))
        kinds = processes()
        all_of = [p for group in kinds.values() for p in group]
        of_ranks = [p for p in all_of if p.pid in ranks]
        others = [p for p in all_of if p.pid not in ranks]
        began = {p: cpu(p) for p in [*all_of, psutil.Process()]}
        time.sleep(seconds)
        used = {p: cpu(p) - began[p] for p in began}
        print(
            f"{workers} workers: {sum(map(memory, of_ranks)):.0f} MiB in all workers, "
            f"{sum(map(memory, others)):.0f} MiB in {len(others)} other processes, "
            f"the notebook's own process {memory(psutil.Process()) - before:+.0f} MiB"
        )
        print(
            f"  CPU: {100 * sum(used[p] for p in of_ranks) / seconds:.2f} % of a core in all workers, "
            f"{100 * sum(used[p] for p in others) / seconds:.2f} % in the others, "
            f"{100 * used[psutil.Process()] / seconds:.2f} % in the notebook's own"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workers", nargs="*", type=int, default=[2, 8])
    parser.add_argument("--seconds", type=float, default=20)
    options = parser.parse_args()
    for number in options.workers:
        measure(number, options.seconds)
