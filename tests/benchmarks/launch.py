"""How fast a cell is, side by side with torchrun and with ipyparallel's %%px, on this machine, now.

Run by hand: `python tests/benchmarks/launch.py [--rounds 5] [--nproc 4]`. Every row is a ratio of
medians whose samples were taken in turn (ours, theirs, ours, …); the last column is what must be reached.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.kernels import Kernel
from tests.versions import hidden

ROOT = Path(__file__).parents[2]
STEP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group()
model = DDP(torch.nn.Linear(64, 64))
model(torch.randn(8, 64)).sum().backward()
dist.destroy_process_group()
"""

PRINT = """
import time
for _ in range(40):
    print("at", time.time()); time.sleep(0.1)
"""

TRAIN = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(1000, 1000) for _ in range(10)]))
opt = torch.optim.SGD(model.parameters(), 0.01)
x = torch.randn(8, 1000)
for i in range(STEPS + 5):
    if i == 5:
        dist.barrier(); began = time.perf_counter()
    opt.zero_grad(); model(x).square().mean().backward(); opt.step()
dist.barrier()
rate = STEPS / (time.perf_counter() - began)
if dist.get_rank() == 0: print("rate", rate, flush=True)
dist.destroy_process_group()
"""

MEMORY = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group()
model = DDP(torch.nn.Linear(256, 256))
model(torch.randn(8, 256)).sum().backward()
import psutil
psutil.Process().memory_full_info().pss / 2**20
"""


PLAIN = "from nbddp.agent import controller\ncontroller.encrypt = lambda config: None\n"  # a sitecustomize.py
SHOUT = "print('x' * 200_000)"


def torchrun(program: str, nproc: int) -> str | None:
    """What it printed; None if it failed, which torchrun itself does now and then: a rank that destroys its
    group first resets the others' connections."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(program)
        script.flush()
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc), script.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else None


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def cell(kernel: Kernel, source: str) -> str:
    shown = kernel.run(source, timeout=300)
    assert shown.ok, shown.error
    return shown.text()


def cold(nproc: int) -> float:
    kernel = Kernel()
    try:
        return seconds(lambda: (cell(kernel, "%load_ext nbddp"), cell(kernel, f"%%ddp --nproc {nproc}\n{STEP}")))
    finally:
        kernel.close()


def kernel_without_gate() -> Kernel:
    """One whose pools leave their store open to all."""
    folder = tempfile.mkdtemp()
    hidden.in_agents(Path(folder), hidden.gate)
    return Kernel(env={**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])})


def started(kernel: Kernel, nproc: int) -> float:
    """Seconds that a pool takes to start, in a kernel that has none."""
    took = seconds(lambda: cell(kernel, f"%ddp start --nproc {nproc}"))
    cell(kernel, f"%%ddp\n{STEP}")
    cell(kernel, "%ddp stop")
    return took


def in_turn(rounds: int, *works: Callable[[], float]) -> list[float]:
    """Medians of works whose samples are taken in turn."""
    samples = [[work() for work in works] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*samples, strict=True)]


def latency(kernel: Kernel) -> float:
    """Median seconds from a print on a rank to the message that shows it in the front end."""
    delays: dict[str, float] = {}
    for seen, kind, content in kernel.run(f"%%ddp --show 0\n{PRINT}").messages:
        if kind == "update_display_data":
            for stamp in re.findall(r"at (\d+\.\d+)", content["data"]["text/plain"]):
                delays.setdefault(stamp, seen - float(stamp))
    return statistics.median(delays.values())


def px_kernel(nproc: int) -> Kernel:
    kernel = Kernel()
    cell(kernel, f"import ipyparallel as ipp\nrc = ipp.Cluster(n={nproc}).start_and_connect_sync(activate=True)")
    return kernel


def of_encryption(nproc: int, rounds: int, row: Callable[..., None]) -> None:
    """Two pools side by side: one as it is, and one whose cluster speaks in the open."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(PLAIN)
        path = os.pathsep.join(filter(None, [folder, str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        kernels = [Kernel(), Kernel(env={**os.environ, "PYTHONPATH": path})]
        for kernel in kernels:
            cell(kernel, "%load_ext nbddp")
            cell(kernel, f"%%ddp --nproc {nproc}\npass")
    for what, body, times, limit in (("pass", "pass", 60, "≤ 1.1"), ("200 kB of output a rank", SHOUT, 10, "≤ 1.3")):
        works = [functools.partial(cell, kernel, f"%%ddp --show 0\n{body}") for kernel in kernels]
        ours, plain = in_turn(rounds * times, *(functools.partial(seconds, work) for work in works))
        row(f"a cell with {what}, against the same on plain sockets", ours * 1000, plain * 1000, limit, "ms")
    for kernel in kernels:
        kernel.close()


def gate_rows(row: Callable[..., None], kernel: Kernel, n: int, rounds: int) -> None:
    """What the gate before the ranks' store and the check of gloo's connections cost a notebook."""
    bare = kernel_without_gate()
    for k in (kernel, bare):
        cell(k, "%reload_ext nbddp\n%ddp stop")
    ours, theirs = in_turn(rounds, lambda: started(kernel, n), lambda: started(bare, n))
    row("start of a pool, against one without the gate", ours, theirs, "≤ 1.05")
    for k in (kernel, bare):
        cell(k, f"%ddp start --nproc {n}")
    for name, source, times in (("a cell with pass", "pass", 20), ("init, DDP step, destroy", STEP, 10)):
        work = f"%%ddp\n{source}"
        for k in (kernel, bare):
            cell(k, work)
        both = [functools.partial(seconds, functools.partial(cell, k, work)) for k in (kernel, bare)]
        ours, theirs = in_turn(rounds * times, *both)
        row(f"{name}, against one without the gate", ours * 1000, theirs * 1000, "≤ 1.05", "ms")
    bare.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--nproc", type=int, default=4)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--gate", action="store_true", help="only what the gate costs")
    asked = options.parse_args()
    n, rounds = asked.nproc, asked.rounds
    rows: list[tuple[str, str, str, float, str]] = []

    def row(name: str, ours: float, theirs: float, limit: str, unit: str = "s") -> None:
        rows.append((name, f"{ours:.3g} {unit}", f"{theirs:.3g} {unit}", ours / theirs, limit))
        print(f"{name}: {ours:.4g} against {theirs:.4g} {unit}, ratio {ours / theirs:.3f}", flush=True)

    if asked.gate:
        kernel = Kernel()
        gate_rows(row, kernel, n, rounds)
        kernel.close()
        return

    def run_torchrun() -> float:
        while True:
            began = time.perf_counter()
            if torchrun(STEP, n) is not None:
                return time.perf_counter() - began

    ours, theirs = in_turn(rounds, lambda: cold(n), run_torchrun)
    row("cold: %load_ext to the first DDP step, against torchrun", ours, theirs, "≤ 0.6")

    kernel = Kernel()
    load = statistics.median(seconds(lambda: cell(kernel, "%reload_ext nbddp")) for _ in range(1))
    print(f"%load_ext nbddp: {load:.3f} s (must be under 0.3)")
    cell(kernel, f"%%ddp --nproc {n}\n{STEP}")
    ours, again, theirs = in_turn(
        rounds,
        lambda: seconds(lambda: cell(kernel, f"%%ddp --fresh\n{STEP}")),
        lambda: seconds(lambda: cell(kernel, f"%%ddp\n{STEP}")),
        run_torchrun,
    )
    row("warm: a --fresh cell with one DDP step, against torchrun", ours, theirs, "≤ 0.2")
    row("next cell: init, DDP step, destroy, against torchrun", again, theirs, "≤ 0.05")

    gate_rows(row, kernel, n, rounds)
    px = px_kernel(n)
    for k in (kernel, px):
        cell(k, f"{'%%ddp' if k is kernel else '%%px'}\npass")
    ours, theirs = in_turn(
        rounds * 20,
        lambda: seconds(lambda: cell(kernel, "%%ddp\npass")),
        lambda: seconds(lambda: cell(px, "%%px\npass")),
    )
    row("a cell with pass, against %%px pass", ours * 1000, theirs * 1000, "≤ 0.8", "ms")
    cell(px, "rc.cluster.stop_cluster_sync()")
    px.close()

    of_encryption(n, rounds, row)
    print(f"print on a rank to the front end: {1000 * latency(kernel):.0f} ms (must be under 50)")
    program = TRAIN.replace("STEPS", str(asked.steps))
    cell(kernel, "%ddp start --nproc 2")
    ours, theirs = in_turn(
        max(3, rounds // 2),
        lambda: float(cell(kernel, f"%%ddp\n{program}").split()[-1]),
        lambda: float((torchrun(program, 2) or torchrun(program, 2) or "").split()[-1]),
    )
    row(f"{asked.steps} DDP steps of 10 M parameters on 2 ranks, rate against torchrun", ours, theirs, "≥ 0.98", "/s")

    cell(kernel, f"%%ddp --fresh --nproc 8 -o pss\n{MEMORY}")
    total = float(cell(kernel, "print(sum(pss))"))
    row("memory of 8 DDP workers, sum of PSS, against the limit", total, 478, "≤ 1.0", "MiB")
    kernel.close()

    print("\n| measure | nbddp | other | ratio | must reach |\n|---|---|---|---|---|")
    for name, a, b, ratio, limit in rows:
        print(f"| {name} | {a} | {b} | {ratio:.2f} | {limit} |")


if __name__ == "__main__":
    main()
