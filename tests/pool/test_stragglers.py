"""A rank that is late gets its cause: tables with known answers, and each cause planted on one of four real ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import nbddp
from nbddp.analysis.cause import BACKWARD, BATCH, COPY, FORWARD, INPUT, MACHINE, OPTIMIZER
from nbddp.analysis.wait_time import typical
from nbddp.capabilities.collectives.command import OWN
from nbddp.capabilities.collectives.program import program
from nbddp.capabilities.panel.rows import merged, slowest
from nbddp.capabilities.timings import on_rank, on_rank_marks
from nbddp.capabilities.timings.analysis import AFTER, Slow, slow, verdict
from nbddp.capabilities.timings.figure import draw_timings
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.run_spec import Question
from tests import warm
from tests.pool.faults import needs_recorder

NPROC = 4


def test_a_thread_that_could_run_and_did_not_has_waited() -> None:
    if on_rank_marks.core_wait() is None:
        pytest.skip("this system counts no waits for a core")
    cores = os.sched_getaffinity(0)
    busy = [sys.executable, "-c", "while True: pass"]
    rival = subprocess.Popen(busy)
    try:
        os.sched_setaffinity(rival.pid, {min(cores)})
        os.sched_setaffinity(0, {min(cores)})
        before, ran = on_rank_marks.core_wait() or 0, time.thread_time()
        while time.thread_time() < ran + 0.2:
            pass
        assert (on_rank_marks.core_wait() or 0) - before > 0.05e9
    finally:
        os.sched_setaffinity(0, cores)
        rival.kill()
        rival.wait()


# -- planted on real ranks ---------------------------------------------------------------------------

TRAIN = """
import time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
dist.init_process_group("gloo")
rank = dist.get_rank()
def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end: pass
def lose(where):
    burn({burn})
    time.sleep({usual})
    if rank == 2 and {where!r} in (where, "everything"): time.sleep(0.12)
batch = 4 if rank == 2 and {where!r} == "batch" else 1
class Data(Dataset):
    def __len__(self): return {steps} * batch
    def __getitem__(self, i):
        lose("input")
        return torch.randn(100)
class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        lose("backward")
        time.sleep({each} * len(gradient))
        return gradient
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(100, 100), torch.nn.Linear(100, 100)
    def forward(self, x):
        lose("forward")
        time.sleep({each} * len(x))
        return self.second(Wait.apply(self.first(x)))
class Slow(torch.optim.SGD):
    def step(self, closure=None):
        lose("optimizer")
        return super().step(closure)
there, here = torch.zeros(1 << 18), torch.zeros(1 << 18)
def to_device(x):
    end = time.perf_counter() + (0.12 if rank == 2 and {where!r} == "copy" else 0)
    while time.perf_counter() < end: here.copy_(there)
    return x.to(torch.float64).to(torch.float32)
model = torch.nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.05)
optimizer = Slow(model.parameters(), lr=0.1)
for x in DataLoader(Data(), batch_size=batch):
    optimizer.zero_grad()
    model(to_device(x)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def train(pool: WorkerPool, where: str, burn: float = 0.002, usual: float = 0.0, each: float = 0.0) -> Slow:
    """each: seconds that a sample takes in forward and again in backward."""
    cell = TRAIN.format(where=where, burn=burn, usual=usual, each=each, steps=14)
    pool.run_cell(cell, trace=True, screen=NullScreen())
    found = slow(pool.timings())
    assert found is not None
    return found


@pytest.mark.every(3)
@needs_recorder
@pytest.mark.parametrize(
    ("where", "recorded", "traced"),
    [
        ("input", INPUT, INPUT),
        ("copy", AFTER, COPY),
        ("forward", FORWARD, FORWARD),
        ("backward", BACKWARD, BACKWARD),
        ("optimizer", OPTIMIZER, OPTIMIZER),
    ],
)
def test_what_makes_one_of_four_ranks_late_is_found(pool: WorkerPool, where: str, recorded: str, traced: str) -> None:
    found = train(pool, where)
    assert (found.rank, found.cause.what) == (2, recorded), found.cause.by_part
    answer = program(pool.trace().data["traceEvents"])
    assert answer.late is not None
    assert answer.why is not None
    assert (answer.late.rank, answer.why.what) == (2, traced), answer.why.by_part


@needs_recorder
def test_of_equal_ranks_none_is_named_anywhere(pool: WorkerPool) -> None:
    """Also not by a figure, a panel or the collectives: there is one verdict."""
    cell = TRAIN.format(where="nobody", burn=0.001, usual=0.001, each=0.0, steps=32)  # so many also if a part differs
    pool.run_cell(cell, trace=True, cell=4, screen=NullScreen())
    found = pool.timings()
    number = typical(found)
    assert number is not None
    judged = verdict(found)
    assert judged is not None
    assert (judged.slow, judged.evidence.known) == (None, True)
    (words,) = judged.describe()
    assert re.fullmatch(r"no rank is slower than noise \(± [\d.]+ .?s over 30 steps\)", words)
    shown = draw_timings(found, number)
    # beside this step's own wait, where it is large
    assert [line.partition("; in this step ")[0] for line in shown.words.splitlines()].count(words) == 1
    paces = {r: pool.ask(r, Question.of("pace", run=pool.last_run.number, since=0)) for r in range(NPROC)}  # type: ignore[union-attr]
    assert slowest({r: merged((), rows, 2000) for r, rows in paces.items()}) is None
    said = [*shown.words.splitlines(), *program(pool.trace().data["traceEvents"]).sentences()]
    said += pool.collectives().sentences()
    asks = 1 + cell.split("\n").index(next(line for line in cell.split("\n") if ".backward()" in line))
    for kinds in (program(pool.trace().data["traceEvents"]).kinds, pool.collectives().kinds):
        [reduced] = [kind for kind in kinds if kind.op.endswith("reduce")]
        assert list(reduced.places) == [(4, asks)], "the buckets are DDP's, and that line asks for them"
    assert [line for line in said if re.match(r"rank \d|over \d+ steps|cause", line)] == []


SHARES = """
import os, subprocess, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
cores = os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(cores) if dist.get_rank() else max(cores)})
rivals = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * dist.get_rank())]
class Net(torch.nn.Linear):
    def forward(self, x):
        end = time.thread_time() + 0.02
        while time.thread_time() < end: pass
        return super().forward(x)
try:
    model = torch.nn.parallel.DistributedDataParallel(Net(10, 10))
    for _ in range(15): model(torch.randn(4, 10)).sum().backward()
finally:
    for rival in rivals: rival.kill(); rival.wait()
    os.sched_setaffinity(0, cores)
dist.destroy_process_group()
"""


@needs_recorder
def test_a_rank_that_shares_its_core_for_a_moment_is_not_called_slow() -> None:
    """Two processes take two thirds of it, so that each of its steps is three times as long."""
    if on_rank_marks.core_wait() is None or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one core, or this system counts no waits for it")
    with warm.pool(2) as made:
        made.run_cell(SHARES, screen=NullScreen())
        found = made.timings()
    first, last = found.steps[1][1].queued, found.steps[1][-1].queued
    assert first is not None
    assert last is not None
    assert last[0] - first[1] > 0.2e9
    judged = verdict(found)
    assert judged is not None
    assert (judged.slow, judged.evidence.known) == (None, True), judged.describe()


@needs_recorder
def test_a_panel_marks_the_rank_that_timings_names(pool: WorkerPool) -> None:
    found = train(pool, "optimizer")
    paces = {r: pool.ask(r, Question.of("pace", run=pool.last_run.number, since=0)) for r in range(NPROC)}  # type: ignore[union-attr]
    assert found.rank == slowest({r: merged((), rows, 2000) for r, rows in paces.items()}) == 2


@needs_recorder
def test_a_machine_on_which_everything_takes_longer_is_found(pool: WorkerPool) -> None:
    found = train(pool, "everything", usual=0.02)
    assert (found.rank, found.cause.what) == (2, MACHINE), (found.cause.by_part, found.cause.factor)
    assert 2 < found.cause.factor < 9
    assert found.cause.inputs == 1
    assert found.describe()[1].endswith("times as long, with inputs no larger than the others'")
    answer = program(pool.trace().data["traceEvents"])
    assert answer.why is not None
    assert (answer.why.rank, answer.why.what) == (2, MACHINE), (answer.why.by_part, answer.why.factor)


@needs_recorder
def test_a_larger_batch_on_one_of_four_ranks_is_more_work_and_not_the_machine(pool: WorkerPool) -> None:
    found = train(pool, "batch", each=0.03)
    assert (found.rank, found.cause.what) == (2, BATCH), (found.cause.by_part, found.cause.describe())
    assert found.cause.inputs == 4
    assert "Rank 2's inputs have 4.00 times as many elements as the others'" in found.describe()[1]
    assert all(s.inputs == (400 if r == 2 else 100) for r, some in pool.timings().steps.items() for s in some)


HAND = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(6):
    if rank == 1: time.sleep(0.05)
    {call}
dist.destroy_process_group()
"""
CALLS = {
    "collectives by hand": "dist.all_reduce(torch.ones(4))",
    "asynchronous ones": "works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]; "
    "[w.wait() for w in works]",
    "functional ones, of tensor parallel": "import torch.distributed._functional_collectives as f; "
    "f.all_reduce(torch.ones(4), 'sum', dist.group.WORLD) + 1",
}


@needs_recorder
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_without_a_trace_the_late_rank_of_any_program_is_known(pool: WorkerPool, call: str) -> None:
    pool.run_cell(HAND.format(call=call), cell=4, screen=NullScreen())
    found = pool.collectives()
    lines = [] if "functional" in call else [(4, 7)]  # C++ calls the functional ones
    assert (list(found.kinds[0].places), found.waits_at[0]) == (lines, lines)
    assert found.late is not None
    assert found.late.rank == 1
    assert found.why is not None
    assert found.why.what == OWN
    assert {k.op for k in found.kinds} == {"all_reduce"}
    assert found.kinds[0].count == 6 * (2 if "works" in call else 1)
    assert found.kinds[0].last[1] >= 5
    for rank in (0, 2, 3):
        assert found.ranks[rank].waiting > 6 * 0.03e9
    assert found.ranks[1].idle > found.ranks[0].idle, "it sleeps"
    pool.run_cell("1 + 1", screen=NullScreen())
    assert "collectives from In[4]: 4 ranks" in pool.collectives().sentences()[0]


def test_where_no_collective_was_called_that_is_said(pool: WorkerPool) -> None:
    pool.restart()
    with pytest.raises(nbddp.BadInput, match="no collective has been recorded; call some in a %%ddp cell first"):
        pool.collectives()
    pool.run_cell(HAND.format(call="dist.barrier()"), timings=False, screen=NullScreen())
    with pytest.raises(nbddp.BadInput, match="no collective has been recorded"):
        pool.collectives()


def test_inputs_are_counted_and_long_or_endless_ones_are_not_gone_through() -> None:
    """Every step of every DDP model pays for the count."""
    seven = ({"x": torch.ones(3), "mask": None}, [torch.ones(2, 2), "words"])
    within_itself: list[Any] = [torch.ones(2)]
    within_itself.append(within_itself)
    read: list[int] = []

    class Long(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            for i in range(1_000_000):
                read.append(i)
                yield i

    assert on_rank.elements(seven) == 7
    assert [on_rank.elements(found) for found in ((), [1, "a"], within_itself, Long())] == [None] * 4
    assert len(read) <= on_rank.VALUES + 1
