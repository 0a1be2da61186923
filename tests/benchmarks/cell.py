"""Where the time of a cell goes, on this machine, now: side by side with %%px, and on as many ranks as a lesson has.

Run by hand: `python tests/benchmarks/cell.py [--rounds 20] [--ranks 4 64]`. Samples are taken in turn (ours, theirs, …)
where there is a ratio. CPU is what the kernel has counted for each process and for its main thread, so another process
on the same cores does not count. The medians of the wall clock are as good as the machine is quiet, so its load is
printed too.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.benchmarks.launch import STEP, cell, in_turn, px_kernel, seconds
from tests.kernels import Kernel

PID = "import os\nos.getpid()"
STAMPED = """
import time; _at = [time.time()]
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group()
_at.append(time.time()); model = DDP(torch.nn.Linear(64, 64))
_at.append(time.time()); loss = model(torch.randn(8, 64)).sum()
_at.append(time.time()); loss.backward()
_at.append(time.time()); dist.destroy_process_group()
_at.append(time.time()); _at
"""
PARTS = ("until all ranks are at work", "init", "DDP", "forward", "backward", "destroy", "until the cell has ended")
FAILS = "import os\nif os.environ['RANK'] == '3': raise ValueError('no')\n"
FAILURES = {
    "others pass": FAILS + "pass",
    "others run on": FAILS + "import time; time.sleep(60)",
    "others wait": FAILS + "dist.all_reduce(torch.ones(1))",
}
INIT = "import torch, torch.distributed as dist\ndist.init_process_group()\ndist.barrier()"
HANGS = "if dist.get_rank() != 1: dist.all_reduce(torch.ones(1))"

Cpu = dict[tuple[int, bool], int]  # process, and whether it is that one's main thread or all others → nanoseconds


def cpu(root: int) -> Cpu:
    """Of a process and all that descend from it."""
    found: Cpu = {}
    for process in (psutil.Process(root), *psutil.Process(root).children(recursive=True)):
        whole = time.clock_gettime_ns(~process.pid << 3 | 2)  # CLOCK_PROCESS_CPUTIME_ID of another
        main = int(Path(f"/proc/{process.pid}/task/{process.pid}/schedstat").read_text().split()[0])
        found |= {(process.pid, True): main, (process.pid, False): whole - main}
    return found


def table(
    kernel: Kernel,
    ranks: list[int],
    work: Callable[[], object],
    times: int,
    prepare: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Milliseconds of CPU that one cell takes: in the notebook's kernel (its main thread, all others), in a rank (their
    mean), in the rest, and in all. prepare: called before each, and not counted."""
    spent: dict[tuple[int, bool], float] = {}
    for _ in range(times):
        prepare()
        before = cpu(kernel.pid)
        work()
        for key, ns in cpu(kernel.pid).items():
            spent[key] = spent.get(key, 0.0) + (ns - before.get(key, 0)) / 1e6 / times
    main, others = spent[kernel.pid, True], spent[kernel.pid, False]
    of_ranks = sum(ms for (pid, _), ms in spent.items() if pid in ranks)
    rest = sum(ms for (pid, _), ms in spent.items() if pid not in (kernel.pid, *ranks))
    return {
        "notebook, main thread": main, "notebook, other threads": others, "a rank": of_ranks / len(ranks),
        "controller, store and agent": rest, "all": main + others + of_ranks + rest,
    }  # fmt: skip


def pids(kernel: Kernel, nproc: int) -> list[int]:
    cell(kernel, f"%%ddp -o found\n{PID}")
    return [int(n) for n in ast.literal_eval(cell(kernel, f"print([found[r] for r in range({nproc})])"))]


def px_pids(kernel: Kernel) -> list[int]:
    return [int(n) for n in ast.literal_eval(cell(kernel, "import os\nprint(rc[:].apply_sync(os.getpid))"))]


def beside_px(n: int, rounds: int) -> None:
    ours, theirs = Kernel(), px_kernel(n)
    cell(ours, f"%load_ext nbddp\n%ddp start --nproc {n}")
    works = [functools.partial(cell, ours, "%%ddp\npass"), functools.partial(cell, theirs, "%%px\npass")]
    for work in works:
        work()
    a, b = in_turn(rounds * 10, *(functools.partial(seconds, work) for work in works))
    print(f"pass on {n} ranks: {1000 * a:.1f} ms against %%px pass {1000 * b:.1f} ms, ratio {a / b:.2f} (≤ 0.8)")
    rows = [table(ours, pids(ours, n), works[0], 50), table(theirs, px_pids(theirs), works[1], 50)]
    for name in rows[0]:
        print(f"  ms of CPU, {name}: {rows[0][name]:.2f} against {rows[1][name]:.2f}")
    cell(theirs, "rc.cluster.stop_cluster_sync()")
    theirs.close()
    of_step(ours, n, rounds)
    ours.close()


def of_step(kernel: Kernel, n: int, rounds: int) -> None:
    """init, DDP step, destroy: the whole, and where in it the slowest rank is."""
    cell(kernel, f"%%ddp\n{STEP}")
    whole = statistics.median(seconds(lambda: cell(kernel, f"%%ddp\n{STEP}")) for _ in range(2 * rounds))
    print(f"init, DDP step, destroy on {n} ranks: {1000 * whole:.1f} ms (≤ 50)")
    spent = []
    for _ in range(rounds):
        began = time.time()
        cell(kernel, f"%%ddp -o found\n{STAMPED}")
        ended = time.time()
        stamps = ast.literal_eval(cell(kernel, f"print([found[r] for r in range({n})])"))
        parts = [max(row[i + 1] - row[i] for row in stamps) for i in range(len(stamps[0]) - 1)]
        spent.append([max(row[0] for row in stamps) - began, *parts, ended - max(row[-1] for row in stamps)])
    for name, column in zip(PARTS, zip(*spent, strict=True), strict=True):
        print(f"  {name}: {1000 * statistics.median(column):.1f} ms")


def told_and_ended(kernel: Kernel, source: str) -> tuple[float, float]:
    """Seconds until the front end says who has failed and why, and until the cell has ended with the whole report."""
    began = time.time()
    shown = kernel.run(f"%%ddp\n{source}")
    ended = time.time()
    return next(
        at for at, _, content in shown.messages if "rank 3 raised ValueError" in str(content)
    ) - began, ended - began


def many(n: int, rounds: int) -> None:
    """What is slow where the ranks are many more than the cores."""
    kernel = Kernel()
    cell(kernel, f"%load_ext nbddp\n%ddp start --nproc {n}")
    for _ in range(3):
        cell(kernel, "%%ddp\npass")

    def of(work: Callable[[], float], times: int) -> str:
        took = sorted(work() for _ in range(times))
        return f"{1000 * statistics.median(took):.0f} ms (least {1000 * took[0]:.0f})"

    pass_ = functools.partial(cell, kernel, "%%ddp\npass")
    print(f"pass on {n} ranks: {of(lambda: seconds(pass_), rounds)}")
    for name, ms in table(kernel, pids(kernel, n), pass_, 5).items():
        print(f"  ms of CPU, {name}: {ms:.2f}")

    def prepare(source: str) -> None:
        if "dist." in source:
            cell(kernel, f"%%ddp\n{INIT}")

    def failing(source: str, options: str = "") -> float:
        prepare(source)
        return seconds(lambda: kernel.run(f"%%ddp {options}\n{source}"))

    for name, source in FAILURES.items():
        both = []
        for _ in range(5):
            prepare(source)
            both.append(told_and_ended(kernel, source))
        seen, ended = (
            f"{1000 * statistics.median(c):.0f} ms (least {1000 * min(c):.0f})" for c in zip(*both, strict=True)
        )
        print(f"one of {n} ranks raises, {name}: seen after {seen}, the cell has ended after {ended}")
    rows = table(
        kernel,
        pids(kernel, n),
        lambda: kernel.run(f"%%ddp\n{FAILURES['others wait']}"),
        3,
        lambda: cell(kernel, f"%%ddp\n{INIT}"),
    )
    print("; ".join(f"{name} {ms:.1f}" for name, ms in rows.items()), "ms of CPU where they wait")
    for after in (1, 5):
        took = statistics.median(failing(HANGS, f"--hang-after {after}") for _ in range(3))
        print(f"deadlock of {n} ranks at --hang-after {after}: {took:.2f} s, {took - after:.2f} s later")
    kernel.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--ranks", type=int, nargs="+", default=[4, 64])
    asked = options.parse_args()
    for n in asked.ranks:
        print(f"load {os.getloadavg()[0]:.1f}", flush=True)
        if n <= 8:
            beside_px(n, asked.rounds)
        else:
            many(n, asked.rounds)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
