"""What an open panel costs while ranks train: of a core, and of the rate of their steps.

Run by hand: `python tests/benchmarks/panel.py [--rounds 3] [--nproc 4] [--steps 400]`. The same training cell runs in
turn with an open panel and twice without one, every second round in the opposite order, in one kernel, on the same
ranks. CPU is what the kernel has counted while the cell ran: of the panel's thread (looks, pages and widgets), and of
the pool's agent, which looks at the processes for it. The second plain row is the null pair: what the comparison gives
where there is nothing to be seen.
"""

from __future__ import annotations

import argparse
import ast
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.benchmarks.launch import cell
from tests.kernels import Kernel

TRAIN = """%%ddp -o seconds
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group()
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]))
x = torch.randn(64, 256)
for step in range(STEPS):
    if step == 10: began = time.perf_counter()
    model(x).square().mean().backward()
seconds = time.perf_counter() - began
dist.destroy_process_group()
seconds"""
SETUP = """import os, threading, time
from pathlib import Path
import nbddp
from nbddp.notebook.magics import standing_pool
def used(pid, tid=None):
    tasks = [Path(f'/proc/{pid}/task/{tid}')] if tid else Path(f'/proc/{pid}/task').glob('*')
    return sum(int((task / 'schedstat').read_text().split()[0]) for task in tasks) / 1e9
def panel_thread():
    return next((t.native_id for t in threading.enumerate() if t.name == 'nbddp-panel'), None)
def begin():
    global before, at
    tid = panel_thread()
    before = used(os.getpid(), tid) if tid else 0.0, used(standing_pool().agent.hello.pid)
    at = time.perf_counter()
def end():
    tid, took = panel_thread(), time.perf_counter() - at
    now = used(os.getpid(), tid) if tid else 0.0, used(standing_pool().agent.hello.pid)
    return [(b - a) / took for a, b in zip(before, now)]
panel = None"""
OPEN, CLOSE = "panel = nbddp.Panel()._panel; panel.view", "panel.close(); panel = None"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--nproc", type=int, default=4)
    options.add_argument("--steps", type=int, default=400)
    asked = options.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}")
    kernel = Kernel()
    cell(kernel, f"%load_ext nbddp\n%ddp start --nproc {asked.nproc}")
    cell(kernel, SETUP)
    train = TRAIN.replace("STEPS", str(asked.steps + 10))
    cell(kernel, train)
    found: dict[str, list[tuple[float, float, float]]] = {"plain": [], "open": [], "plain again": []}
    for turn in range(asked.rounds):
        for name in (*found,)[:: 1 if turn % 2 else -1]:
            if name == "open":
                cell(kernel, OPEN)
            cell(kernel, "begin()")
            cell(kernel, train)
            rate = f"{asked.steps} / max(seconds[r] for r in range({asked.nproc}))"
            panel, agent, steps = ast.literal_eval(cell(kernel, f"print([*end(), {rate}])"))
            found[name].append((panel, agent, steps))
            if name == "open":
                cell(kernel, CLOSE)
    kernel.close()
    plain = [steps for _, _, steps in found["plain"]]
    for name, rows in found.items():
        ratio = statistics.median(steps / of for (_, _, steps), of in zip(rows, plain, strict=True))
        panel, agent, steps = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name}: {steps:.1f} steps/s, {ratio:.3f} of plain; {100 * (panel + agent):.2f} % of a core (must be "
              f"under 1): panel's thread {100 * panel:.2f}, agent {100 * agent:.2f}")  # fmt: skip
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
