"""What the fault tests share: calls that block, ways to go wrong in them, and what must hold afterwards."""

from __future__ import annotations

import inspect
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from torch._C import _distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import nbddp
from nbddp.compat import system
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool

RECORDS = hasattr(_distributed_c10d, "_dump_fr_trace_json")
NO_RECORDER = "torch before 2.8 has no flight recorder for gloo"
LAZY = "lazy_bucket_allocation" in inspect.signature(DistributedDataParallel).parameters
NO_LAZY = "torch before 2.15 has neither lazy_bucket_allocation nor finalize_backward"
needs_lazy = pytest.mark.skipif(not LAZY, reason=NO_LAZY)
needs_recorder = pytest.mark.skipif(not RECORDS, reason=NO_RECORDER)
FREES = system.is_linux()  # elsewhere what is blocked is replaced
FREED = "unblocked, variables are kept" if FREES else "could not be unblocked, so it is replaced; lost: "
FREED_STATUS = "interrupted" if FREES else "replaced"
OLD_DESTROY = pytest.mark.skipif(
    not RECORDS, reason="torch 2.6 holds the interpreter while destroy_process_group waits for gloo's threads"
)
SEEN_WITHOUT = ("send/recv", "store", "init")  # calls that Python's frames alone tell enough of

SET_UP = """
import os, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
culprit, fault = world - 1, {fault!r}
size = 4 if rank != culprit or fault != "mismatch" else 8

def go_wrong():
    if rank != culprit or fault == "mismatch":
        return True
    if fault in ("raise", "exit"):
        raise ValueError("on purpose") if fault == "raise" else SystemExit(3)
    if fault in ("kill", "abort"):
        os.kill(os.getpid(), 9) if fault == "kill" else os.abort()
    if fault == "stop":
        time.sleep(0.2)
        print("ready", flush=True)
        time.sleep(600)
    return False

"""
INIT = "dist.init_process_group('gloo')\n"
CALLS = {
    "all_reduce": INIT + "if go_wrong(): dist.all_reduce(torch.ones(size))",
    "barrier": INIT + "if go_wrong(): dist.barrier()",
    "broadcast": INIT + "if go_wrong(): dist.broadcast(torch.ones(size), culprit)",
    "all_gather": INIT + "if go_wrong(): dist.all_gather([torch.ones(size) for _ in range(world)], torch.ones(size))",
    "send/recv": INIT + "if go_wrong():\n"
    "    if rank == culprit:\n        for peer in range(culprit): dist.send(torch.ones(size), peer)\n"
    "    else: dist.recv(torch.ones(size), culprit)",
    "gather_object": INIT + "if go_wrong(): dist.gather_object(rank, [None] * world if rank == 0 else None)",
    "store": INIT + "store = dist.distributed_c10d._get_default_store()\n"
    "if go_wrong():\n    if rank == culprit: store.set('it', 'is')\n    else: store.wait(['it'])",
    "DDP backward": INIT + "model = DDP(torch.nn.Linear(4, 4))\nloss = model(torch.ones(2, 4)).sum()\n"
    "if go_wrong(): loss.backward()",
    "FSDP2": INIT + "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))\n"
    "fully_shard(model, mesh=init_device_mesh('cpu', (world,)))\n"
    "if go_wrong(): model(torch.ones(2, 8)).sum().backward()",
    "init": "if go_wrong(): dist.init_process_group('gloo')",
}  # fmt: skip
FAULTS = ("raise", "skip", "kill", "stop", "mismatch")
MORE_FAULTS = ("abort", "exit")  # each once
SIGNALS = {"kill": "SIGKILL", "abort": "SIGABRT"}
WITH_SHAPES = ("all_reduce", "broadcast", "all_gather", "send/recv")

AFTER = (
    SET_UP.format(fault="")
    + INIT
    + """
model = DDP(torch.nn.Linear(2, 1))
model(torch.full((1, 2), rank + 1.0)).sum().backward()
gradient = model.module.weight.grad[0, 0].item()
dist.destroy_process_group()
(globals().get("kept"), gradient)
"""
)


def cases() -> Iterator[tuple[str, str]]:
    for call in CALLS:
        for fault in FAULTS:
            if fault != "mismatch" or call in WITH_SHAPES:
                yield call, fault


class StopWhenReady(NullScreen):
    """A screen that presses Stop as soon as the first rank prints `ready`; `times`: how often, `after`: seconds."""

    def __init__(self, times: int = 1, after: float = 0.0) -> None:
        self.times, self.after = times, after

    def line(self, rank: int, stream: str, text: str) -> None:
        while text == "ready" and self.times > 0:
            self.times -= 1
            if self.after:
                threading.Timer(self.after, os.kill, (os.getpid(), signal.SIGINT)).start()
            else:
                os.kill(os.getpid(), signal.SIGINT)


class StopAgain(StopWhenReady):
    """One that presses Stop once more as soon as a rank is said to be cleaning up; `told`: what ends the run."""

    def __init__(self, again: bool = True, **pressed: Any) -> None:
        super().__init__(**pressed)
        self.again, self.told = again, list[str]()

    def ends(self, text: str) -> None:
        self.told.append(text)
        if self.again and "cleaning up" in text:
            self.again = False
            os.kill(os.getpid(), signal.SIGINT)


class Watching(NullScreen):
    """A screen that keeps what the live view said."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def refresh(self, outputs: object, status: Callable[[], str]) -> float | None:
        self.shown.append(status())
        return 0.05

    def saw(self, words: str) -> bool:
        return any(words in s for s in self.shown)


class Impatient(Watching):
    """A screen that presses Stop once the live view has said it."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words, self.said = words, 0.0

    def refresh(self, outputs: object, status: Callable[[], str]) -> float | None:
        seconds = super().refresh(outputs, status)
        if not self.said and re.search(self.words, self.shown[-1]):
            self.said = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)
        return seconds


def numbered(text: str) -> str:
    """`text` as this torch lets it be told: without a recorder a collective has no number."""
    return text if RECORDS else re.sub(r" #\d+", "", text)


@dataclass
class Outcome:
    """How a faulty cell ended. `lost`: ranks whose names are gone, as the report says."""

    error: nbddp.RunFailed | None
    seconds: float
    lost: tuple[int, ...]


def run_faulty(pool: WorkerPool, call: str, fault: str) -> Outcome:
    """Run a call with a fault on a pool whose ranks hold `kept`, their own rank."""
    pool.run_cell("import os; kept = int(os.environ['RANK'])", screen=NullScreen())
    began = time.monotonic()
    error = None
    try:
        pool.run_cell(SET_UP.format(fault=fault) + CALLS[call], screen=StopWhenReady(), hang_after=0.3)
    except nbddp.RunFailed as e:
        error = e
    seconds = time.monotonic() - began
    lost = tuple(s.rank for s in error.states if s.status in ("died", "replaced")) if error else ()
    return Outcome(error, seconds, lost)


def check_case(pool: WorkerPool, call: str, fault: str) -> str:
    """A call with a fault on the last rank of a pool: the right rank is named, the others are freed, and all goes on.
    Returns a line of the fault matrix."""
    world = pool.world_size
    ended = run_faulty(pool, call, fault)
    what = type(ended.error).__name__ if ended.error else "ok"
    culprit, lost = world - 1, set(ended.lost)
    blocked = set() if FREES else set(range(world))
    if fault == "raise":
        assert isinstance(ended.error, nbddp.WorkerFailed)
        assert (ended.error.rank, ended.error.exception_message) == (culprit, "on purpose")
        assert lost <= blocked - {culprit}
    elif fault in SIGNALS:
        assert isinstance(ended.error, nbddp.WorkerFailed)
        assert (ended.error.rank, ended.error.cause.kind) == (culprit, "died")
        assert SIGNALS[fault] in str(ended.error)
        assert {culprit} <= lost <= {culprit, *blocked}
    elif fault == "exit":
        assert isinstance(ended.error, nbddp.WorkerFailed)
        assert (ended.error.rank, ended.error.cause.kind, ended.error.cause.code) == (culprit, "exit", 3)
        assert lost <= blocked
    elif fault == "stop":
        assert isinstance(ended.error, nbddp.RunStopped)
        assert lost <= blocked
    elif fault == "skip" and ended.error is not None:
        assert isinstance(ended.error, nbddp.RunHung)
        assert f"rank {culprit} has finished the cell without calling it" in str(ended.error)
        assert lost <= blocked - {culprit}
    if fault == "skip" and ended.error is None:
        assert call == "broadcast" or (call, world) == ("gather_object", 2), "only these can end without the last rank"
    check_after(pool, ended.lost)
    return f"{call:14} {fault:9} {ended.seconds:5.2f} s  {what}"


def replaced(pool: WorkerPool) -> set[int]:
    """Ranks of the last run that were replaced, as its report says."""
    error = pool.last_run.error() if pool.last_run is not None else None
    return {s.rank for s in error.states if s.status == "replaced"} if isinstance(error, nbddp.RunFailed) else set()


def check_after(pool: WorkerPool, lost: tuple[int, ...]) -> None:
    """Every name on every other rank is there, and a DDP step gives the right gradient. Where no rank is freed, those
    that the last run has blocked have lost theirs."""
    lost = lost if FREES else (*lost, *replaced(pool))
    pool.ensure(LaunchSpec())
    world = pool.world_size
    found = pool.run_cell(AFTER, want_value=True, screen=NullScreen())
    mean = (world + 1) / 2
    assert [tuple(v) for v in found] == [(None if r in lost else r, mean) for r in range(world)]
