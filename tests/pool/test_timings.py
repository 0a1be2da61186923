"""DDP's steps are recorded without changing them: real training on real ranks, and the figure that tells of it."""

from __future__ import annotations

import contextlib
import re
import struct
import sys
import textwrap
import types
from dataclasses import replace
from typing import Any

import pytest

import nbddp
from nbddp.analysis.steps import Bucket, Recording, Step
from nbddp.analysis.wait_time import straggler, transfers, typical
from nbddp.capabilities.timings import on_rank_gpu_clock
from nbddp.capabilities.timings.analysis import analysed
from nbddp.capabilities.timings.document import timeline
from nbddp.capabilities.timings.figure import draw_timings
from nbddp.capabilities.timings.on_rank import RING, Recorder, _Notes
from nbddp.capabilities.timings.on_rank import now as recorder_now
from nbddp.capabilities.timings.on_rank_gpu_clock import DeviceClock, GpuMark
from nbddp.capabilities.timings.on_rank_marks import StepMarks, Tally, names_of, told
from nbddp.capabilities.timings.text import heading
from nbddp.figures.figure import DescribedFigure
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.kernels import Kernel
from tests.pool.faults import LAZY, NO_LAZY, needs_lazy, needs_recorder
from tests.unit.test_trace import assert_in_order

TRAIN = """
import copy, hashlib, os, pickle, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
        self.spare = torch.nn.Linear(64, 64)
    def forward(self, x):
        return {{"out": self.body(x)}}
net = Net()
if not {unused}: net.spare.requires_grad_(False)
model = DDP(net, bucket_cap_mb=0.03, {options})
{hook}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def loss(step):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x)["out"].square().mean()
def train():
    for step in range(6):
        optimizer.zero_grad()
        {step}
        optimizer.step()
{around}
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.module.parameters())).hexdigest()
dist.destroy_process_group()
digest
"""
MODES: dict[str, dict[str, str]] = {
    "plain": {},
    "gradients as bucket views": {"options": "gradient_as_bucket_view=True"},
    "static graph": {"options": "static_graph=True"},
    "unused parameters": {"options": "find_unused_parameters=True", "unused": "True"},
    "fp16 compression": {"hook": "model.register_comm_hook(None, default_hooks.fp16_compress_hook)"},
    "PowerSGD": {
        "options": "", "hook": "state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, random_seed=0)\n"
        "model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)",
    },
    "a hook of one's own": {
        "hook": "def mine(state, bucket):\n    work = dist.all_reduce(bucket.buffer().div_(3), async_op=True)\n"
        "    return work.get_future().then(lambda f: f.value()[0])\nmodel.register_comm_hook(None, mine)",
    },
    "no_sync": {"step": "with model.no_sync(): loss(step).backward()\n        loss(step + 50).backward()"},
    "lazy buckets": {"options": "lazy_bucket_allocation=True"},
    "lazy buckets and views": {"options": "lazy_bucket_allocation=True, gradient_as_bucket_view=True"},
    "backward is ended by the program": {
        "hook": "model.require_manual_backward_finalization = True",
        "step": "loss(step).backward(); model.finalize_backward()",
    },
    "join": {"around": "with Join([model]):\n    for step in range(3 + rank):\n        optimizer.zero_grad()\n"
             "        loss(step).backward()\n        optimizer.step()"},
}  # fmt: skip


def program(mode: str) -> str:
    given = {"options": "", "hook": "", "unused": "False", "step": "loss(step).backward()", "around": "train()"}
    code = TRAIN.format(**{**given, **MODES[mode]})
    return code.replace("bucket_cap_mb=0.03", "bucket_cap_mb=25") if mode == "PowerSGD" else code


@pytest.mark.parametrize("mode", MODES)
def test_recording_changes_no_bit_of_the_result(pool: WorkerPool, mode: str) -> None:
    code = program(mode)
    if not LAZY and ("lazy" in code or "finalize" in code):
        pytest.skip(NO_LAZY)
    pool.ensure(LaunchSpec())
    plain = list(pool.run_cell(code, want_value=True, timings=False, screen=NullScreen()))
    recorded = list(pool.run_cell(code, want_value=True, screen=NullScreen()))
    assert recorded == plain
    found = pool.timings()
    number = typical(found)
    assert number is not None
    step = found.step(number)
    if mode != "join":
        assert len(found.numbers()) == (12 if mode == "no_sync" else 6)
    assert all(s.forward[0] < s.forward[1] <= s.backward[0] <= s.backward[1] <= s.backward[2] for s in step.values())
    assert all(s.optimizer and s.backward[2] <= s.optimizer[0] < s.optimizer[1] for s in step.values())
    for s in step.values():
        count = {"PowerSGD": 1, "unused parameters": 4}.get(mode, 3)
        assert len(s.buckets) == count, [(b.bytes, b.names) for b in s.buckets]
        assert all(b.ready <= b.sent < b.done for b in s.buckets)
    if mode == "no_sync":
        assert [found.step(n)[0].synced for n in found.numbers()] == [False, True] * 6
        assert found.step(0)[0].buckets == ()
    if mode == "plain":
        names = [name for b in step[0].buckets for name in b.names]
        assert sorted(names) == sorted(f"body.{i}.{kind}" for i in range(6) for kind in ("weight", "bias"))
        assert step[0].buckets[0].names == ("body.5.bias", "body.5.weight", "body.4.bias", "body.4.weight")
        assert [found.step(n)[0].rebuilt for n in found.numbers()] == [True] + [False] * 5
        assert [found.step(n)[0].rebuilds for n in found.numbers()] == [False, True] + [False] * 4
        assert number > 1
    if mode == "static graph":
        assert [found.step(n)[0].rebuilds for n in found.numbers()] == [False] * 2 + [True] + [False] * 3
    if mode in (
        "plain",
        "static graph",
        "no_sync",
        "lazy buckets",
        "lazy buckets and views",
        "backward is ended by the program",
    ):  # one bucket before the rebuild, then three
        counts = [len(s.buckets) for s in found.steps[0] if s.synced]
        assert counts == [1 if s.rebuilt else 3 for s in found.steps[0] if s.synced]
    if mode == "unused parameters":
        assert not any(s.rebuilt or s.rebuilds for n in found.numbers() for s in found.step(n).values())


@needs_lazy
def test_what_a_program_does_before_it_ends_backward_overlaps_the_buckets(pool: WorkerPool) -> None:
    """Rank 0 waits 0.1 s for rank 1's gradients in `finalize_backward`, and has done something else for 0.1 s."""
    mode = program("backward is ended by the program")
    code = mode.replace("optimizer.zero_grad()", "optimizer.zero_grad(); time.sleep(0.2 * rank)", 1)
    pool.run_cell(code.replace("; model.final", "; time.sleep(0.1 * (1 - rank)); model.final"), screen=NullScreen())
    found = pool.timings()
    assert found.numbers() == list(range(6))
    for number in found.numbers()[3:]:  # the rebuild of the buckets, where ranks wait, shifts the two before
        first = found.step(number)[0]
        start, computed, done = first.backward
        assert computed - start > 90_000_000
        assert done - computed > 40_000_000, "it has waited"
        assert max(b.done for b in first.buckets) - start > 140_000_000
        assert first.optimizer is not None
        assert first.optimizer[0] - done < 40_000_000
        assert_in_order(first)


@needs_lazy
def test_backward_may_be_ended_within_itself(pool: WorkerPool) -> None:
    """By a hook of what the model's input is made of, once DDP does not say that it must be called after backward."""
    around = """
model.require_manual_backward_finalization = True
def at_input(grad):
    if not model.should_finalize_after_backward: done.append(model.finalize_backward())
done = []
for step in range(6):
    optimizer.zero_grad()
    table = torch.randn(8, 64, requires_grad=True)
    table.register_hook(at_input)
    model(table * 1)["out"].square().mean().backward()
    if step == 0: model.finalize_backward()
    optimizer.step()
"""
    code = program("plain").replace("\ntrain()\n", around)
    code = code.replace("\ndigest\n", "\nlen(done)\n")
    assert list(pool.run_cell(code, want_value=True, screen=NullScreen())) == [5, 5]
    found = pool.timings()
    assert found.numbers() == list(range(6))
    for step in (s for some in found.steps.values() for s in some):
        assert step.optimizer
        assert step.buckets
        assert_in_order(step)


def test_model_is_pickled_and_copied_as_before_and_the_copy_is_recorded(pool: WorkerPool) -> None:
    around = (
        "train()\nfirst = model\nagain = pickle.loads(pickle.dumps(model)); model = copy.deepcopy(first)\n"
        "model.module.double().float()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\ntrain()"
    )
    code = program("plain").replace("\ntrain()\n", f"\n{around}\n")
    pool.run_cell(code.replace('return {"out": self.body(x)}', 'return {"out": self.body(x)}'), screen=NullScreen())
    found = pool.timings()
    assert len(found.numbers()) == 6
    assert found.model == "Net"


def test_pickling_keeps_the_users_own_hook(pool: WorkerPool) -> None:
    code = program("fp16 compression").replace(
        "\ndigest\n", "\nmodel._comm_hooks[0][0].__name__, len(model._comm_hooks)\n"
    )
    assert list(pool.run_cell(code, want_value=True, screen=NullScreen())) == [("fp16_compress_hook", 1)] * 2


def test_group_may_end_right_after_backward(pool: WorkerPool) -> None:
    """What gloo's thread does for the recorder holds no group: its end there would abort the process."""
    code = """
        import torch, torch.distributed as dist
        def train():
            dist.init_process_group("gloo")
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 5))
            model(torch.randn(20, 10)).sum().backward()
            del model
            dist.destroy_process_group()
        for _ in range(40):
            train()
    """
    pool.run_cell(textwrap.dedent(code), screen=NullScreen())
    assert all(b.done for s in pool.timings().step(0).values() for b in s.buckets)


@pytest.mark.more
def test_no_step_contradicts_itself(pool: WorkerPool) -> None:
    """100 steps; in one of ten or more the note of a bucket's end is taken only after the optimizer has begun."""
    pool.run_cell(program("plain").replace("range(6)", "range(100)"), screen=NullScreen())
    found = pool.timings()
    assert len(found.numbers()) == 100
    steps = [s for some in found.steps.values() for s in some]
    assert all(s.buckets and s.optimizer for s in steps)
    for made in steps:
        assert_in_order(made)


def test_optimizer_that_steps_within_backward_is_not_drawn_after_it(pool: WorkerPool) -> None:
    within = """
own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters() if p.requires_grad}
for p in own:
    p.register_post_accumulate_grad_hook(lambda p: own[p].step())
for step in range(4):
    loss(step).backward()
del own, p
"""
    pool.run_cell(program("plain").replace("\ntrain()\n", within), screen=NullScreen())
    found = pool.timings()
    assert [s.optimizer for some in found.steps.values() for s in some] == [None] * 8


def test_the_last_rank_of_a_step_is_known_and_waiting_told_from_moving(pool: WorkerPool) -> None:
    code = program("plain").replace("optimizer.zero_grad()", "optimizer.zero_grad(); time.sleep(0.2 * rank)", 1)
    pool.run_cell(code, screen=NullScreen())
    found = pool.timings()
    number = typical(found)
    assert number is not None
    late = straggler(transfers(found.step(number)))
    assert late is not None
    assert late.rank == 1
    shown = draw_timings(found, number)
    assert " for the last one to start a bucket" in shown.words
    assert "whether a rank is slower is not known: 4 steps after the first two" in shown.words, "nobody is blamed"
    assert shown.words.startswith(f"step {number} of Net\n3 buckets, 98 KiB: ")
    assert "body.5.bias … body.4.weight (4)" in shown.words


def test_clocks_of_several_hosts_are_aligned(pool: WorkerPool) -> None:
    """Rank 1's clock is set 60 s ahead, and the pool is told that the ranks are on two machines."""
    ahead = (
        "import nbddp.capabilities.timings.on_rank as r\nif rank == 1: r.now = lambda: "
        "time.perf_counter_ns() + 60_000_000_000"
    )
    code = program("plain").replace("net = Net()", f"{ahead}\nnet = Net()", 1)
    pool.run_cell(code, screen=NullScreen())
    apart = pool.timings()
    assert min(s.start for s in apart.steps[1]) - max(s.end for s in apart.steps[0]) > 30e9
    placed = pool.placed()
    hosts = tuple(replace(placed.nodes[0], index=i, host=f"machine{i}") for i in range(2))
    try:
        pool.group.topology = replace(placed, nodes=hosts)
        found = pool.timings()
    finally:
        pool.group.topology = placed
        pool.run_cell("r.now = time.perf_counter_ns", screen=NullScreen())
    assert 0 < found.residual < 1e8
    step = found.step(found.numbers()[-1])
    assert max(s.start for s in step.values()) < min(s.end for s in step.values()), "the ranks' steps overlap"
    assert "The ranks' clocks agree within " in draw_timings(found, found.numbers()[-1]).words


def test_without_timings_nothing_is_recorded(pool: WorkerPool) -> None:
    pool.restart()
    pool.run_cell(program("plain"), timings=False, screen=NullScreen())
    with pytest.raises(nbddp.BadInput, match="no DDP step has been recorded"):
        pool.timings()


def test_timings_in_a_notebook(four: Kernel) -> None:
    empty = four.run("%ddp restart\n%ddp timings")
    assert "train a DistributedDataParallel model in a %%ddp cell first" in empty.evalue
    assert four.run(f"%%ddp\n{program('plain')}").ok
    shown = four.run("%ddp timings")
    assert shown.ok, shown.error
    bundle = shown.displays[-1]
    assert "image/png" in bundle
    assert "of Net\n3 buckets, 98 KiB: " in bundle["text/plain"]
    at_once = four.run(f"%%ddp --timings\n{program('plain')}").displays[-1]
    assert "of Net\n3 buckets, 98 KiB: " in at_once["text/plain"]
    first = four.run("%ddp timings --step 0").displays[-1]["text/plain"]
    assert "This is the first exchange: DDP rebuilds its buckets" in first
    assert four.run("%ddp timings --step 99").evalue == "there is no step 99; steps 0 to 5 are recorded on every rank"


@needs_recorder
def test_timings_of_a_program_without_ddp_are_those_of_its_collectives(four: Kernel) -> None:
    four.run("%ddp restart")
    by_hand = "import torch, torch.distributed as dist\ndist.init_process_group()\ndist.all_reduce(torch.ones(4))"
    assert four.run(f"%%ddp\n{by_hand}\ndist.destroy_process_group()").ok
    shown = four.run("%ddp timings")
    assert shown.ok, shown.error
    bundle = shown.displays[-1]
    assert "image/png" in bundle
    assert re.match(r"collectives: 4 ranks, \S+ \S+: the ranks compute for ", bundle["text/plain"])
    assert re.search(r"\nall_reduce +ranks 0–3 +1 +rank \d: 1 of 1 ", bundle["text/plain"])
    assert four.run(f"%%ddp\n{program('plain')}").ok
    assert "of Net\n3 buckets, 98 KiB: " in four.run("%ddp timings").displays[-1]["text/plain"]
    asked = four.run("%ddp timings --collectives").displays[-1]["text/plain"]
    assert asked.startswith("collectives: 4 ranks, ")
    refused = four.run("%ddp timings --collectives --step 3")
    assert refused.evalue == "--step selects a DDP step, but --collectives shows no steps; remove one of the two"


@pytest.mark.more
def test_steps_of_an_older_cell_are_told_as_such(four: Kernel) -> None:
    trained = four.run(f"%%ddp\n{program('plain')}")
    assert trained.ok, trained.error
    own = four.run("%ddp timings").displays[-1]["text/plain"]
    assert "In[" not in own, "a number would differ in a saved notebook whose cells were run in another order"
    four.run("1 + 1")
    assert "In[" not in four.run("%ddp timings").displays[-1]["text/plain"], "no %%ddp cell has run since"
    other = four.run("%%ddp\n1 / (rank - 2)")
    assert not other.ok
    expected = (
        f" of Net from In[{trained.number}]; the last cell, In[{other.number}], recorded none\n3 buckets, 98 KiB: "
    )
    assert expected in four.run("%ddp timings").displays[-1]["text/plain"]
    without = four.run("%%ddp --timings\n1 + 1")
    assert without.ok, without.error
    expected = f" of Net from In[{trained.number}]; the last cell, In[{without.number}], recorded none\n"
    assert expected in without.displays[-1]["text/plain"]


def test_ranks_that_a_cell_left_out_do_not_lend_it_older_steps(pool: WorkerPool) -> None:
    pool.run_cell(program("plain"), screen=NullScreen())
    alone = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        model(torch.ones(2, 3)).sum().backward()
        dist.destroy_process_group()
    """
    pool.run_cell(textwrap.dedent(alone), ranks=[1], screen=NullScreen())
    found = pool.timings()
    assert (found.ranks, found.missing, found.model, found.origin) == ([1], [0], "Linear", None)
    shown = draw_timings(found, 0)
    assert "This step was not recorded on rank 0." in shown.words
    pool.run_cell("pass", screen=NullScreen())
    assert heading(analysed(pool.timings(), 0)) == "step 0 of Linear from an earlier cell; the last cell recorded none"


def test_steps_of_a_called_function_are_told_as_such(pool: WorkerPool) -> None:
    def train() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        model(torch.ones(2, 3)).sum().backward()
        dist.destroy_process_group()

    pool.run_cell(program("plain"), screen=NullScreen())
    pool.call(train)
    assert heading(analysed(pool.timings(), 0)) == "step 0 of Linear from a function that Pool.call ran"


LINES = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    loss = model(torch.ones(2, 3)).sum()
    if step % 2:
        loss.backward()
    else:
        loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_a_phase_has_the_line_of_the_cell_that_asked_for_it_where_that_is_one(pool: WorkerPool) -> None:
    """Some steps note it. Of those between it is known if it is the same in all; backward has two lines here."""
    pool.run_cell(LINES, cell=4, screen=NullScreen())
    steps = pool.timings().steps[1]
    assert [s.line_of("forward") for s in steps] == [(4, 6)] * 100
    assert [s.line_of("optimizer") for s in steps] == [(4, 11)] * 100
    noted = [s.line_of("backward") for s in steps]
    assert noted[:8] == [(4, 10), (4, 8)] * 4
    assert noted[8:64] == [None] * 56
    assert noted[64] == (4, 10)
    for number, line in ((70, None), (3, (4, 8))):
        shown = timeline(analysed(pool.timings(), number))
        cells = {mark.words.split("\n")[0]: mark.cells for mark in shown.marks}
        assert (cells["rank 1 · forward"], cells["rank 1 · backward"]) == ([(4, 6)], [line] if line else [])


def test_memory_is_bounded() -> None:
    recorder = Recorder()
    model: Any = types.SimpleNamespace(device=None, order=[])
    for i in range(RING + 10):
        recorder.steps.append(StepMarks(model, i, run=1, cell=None, synced=True))
    assert len(recorder.steps) == RING


@pytest.mark.parametrize(
    ("orders", "sizes", "names"),
    [
        (["ba"], [2, 3], [["b"], ["a"]]),
        (["ba"], [5], [["b", "a"]]),
        (["ba", "ab"], [3, 2], [["a"], ["b"]]),
        (["ba"], [4, 1], [[], []]),
        (["ba"], [2], [[]]),
        ([""], [], []),
    ],
)
def test_buckets_get_the_names_that_fit(orders: list[str], sizes: list[int], names: list[list[str]]) -> None:
    assert names_of([list(order) for order in orders], {"a": 3, "b": 2}, sizes) == names


class Gpu:
    """A stand-in for torch.cuda: streams that work behind the host's back. Times are nanoseconds."""

    def __init__(self) -> None:
        self.now, self.through, self.broken, self.capturing, self.made = 0, {}, False, False, 0  # type: ignore[var-annotated]

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        self.made += 1
        return Event(self)

    def Stream(self, device: str) -> str:
        return f"own stream of {device}"

    def current_stream(self, device: str) -> str:
        return f"stream of {device}"

    def stream(self, stream: str) -> Any:
        self.entered = stream
        return contextlib.nullcontext()

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def queue(self, stream: str, work: int) -> None:
        self.through[stream] = max(self.now, self.through.get(stream, 0)) + work


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self, stream: str) -> None:
        self.at = max(self.gpu.now, self.gpu.through.get(stream, 0))

    def query(self) -> bool:
        if self.gpu.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.at <= self.gpu.now

    def synchronize(self) -> None:
        self.gpu.now = max(self.gpu.now, self.at)

    def elapsed_time(self, other: Event) -> float:
        """float32 milliseconds, as CUDA's."""
        return struct.unpack("f", struct.pack("f", (other.at - self.at) / 1e6))[0]  # type: ignore[no-any-return]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=found))
    monkeypatch.setattr(on_rank_gpu_clock, "now", lambda: found.now)
    return found


def test_marks_are_when_the_stream_was_there_told_on_the_hosts_clock(gpu: Gpu) -> None:
    clock, at = DeviceClock(), []
    gpu.now = 1_000_000
    for work in (30_000_000, 20_000_000):  # the host hands over 50 ms of work in no time
        gpu.queue("stream of cuda:0", work)
        at.append(clock.mark("cuda:0"))
    assert gpu.now == 1_000_000, "nobody waited"
    assert [told(mark) for mark in at] == [31_000_000, 51_000_000]
    assert gpu.now == 51_000_000


def test_a_day_later_marks_are_as_exact(gpu: Gpu) -> None:
    """float32 milliseconds are 8 ms apart after a day; a new base is near."""
    clock = DeviceClock()
    clock.mark("cuda:0")
    gpu.now += 86_400_000_000_000 + 3_456_789
    late = clock.mark("cuda:0")
    assert abs(late.read() - gpu.now) > 1_000_000, "this is why"
    clock.begin("cuda:0")
    mark = clock.mark("cuda:0")
    gpu.now += 5_000_000_000
    assert mark.read() == gpu.now - 5_000_000_000


def test_events_are_used_again_and_none_that_is_not_past_is_read(gpu: Gpu) -> None:
    clock, marks = DeviceClock(), []
    for _ in range(2000):
        clock.begin("cuda:0")
        gpu.queue("stream of cuda:0", 1_000)
        marks.append(clock.mark("cuda:0"))
        gpu.now += 1_000
    assert gpu.made < 10
    assert [told(mark) for mark in marks] == [1_000 * (i + 1) for i in range(2000)]
    gpu.queue("stream of cuda:0", 1_000_000_000)
    mark = clock.mark("cuda:0")
    clock.begin("cuda:0")
    assert mark.event is not None
    gpu.broken = True
    clock.begin("cuda:0")  # the program's own call meets the error


def begun_step() -> StepMarks:
    """A step that is in backward."""
    model: Any = types.SimpleNamespace(device="cuda:0", order=[])
    step = StepMarks(model, 0, run=1, cell=None, synced=True)
    step.begun = 1
    return step


@pytest.mark.parametrize("fails", [False, True])
def test_a_bucket_on_nccl_ends_when_its_stream_is_through_and_delays_no_other(gpu: Gpu, fails: bool) -> None:
    class Future:
        def done(self) -> bool:
            return True

        def wait(self) -> None:
            if fails:
                raise RuntimeError("NCCL communicator was aborted")
            gpu.queue(gpu.entered, 7_000_000)  # that stream waits for the collective

    notes = _Notes(DeviceClock(), in_order=True)
    notes.step = begun_step()
    tensor = types.SimpleNamespace(is_cuda=True, device="cuda:0", numel=lambda: 3, element_size=lambda: 4)
    bucket = notes.note(tensor)
    assert bucket is not None
    assert bucket.queued
    future = Future()
    assert notes.sent(bucket, future) is future, "what DDP waits for is the hook's own"
    assert gpu.entered == "own stream of cuda:0"
    assert told(bucket.done[0]) - told(bucket.sent) == (0 if fails else 7_000_000)
    assert "stream of cuda:0" not in gpu.through


def test_what_gloo_moves_for_a_gpu_ends_on_the_host(gpu: Gpu) -> None:
    called: list[Any] = []
    future = types.SimpleNamespace(done=lambda: False, add_done_callback=called.append)
    notes = _Notes(DeviceClock(), in_order=False)
    notes.step = begun_step()
    bucket = notes.note(types.SimpleNamespace(is_cuda=True, device="cuda:0", numel=lambda: 3, element_size=lambda: 4))
    assert bucket is not None
    notes.handed_over(bucket, future)
    assert (bucket.done, bucket.queued) == ([], False)
    before = recorder_now()
    called[0](future)
    assert before <= told(bucket.done[0]) <= recorder_now()
    assert len(bucket.done) == 1


def test_a_step_that_is_captured_in_a_cuda_graph_is_not_recorded(gpu: Gpu) -> None:
    sys.modules["torch"].Tensor = GpuMark  # type: ignore[attr-defined]  # what its inputs are not
    step = begun_step()
    model = types.SimpleNamespace(device="cuda:0", begin=lambda *_: step)
    recorder, group = Recorder(), types.SimpleNamespace(step=None, model=model, tally=Tally())
    ddp = types.SimpleNamespace(reducer=group, require_backward_grad_sync=True)
    recorder._groups = types.SimpleNamespace(get=lambda _: group)  # type: ignore[assignment]
    gpu.capturing = True
    assert recorder._begins(ddp) is None
    gpu.capturing = False
    assert recorder._begins(ddp) == (group, step)
    assert isinstance(step.entered, GpuMark)


def recording(ranks: int, steps: int) -> Recording:
    def step(rank: int, n: int) -> Step:
        at = n * 100_000_000 + rank * 2_000_000
        buckets = tuple(
            Bucket(i, 1 << 20, at + s, at + s, at + s + 15_000_000, (f"p{i}",))
            for i, s in enumerate((20_000_000, 30_000_000))
        )
        ends = (at + 10_000_000, at + 40_000_000, at + 50_000_000)
        return Step(n, (at, at + 10_000_000), ends, (at + 50_000_000, at + 60_000_000), buckets, True, n == 0)

    return Recording({r: [step(r, n) for n in range(steps)] for r in range(ranks)}, model="Net")


@pytest.mark.every(4)
@pytest.mark.parametrize(("ranks", "steps"), [(1, 1), (2, 12), (16, 100), (64, 50)])
def test_figure_of_any_size_is_drawn_and_says_itself(ranks: int, steps: int) -> None:
    made = recording(ranks, steps)
    number = typical(made)
    assert number is not None
    shown = draw_timings(made, number)
    assert shown.png().startswith(b"\x89PNG")
    assert "2 buckets, 2.0 MiB: " in shown.words
    assert ("for the last one to start a bucket" in shown.words) == (ranks > 1)
    assert ("16 of 64 ranks are drawn" in shown.words) == (ranks > 16)


def rows_of(shown: DescribedFigure) -> tuple[list[str], list[str]]:
    """The names of the rows of a timeline, and what else is written on it."""
    axes = shown.figure.axes[0]
    return [t.get_text() for t in axes.get_yticklabels()], [t.get_text() for t in axes.texts]


@pytest.mark.parametrize("late", [3, 30])
def test_of_40_ranks_16_are_drawn_and_the_slow_one_among_them(late: int) -> None:
    steps = recording(1, 24).steps[0]
    shift, slower = 3_000_000, 15_000_000

    def slow(step: Step) -> Step:
        start, computed, done = step.backward
        buckets = tuple(replace(b, ready=b.ready + slower, sent=b.sent + slower) for b in step.buckets)
        return replace(step, forward=(step.start, step.forward[1] + slower), buckets=buckets,
                       backward=(start + slower, computed + 2 * shift, done))  # fmt: skip

    made = Recording({r: [slow(s) for s in steps] if r == late else steps for r in range(40)}, model="Net")
    shown = draw_timings(made, 5)
    assert re.search(rf"\nover \d+ steps rank {late} takes .* buckets last, in this step 2 of 2, by ", shown.words)
    rows, texts = rows_of(shown)
    expected = [*range(16)] if late < 16 else [*range(15), late]
    assert rows == [f"rank {r}" for r in expected]
    assert "16 of 40 ranks are drawn" in texts
    assert "16 of 40 ranks are drawn" in shown.words.splitlines()


def test_where_all_ranks_are_drawn_nothing_is_said_of_it() -> None:
    shown = draw_timings(recording(16, 4), 2)
    assert "are drawn" not in shown.words
    assert not any("are drawn" in text for text in rows_of(shown)[1])
