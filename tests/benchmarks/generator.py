"""Random cells whose verdict is known: collectives × faults × Stops, and every verdict checked.

Run by hand: `python tests/benchmarks/generator.py [--cells 2000] [--seed 1]`. A cell is a sequence of collectives and
transfers on 2 to 4 ranks, all in the same order on all ranks, then a barrier; at one place one rank goes wrong in one
of the ways of `FAULTS`, or nothing goes wrong at all. The generator knows what it did, so it knows what nbddp has to
say: which error, which rank, `ok` or not. After each cell the names on every rank are counted. A wrong verdict is
printed with its program. The last line gives the counts.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
import nbddp
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.pool.faults import StopWhenReady
from tests.processes import still_running

TOO_LONG = 15.0  # seconds a cell may take
HANGS = 60.0  # seconds after which it is not waited for
PREPARE = """\
import asyncio, concurrent.futures, functools, os, resource, signal, sys, threading, time
import torch, torch.distributed as dist
held, unlimited = None, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (unlimited, unlimited))
from torch.nn.parallel import DistributedDataParallel as DDP
kept = globals().get('kept', 0) + 1
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
following, previous = (rank + 1) % world, (rank - 1) % world
print("cell", {number}, "rank", rank, flush=True)
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 4))
pair = dist.new_group([0, 1])
"""
CALLS = (
    "dist.all_reduce(torch.ones(4))",
    "dist.all_reduce(torch.ones(300_000))",
    "dist.barrier()",
    "dist.broadcast(torch.ones(4), {root})",
    "dist.reduce(torch.ones(4), {root})",
    "dist.all_gather([torch.ones(4) for _ in range(world)], torch.ones(4))",
    "dist.all_gather_into_tensor(torch.ones(4 * world), torch.ones(4))",
    "dist.gather(torch.ones(4), [torch.ones(4) for _ in range(world)] if rank == {root} else None, dst={root})",
    "dist.scatter(torch.ones(4), [torch.ones(4) for _ in range(world)] if rank == {root} else None, src={root})",
    "dist.reduce_scatter_tensor(torch.ones(4), torch.ones(4 * world))",
    "dist.all_to_all_single(torch.ones(world), torch.ones(world))",
    "dist.all_gather_object([None] * world, rank)",
    "dist.broadcast_object_list([rank], src={root})",
    "dist.all_reduce(torch.ones(4), async_op=True).wait()",
    "model(torch.ones(2, 4)).sum().backward()",
    "[w.wait() for w in (dist.isend(torch.ones(4), following), dist.irecv(torch.ones(4), previous))]",
    "[w.wait() for w in dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(9), following), "
    "dist.P2POp(dist.irecv, torch.ones(9), previous)])]",
    "dist.send(torch.ones(4), following) if rank % 2 == 0 and following else "
    "dist.recv(torch.ones(4), previous) if rank % 2 else None",
    "dist.all_reduce(torch.ones(4), group=pair) if rank < 2 else None",
    "time.sleep(0.05 * rank)",
)  # fmt: skip
FINISH = "dist.barrier()\n"


@dataclass(frozen=True)
class Fault:
    """What `culprit` does at its place in the program, and what has to be said of it.

    says: names of the errors that may be raised (`ok`: none). names: the culprit has to be named. kind: of the cause
    of a WorkerFailed. everywhere: all ranks run the code, which asks for {culprit} itself. stop: Stop is pressed.
    """

    code: str
    says: tuple[str, ...]
    names: bool = True
    kind: str = ""
    everywhere: bool = False
    stop: bool = False


def later(code: str) -> str:
    """One rank's barrier is called later, by something else than its main thread, which waits for that."""
    return "if rank == {culprit}:\n" + "".join(f"    {line}\n" for line in code.splitlines()) + "else: dist.barrier()"


ITEMS = """\
class Items:
    def __len__(self): return 64
    def __getitem__(self, i): return item(i)
def item(i):
    {item}
loader = torch.utils.data.DataLoader(Items(), batch_size=4, num_workers=2)
"""
GONE = ("died", "replaced", "ended")  # states of a rank whose names are gone
LEAVE = "raise SystemExit(0)"
FAULTS = {
    "nothing": Fault("pass", ("ok",), names=False),
    "is slow": Fault("time.sleep(1.2)", ("ok",), names=False),
    "computes": Fault(
        "end = time.monotonic() + 1\nwhile time.monotonic() < end: torch.ones(200, 200).exp()", ("ok",), names=False
    ),
    "is stopped for a while": Fault(
        "import subprocess\n"
        "subprocess.Popen(['sh', '-c', f'kill -STOP {os.getpid()}; sleep 1.2; kill -CONT {os.getpid()}'])\n"
        "time.sleep(0.3)",
        ("ok",), names=False,
    ),
    "raises": Fault("raise ValueError('on purpose')", ("WorkerFailed",), kind="raised"),
    "raises with work pending": Fault(  # or its process is aborted by gloo: the others' calls have other sizes
        "held = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]\nraise ValueError('on purpose')",
        ("WorkerFailed",),
    ),
    "raises what cannot be worded": Fault(
        "class Bad(Exception):\n    def __str__(self): raise RuntimeError('no words')\nraise Bad()",
        ("WorkerFailed",), kind="raised",
    ),
    "raises KeyboardInterrupt": Fault("raise KeyboardInterrupt", ("WorkerFailed",)),
    "gets SIGINT": Fault("os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)", ("WorkerFailed",)),
    "gets SIGTERM": Fault("os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)", ("WorkerFailed",)),
    "is killed": Fault("os.kill(os.getpid(), signal.SIGKILL)", ("WorkerFailed",), kind="died"),
    "leaves with code 3": Fault("sys.exit(3)", ("WorkerFailed",), kind="exit"),
    "leaves with words": Fault("sys.exit('bye')", ("WorkerFailed",), kind="exit"),
    "ends its process with code 3": Fault("os._exit(3)", ("WorkerFailed",), kind="died"),
    "leaves early": Fault(LEAVE, ("RunHung",)),
    "destroys and leaves": Fault(f"dist.destroy_process_group()\n{LEAVE}", ("RunHung", "WorkerFailed")),
    "waits for what nobody sends": Fault("dist.recv(torch.ones(4), {other}, tag=77)", ("RunHung",)),
    "receives from any, in vain": Fault("dist.recv(torch.ones(4), tag=78)", ("RunHung",)),
    "waits for a key that nobody sets": Fault(
        "dist.distributed_c10d._get_default_store().wait(['nobody'])", ("RunHung",)
    ),
    "calls one more": Fault("dist.all_reduce(torch.ones(4))", ("RunHung", "WorkerFailed")),
    "makes a group alone": Fault("dist.new_group()", ("RunHung",)),
    "names another root": Fault(
        "dist.broadcast(torch.ones(4), {other} if rank == {culprit} else {culprit})", ("RunHung",), everywhere=True
    ),
    "gathers elsewhere": Fault(
        "to = {culprit} if rank == {culprit} else {other}\n"
        "dist.gather_object(rank, [None] * world if rank == to else None, dst=to)",
        ("RunHung",), everywhere=True,
    ),
    "scatters from elsewhere": Fault(
        "src = {culprit} if rank == {other} else {other}\n"
        "dist.scatter(torch.ones(4), [torch.ones(4) for _ in range(world)] if rank == src else None, src=src)",
        ("RunHung",), everywhere=True,
    ),
    "waits in a thread": Fault(
        "thread = threading.Thread(target=dist.recv, args=(torch.ones(4), {other}), kwargs={'tag': 79})\n"
        "thread.start(); thread.join()",
        ("RunHung",),
    ),
    "raises when the others are done, with work pending": Fault(
        "held = dist.all_reduce(torch.ones(4), async_op=True)\nheld.wait()\n"
        "if rank == {culprit}: raise ValueError('on purpose')\n"
        "more = dist.all_reduce(torch.ones(4), async_op=True)\nraise SystemExit(0)",
        ("WorkerFailed",), kind="raised", everywhere=True,
    ),
    "acts later, from an executor": Fault(
        later("with concurrent.futures.ThreadPoolExecutor(1) as pool:\n"
              "    pool.submit(lambda: (time.sleep(1.2), dist.barrier())).result()"),
        ("ok",), names=False, everywhere=True,
    ),
    "acts later, by a callback": Fault(
        later("done = threading.Event()\npool = concurrent.futures.ThreadPoolExecutor(1)\n"
              "pool.submit(time.sleep, 1.2).add_done_callback(lambda f: (dist.barrier(), done.set()))\ndone.wait()"),
        ("ok",), names=False, everywhere=True,
    ),
    "acts later, by a timer": Fault(
        later("timer = threading.Timer(1.2, dist.barrier)\ntimer.start(); timer.join()"),
        ("ok",), names=False, everywhere=True,
    ),
    "acts later, in an event loop": Fault(
        later("async def act():\n    await asyncio.sleep(1.2)\n    await asyncio.to_thread(dist.barrier)\n"
              "loop = asyncio.new_event_loop()\nact = functools.partial(loop.run_until_complete, act())\n"
              "thread = threading.Thread(target=act)\nthread.start(); thread.join(); loop.close()"),
        ("ok",), names=False, everywhere=True,
    ),
    "acts later, by a signal": Fault(
        later("done = []\nsignal.signal(signal.SIGALRM, lambda *a: (dist.barrier(), done.append(1)))\n"
              "signal.setitimer(signal.ITIMER_REAL, 1.2)\nwhile not done: time.sleep(0.01)\n"
              "signal.signal(signal.SIGALRM, signal.SIG_DFL)"),
        ("ok",), names=False, everywhere=True,
    ),
    "waits for a key that is set late": Fault(
        "store = dist.distributed_c10d._get_default_store()\n"
        "if rank == {culprit}: store.wait(['late'])\nelse: time.sleep(1.2); store.set('late', 'set')\ndist.barrier()",
        ("ok",), names=False, everywhere=True,
    ),
    "waits for a key, when the others have left": Fault(
        "if rank != {culprit}: raise SystemExit(0)\n"
        "dist.distributed_c10d._get_default_store().get('nobody')",
        ("RunHung",), everywhere=True,
    ),
    "destroys with work pending": Fault(
        "if rank != {culprit}: raise SystemExit(0)\n"
        "held = dist.all_reduce(torch.ones(4), async_op=True)\ndist.destroy_process_group()",
        ("RunHung", "WorkerFailed"), everywhere=True,  # torch waits for work of a group that no DDP model holds
    ),
    "destroys its group and works on": Fault(
        "dist.barrier(); dist.destroy_process_group()\n"
        "if rank == {culprit}: time.sleep(1.2)\ndist.init_process_group('gloo')\n"
        "pair = dist.new_group([0, 1]); model = DDP(torch.nn.Linear(4, 4))",
        ("ok",), names=False, everywhere=True,
    ),
    "loads": Fault(ITEMS.format(item="return torch.ones(2)") + "held = list(loader)", ("ok",), names=False),
    "loads what raises": Fault(
        ITEMS.format(item="raise ValueError('on purpose')") + "held = list(loader)", ("WorkerFailed",), kind="raised"
    ),
    "raises while its loader works": Fault(
        ITEMS.format(item="time.sleep(600 if i > 3 else 0)\n    return torch.ones(2)")
        + "for x in loader: raise ValueError('on purpose')",
        ("WorkerFailed",), kind="raised",
    ),
    "leaves its loader in the middle": Fault(
        ITEMS.format(item="time.sleep(600 if i > 3 else 0)\n    return torch.ones(2)") + "for x in loader: break",
        ("ok",), names=False,
    ),
    "has no descriptor left, and raises": Fault(
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 20, unlimited))\nheld = []\n"
        "while True: held.append(open(os.devnull))",
        ("WorkerFailed",), kind="raised",
    ),
    "has no memory left, and raises": Fault(
        "held = None\nlimit = resource.getrlimit(resource.RLIMIT_AS)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (int(open('/proc/self/statm').read().split()[0]) * 4096, limit[1]))\n"
        "try: held = bytearray(1 << 30)\nfinally: resource.setrlimit(resource.RLIMIT_AS, limit)",
        ("WorkerFailed",), kind="raised",
    ),
    "is stopped by the user": Fault("print('ready', flush=True)\ntime.sleep(600)", ("RunStopped",), False, stop=True),
    "is stopped by the user twice": Fault(
        "print('ready', flush=True)\ntime.sleep(600)", ("RunStopped",), False, stop=True
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    fault: str
    culprit: int
    world: int
    text: str


def cell(dice: random.Random, number: int) -> Cell:
    """A random program and what goes wrong in it."""
    world = dice.choice((2, 2, 3, 4))
    fault = dice.choice(list(FAULTS)) if dice.random() < 0.8 else "nothing"
    culprit, steps = dice.randrange(world), dice.randint(0, 5)
    place = dice.randint(0, steps)
    other = (culprit + dice.randrange(1, world)) % world
    lines = [PREPARE.format(number=number)]
    for step in range(steps + 1):
        if step == place:
            code = FAULTS[fault].code.replace("{other}", str(other)).replace("{culprit}", str(culprit))
            who = "True" if FAULTS[fault].everywhere else f"rank == {culprit}"
            lines.append(f"if {who}:\n" + "".join(f"    {line}\n" for line in code.splitlines()))
        if step < steps:
            lines.append(dice.choice(CALLS).replace("{root}", str(dice.randrange(world))) + "\n")
    return Cell(fault, culprit, world, "".join([*lines, FINISH]))


def wrong(made: Cell, error: nbddp.RunFailed | None, seconds: float) -> str:
    """What is wrong with the verdict; empty if it is right."""
    fault, said = FAULTS[made.fault], type(error).__name__ if error else "ok"
    if seconds > TOO_LONG:
        return f"took {seconds:.1f} s"
    if said not in fault.says:
        return f"{said}, must be {' or '.join(fault.says)}"
    if fault.kind and getattr(error, "cause", None) is not None and error.cause.kind != fault.kind:  # type: ignore[union-attr]
        return f"{error.cause.kind}, must be {fault.kind}"  # type: ignore[union-attr]
    if not fault.names:
        return ""
    if isinstance(error, nbddp.WorkerFailed):
        return "" if error.rank == made.culprit else f"blames rank {error.rank}, must be {made.culprit}"
    named = (
        {s.rank for s in error.states if f"rank {s.rank}" in str(error) or "ranks" in str(error)} if error else set()
    )
    return "" if made.culprit in named else f"does not name rank {made.culprit}"


class Names:
    """How often each rank has counted, as it must be."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.lost = self.reported = 0

    def ran(self, pool: WorkerPool, world: int, error: nbddp.RunFailed | None) -> None:
        self.counts = {r: self.counts.get(r, 0) + 1 for r in range(world)}
        assert pool.last_run is not None
        gone = {r for r, ended in pool.last_run.ended.items() if ended.status in GONE}
        gone |= {s.rank for s in error.states if s.status in GONE} if error is not None else set()
        self.reported += len(gone)
        self.counts.update(dict.fromkeys(gone, 0))

    def compare(self, pool: WorkerPool) -> str:
        pool.ensure(LaunchSpec())
        try:
            found = dict(enumerate(pool.run_cell("globals().get('kept', 0)", want_value=True, screen=NullScreen())))
        except nbddp.RunFailed as error:
            self.counts = {}
            pool.ensure(LaunchSpec(fresh=True))
            return f"the next cell failed: {error}"
        lost = [r for r in found if found[r] != self.counts[r]]
        self.lost += len(lost)
        said = f"names: {found}, must be {self.counts}" if lost else ""
        self.counts = found
        return said


def attempt(call: Callable[[], object]) -> tuple[nbddp.RunFailed | None, float]:
    began = time.monotonic()
    try:
        call()
    except nbddp.RunFailed as error:
        return error, time.monotonic() - began
    return None, time.monotonic() - began


def descriptors(pool: WorkerPool) -> int:
    """The most that a rank has open."""
    count = "import os, gc; gc.collect(); len(os.listdir('/proc/self/fd'))"
    return max(pool.run_cell(count, want_value=True, screen=NullScreen()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=list(FAULTS), action="append", help="these faults alone")
    asked = parser.parse_args()
    dice = random.Random(asked.seed)
    tally: dict[str, int] = {}
    failures, slowest, names = 0, 0.0, Names()
    with WorkerPool(nproc=4) as pool:
        assert pool.agent is not None
        agent = psutil.Process(pool.agent.hello.pid)
        open_before = descriptors(pool)
        for number in range(1, asked.cells + 1):
            made = cell(dice, number)
            while asked.only and made.fault not in asked.only:
                made = cell(dice, number)
            pool.ensure(LaunchSpec(nproc=made.world))
            screen = StopWhenReady(1 + ("twice" in made.fault)) if FAULTS[made.fault].stop else NullScreen()
            error, took = attempt(lambda: pool.run_cell(made.text, screen=screen, hang_after=0.3, timeout=HANGS))  # noqa: B023
            names.ran(pool, made.world, error)
            slowest = max(slowest, took)
            said = wrong(made, error, took)
            said = "; ".join(w for w in (said, names.compare(pool)) if w)
            tally[made.fault] = tally.get(made.fault, 0) + 1
            if said:
                failures += 1
                print(
                    f"-- cell {number}: rank {made.culprit} {made.fault}: {said}\n{made.text}\n{error and error.report}"
                )
            if number % max(1, asked.cells // 10) == 0:
                print(f"{number} cells, {failures} wrong, slowest {slowest:.1f} s", flush=True)
        open_after = descriptors(pool)
        family = agent.children(recursive=True)
    left = len(still_running([agent, *family]))
    print(", ".join(f"{fault}: {count}" for fault, count in sorted(tally.items())))
    print(
        f"{asked.cells} cells: {failures} wrong verdicts, slowest {slowest:.1f} s, {names.lost} names lost beyond the "
        f"{names.reported} reported, {left} processes left, descriptors {open_before} → {open_after}"
    )
    return 1 if failures or left else 0


if __name__ == "__main__":
    os.environ["PYTHONWARNINGS"] = "ignore"
    sys.exit(main())
