"""What many workers on many agents cost: 64 on 16 far agents, all on this machine, and what of it grows how.

Run by hand: `python tests/benchmarks/wide.py [--layouts 1x4 16x4] [--delay 0.02] [--rounds 5]`. The agents are started
by a command (`--via`), each with a runtime folder of its own; there is a stub in the place of torch (`stub/torch`),
since neither 16 torches nor their imports fit here, so there are no process groups and no collectives. The machine that
the notebook is on has the real one. --delay: seconds by which everything that agents say comes later.

"here" is CPU time of the notebook's side: its process, the agent beside it, the controller. That is what stays on one
machine where the hosts are many; the wall clock also has all agents and workers, on the cores of this machine. Both are
fitted by a + b · agents + c · workers (least squares, none negative).
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
import nbddp
from nbddp.agent.client import AgentClient
from nbddp.capabilities.status.table import status_table
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool

ROOT = Path(__file__).parents[2]
STUB, LATE = ROOT / "tests/benchmarks/stub", ROOT / "tests/benchmarks/late.py"
LAYOUTS = ("1x4", "2x4", "4x4", "8x4", "16x4", "16x1", "8x8")
ASKED = ((128, 8), (256, 4))
LINES = "for i in range(10): print('line', i)"
FAILS = "import os\nif os.environ['RANK'] == '3': raise ValueError('no')\n"
IDLE = 3.0  # seconds

Measured = dict[str, float]


def via(folder: Path, delay: float) -> str:
    """A command that starts an agent here, as on the host {host}."""
    own = f"env NBDDP_RUNTIME_DIR={folder}/{{host}} PYTHONPATH={STUB}:{ROOT} PYTHONDONTWRITEBYTECODE=1"
    late = f"{sys.executable} -S -E {LATE} {delay} " if delay else ""
    return f"sh -c {shlex.quote(f'exec {own} {late}{{command}}')}"


@contextmanager
def many(agents: int, workers: int, delay: float, here: AgentClient | None = None) -> Iterator[WorkerPool]:
    """A pool that is not started yet, of so many agents with so many workers each."""
    with tempfile.TemporaryDirectory(prefix="w", dir="/tmp") as folder:
        names = [f"node{i}" for i in range(agents)]
        for name in names:
            Path(folder, name).mkdir(mode=0o700)
        pool = WorkerPool(nproc=workers, hosts=",".join(names), via=via(Path(folder), delay), agent=here)
        try:
            yield pool
        finally:
            pool.stop()


def near(pool_agent: AgentClient) -> list[psutil.Process]:
    """The processes of the notebook's side."""
    agent = psutil.Process(pool_agent.hello.pid)
    return [psutil.Process(), agent, *agent.children(recursive=True)]


def controller(agent: AgentClient) -> list[psutil.Process]:
    """The controller and its heart monitor."""
    pid = next(c["pid"] for c in agent.request("status")["children"] if c["kind"] == "controller")
    return [psutil.Process(pid), *psutil.Process(pid).children()]


def cpu(processes: list[psutil.Process]) -> dict[tuple[int, str], int]:
    """Nanoseconds that each of their threads has used."""
    spent = {}
    for process in processes:
        for task in Path(f"/proc/{process.pid}/task").glob("*"):
            with suppress(OSError):
                spent[process.pid, task.name] = int((task / "schedstat").read_text().split()[0])
    return spent


def since(before: Mapping[tuple[int, str], int], agent: AgentClient) -> float:
    """Seconds of CPU here; what a thread that has ended used last is not in it."""
    return sum(ns - before.get(task, 0) for task, ns in cpu(near(agent)).items()) / 1e9


class Meter:
    """Wall clock and CPU here, of what is done again and again."""

    def __init__(self, agent: AgentClient, rounds: int):
        self.agent, self.rounds, self.found = agent, rounds, Measured()

    def time(self, name: str, work: Callable[[], object], rounds: int = 0) -> None:
        walls, cpus = [], []
        for _ in range(rounds or self.rounds):
            before, began = cpu(near(self.agent)), time.perf_counter()
            work()
            walls.append(time.perf_counter() - began)
            cpus.append(since(before, self.agent))
        self.found[name] = statistics.median(walls)
        self.found[f"{name}, here"] = statistics.median(cpus)


def of(agents: int, workers: int, delay: float, rounds: int) -> Measured:
    """What a layout costs: seconds, MiB, numbers."""
    here = AgentClient.launch(os.environ)  # as a notebook has it, warm before anybody asks for a pool
    here.wait_warm()
    with many(agents, workers, delay, here) as pool:
        meter = Meter(here, rounds)
        meter.time("start", pool.start, 1)
        meter.found["start, here: the controller"] = sum(cpu(controller(here)).values()) / 1e9

        def cell(code: str) -> None:
            pool.run_cell(code, screen=NullScreen())

        def fails(code: str) -> None:
            with suppress(nbddp.WorkerFailed):
                cell(FAILS + code)
                raise AssertionError("it did not fail")

        cell("pass")
        meter.time("cell: pass", lambda: cell("pass"))
        meter.time("cell: 10 lines on each rank", lambda: cell(LINES))
        meter.time("%ddp status", lambda: repr(status_table(pool.status())))
        meter.time("a rank fails, others pass", lambda: fails("pass"))
        meter.time("a rank fails, others run on", lambda: fails("import time; time.sleep(60)"))
        cell("pass")
        found = meter.found
        found |= held(pool, here)
        before = cpu(near(here))
        time.sleep(IDLE)
        found["idle, CPU here (s/s)"] = since(before, here) / IDLE
        meter.time("--fresh: all workers anew", pool.restart, 1)
        began = time.perf_counter()
        pool.stop()
        found["%ddp stop"] = time.perf_counter() - began
    return found


def held(pool: WorkerPool, here: AgentClient) -> Measured:
    """Memory (proportional share, MiB), descriptors and threads."""
    hub = controller(here)[0]
    far = [psutil.Process(node.agent.hello.pid) for node in pool.group.added]
    workers = [psutil.Process(w.pid) for w in pool.workers.values()]
    ours = psutil.Process()
    return {
        "memory of an agent (MiB)": statistics.mean(map(memory, far)),
        "memory of a worker (MiB)": statistics.mean(map(memory, workers)),
        "memory of the controller (MiB)": memory(hub),
        "memory of the notebook's process (MiB)": memory(ours),
        "descriptors of the controller": descriptors(hub.pid),
        "… of these sockets": descriptors(hub.pid, "socket:"),
        "descriptors of the notebook's process": descriptors(ours.pid),
        "… of these sockets ": descriptors(ours.pid, "socket:"),
        "threads of the notebook's process": ours.num_threads(),
    }


def memory(process: psutil.Process) -> float:
    return float(process.memory_full_info().pss) / 2**20


def descriptors(pid: int, kind: str = "") -> int:
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(path))
    return sum(where.startswith(kind) for where in found)


def fit(rows: list[tuple[int, int]], values: list[float]) -> tuple[float, float, float]:
    """a, b, c of a + b · agents + c · workers, by least squares; none is negative."""
    whole = np.array([(1.0, agents, agents * workers) for agents, workers in rows])
    best, error = np.zeros(3), float("inf")
    for count in range(1, 4):
        for chosen in combinations(range(3), count):
            solved = np.linalg.lstsq(whole[:, chosen], np.array(values), rcond=None)[0]
            if (solved >= 0).all():
                trial = np.zeros(3)
                trial[list(chosen)] = solved
                left = float(((whole @ trial - values) ** 2).sum())
                if left < error - 1e-15:
                    best, error = trial, left
    a, b, c = map(float, best)
    return a, b, c


def show(rows: list[tuple[int, int]], found: list[Measured]) -> None:
    """A row for each name, with what is fitted to it; then what is extrapolated."""
    names, heads = list(found[0]), [*(f"{a}x{w}" for a, w in rows), "fixed", "/agent", "/worker"]
    wide = max(map(len, names))
    print(" | ".join([" " * wide, *(head.rjust(7) for head in heads)]))
    foretold = []
    for name in names:
        values = [one[name] for one in found]
        cells = [*map(number, values)]
        if len(rows) > 3 and not name.startswith("memory of a"):
            a, b, c = fit(rows, values)
            cells += [number(v) for v in (a, b, c)]
            foretold.append([name.ljust(wide), *(number(a + b * m + c * m * w).rjust(9) for m, w in ASKED)])
        print(" | ".join([name.ljust(wide), *(cell.rjust(7) for cell in cells)]))
    if foretold:
        print("extrapolated by the fit, not measured; the wall clock is that of this machine, with all agents on it:")
        print(" | ".join([" " * wide, *(f"{m} x {w}".rjust(9) for m, w in ASKED)]))
        print("\n".join(map(" | ".join, foretold)))


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.4f}"


def told(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, metavar="AGENTSxWORKERS")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    rows = [(int(a), int(w)) for a, _, w in (text.partition("x") for text in asked.layouts)]
    found = []
    for agents, workers in rows:
        found.append(of(agents, workers, asked.delay, asked.rounds))
        print(f"{agents} agents of {workers}: {told(found[-1])}", file=sys.stderr, flush=True)
    print(f"{os.cpu_count()} cores; seconds where nothing else is said; what agents say comes {asked.delay} s later")
    show(rows, found)


if __name__ == "__main__":
    main()
