"""`--max-restarts 1`, a hundred times: a random rank raises in the first attempt, and the second must end well.

Run by hand: `python tests/benchmarks/restarts.py [--times 100] [--nproc 4]`. The last line gives the count.
With `--kernels 5` it restarts kernels instead: from `%load_ext nbddp` to the end of the first DDP step on two ranks in
a new kernel, after a restart under `--keep-warm`, and under torchrun, in turn; medians and their ratios.
With `--launches 5` it launches a script with one all-reduce from a terminal, from prompt to prompt: `python -m nbddp
run` without a warm process, with one, and torchrun, in turn; seconds, CPU seconds and their ratios. Bytecode is
written, as of an installed package.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import nbddp
from nbddp.capabilities.warm import client
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.benchmarks.launch import STEP, cell, seconds, torchrun
from tests.kernels import Kernel

CELL = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = DDP(torch.nn.Linear(4, 4))
if attempt == 0 and rank == {culprit}: raise ValueError("first attempt")
model(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
attempt
"""


def first_step(kernel: Kernel) -> float:
    """Seconds from `%load_ext` to the end of the first DDP step; the kernel has done nothing else."""
    return seconds(lambda: (cell(kernel, "%load_ext nbddp"), cell(kernel, f"%%ddp --nproc 2\n{STEP}")))


def cold() -> float:
    kernel = Kernel()
    try:
        return first_step(kernel)
    finally:
        kernel.close()


@contextlib.contextmanager
def restarted() -> Iterator[Callable[[], float]]:
    """A function that restarts a kernel under `--keep-warm` and takes its time."""
    kernel = Kernel()
    first_step(kernel)
    cell(kernel, "%ddp start --keep-warm 10m")

    def again() -> float:
        kernel.manager.restart_kernel()
        kernel.client.wait_for_ready(timeout=60)
        assert len(client.waiting()) == 1, "the warm process was not kept"
        return first_step(kernel)

    try:
        yield again
        cell(kernel, "%ddp stop")
    finally:
        kernel.close()


def of_kernels(rounds: int) -> None:
    os.environ["NBDDP_RUNTIME_DIR"] = tempfile.mkdtemp()
    ways: dict[str, list[float]] = {"cold": [], "kept warm": [], "torchrun": []}
    with restarted() as again:
        for _ in range(rounds):
            for name, work in (("cold", cold), ("kept warm", again), ("torchrun", under_torchrun)):
                ways[name].append(work())
    medians = {name: statistics.median(times) for name, times in ways.items()}
    print(f"%load_ext to the end of the first DDP step on 2 ranks, median of {rounds} (of all)")
    for name, median in medians.items():
        share = "" if name == "kept warm" else f"; kept warm is {medians['kept warm'] / median:.2f} of it"
        print(f"{name:<10} {median:6.2f} s ({', '.join(f'{t:.2f}' for t in ways[name])}){share}")


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""
COLD, WARM, TORCHRUN = "cold", "kept warm", "torchrun"


def of_launches(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a.py").write_text(SCRIPT)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env |= {"PYTHONPATH": str(Path(__file__).parents[2]), "NBDDP_RUNTIME_DIR": folder,
                "PYTHONPYCACHEPREFIX": f"{folder}/bytecode"}  # fmt: skip
        ours = [sys.executable, "-m", "nbddp", "run", "-n", "2", "--keep-warm", "10m", "a.py"]
        stop = [sys.executable, "-m", "nbddp", "stop"]
        theirs = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "a.py"]

        def launched(command: list[str]) -> tuple[float, float]:
            """Seconds, and CPU seconds of what ended meanwhile."""
            before, began = os.times(), time.perf_counter()
            subprocess.run(command, cwd=folder, env=env, check=command is not theirs, capture_output=True)
            after = os.times()
            cpu = after.children_user + after.children_system - before.children_user - before.children_system
            return time.perf_counter() - began, cpu

        launched(ours)  # writes bytecode
        found: dict[str, list[tuple[float, float]]] = {COLD: [], WARM: [], TORCHRUN: []}
        for _ in range(rounds):
            launched(stop)
            for name, command in ((COLD, ours), (WARM, ours), (TORCHRUN, theirs)):
                found[name].append(launched(command))
        launched(stop)
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    print(f"a script with one all-reduce on 2 ranks, from prompt to prompt, median of {rounds}")
    for name, (wall, cpu) in medians.items():
        share = "" if name == WARM else f"; kept warm is {medians[WARM][0] / wall:.2f} of it"
        print(f"{name:<10} {wall:6.2f} s, {cpu:5.2f} CPU s of the launcher{share}")


def under_torchrun() -> float:
    while True:
        began = time.perf_counter()
        if torchrun(STEP, 2) is not None:
            return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="restart kernels, N times")
    parser.add_argument("--launches", type=int, default=0, metavar="N", help="launch from a terminal, N times")
    asked = parser.parse_args()
    if asked.launches:
        of_launches(asked.launches)
        return
    if asked.kernels:
        of_kernels(asked.kernels)
        return
    dice, good, began = random.Random(1), 0, time.monotonic()
    with WorkerPool(nproc=asked.nproc) as pool:
        for _ in range(asked.times):
            cell = CELL.format(culprit=dice.randrange(asked.nproc))
            try:
                found = pool.run_cell(cell, max_restarts=1, want_value=True, screen=NullScreen())
                good += list(found) == [1] * asked.nproc
            except nbddp.NbddpError as error:
                print(type(error).__name__, error, flush=True)
    each = (time.monotonic() - began) / asked.times
    print(f"{good} of {asked.times} restarts on {asked.nproc} ranks ended well, {each:.1f} s each")


if __name__ == "__main__":
    main()
