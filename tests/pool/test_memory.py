"""Where the ranks' memory is: real models against closed forms, and the figure that tells of it."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

import nbddp
from nbddp.analysis.quantities import MOST, size
from nbddp.capabilities.memory.figure import draw_memory
from nbddp.capabilities.memory.on_rank import Memory
from nbddp.capabilities.memory.parts import table
from nbddp.errors import PoolNotRunning
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.run_spec import CELL, RunSpec
from tests.kernels import Kernel
from tests.pool.faults import needs_lazy
from tests.unit.test_memory import of

P = 3 * (64 * 64 + 64)  # parameters of the model below, in 6 tensors
MODEL = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
if not dist.is_initialized(): dist.init_process_group("gloo")
rank = dist.get_rank()
for name in ("model", "net", "optimizer", "kept", "t", "hidden", "view", "w"): globals().pop(name, None)
import gc; gc.enable()
net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
{model}
{optimizer}
def train():
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
train()
{after}
"""
ADAM, SGD = "optimizer = torch.optim.Adam(model.parameters())", "optimizer = torch.optim.SGD(model.parameters(), 0.1)"
MOMENTUM = "optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)"
WRAPPED, VIEWS = "model = DDP(net)", "model = DDP(net, gradient_as_bucket_view=True)"
PLAIN = "model = net"
# model, optimizer, what follows → parameters, module buffers, gradients, optimizer state, buckets
CASES: dict[str, tuple[tuple[str, str, str], tuple[int, int, int, int, int]]] = {
    "DDP and Adam": ((WRAPPED, ADAM, ""), (4 * P, 0, 4 * P, 8 * P + 4 * 6, 4 * P)),
    "DDP and momentum": ((WRAPPED, MOMENTUM, ""), (4 * P, 0, 4 * P, 4 * P, 4 * P)),
    "no state": ((WRAPPED, SGD, ""), (4 * P, 0, 4 * P, 0, 4 * P)),
    "gradients set to None": ((WRAPPED, SGD, "optimizer.zero_grad()"), (4 * P, 0, 0, 0, 4 * P)),
    "gradients are views of buckets": ((VIEWS, SGD, ""), (4 * P, 0, 4 * P, 0, 0)),
    "views set to None": ((VIEWS, SGD, "optimizer.zero_grad()"), (4 * P, 0, 0, 0, 4 * P)),
    "no DDP": ((PLAIN, ADAM, ""), (4 * P, 0, 4 * P, 8 * P + 4 * 6, 0)),
    "frozen": (("net[0].requires_grad_(False); model = DDP(net)", SGD, ""),
               (4 * P, 0, 8 * P // 3, 0, 8 * P // 3)),
    "tied and viewed": (("net.again = net[0].weight; model = DDP(net); view = net[1].weight[:3]", SGD, ""),
                        (4 * P, 0, 4 * P, 0, 4 * P)),
    "buffers": (("net.register_buffer('table', torch.ones(100)); model = DDP(net)", SGD, ""),
                (4 * P, 400, 4 * P, 0, 4 * P)),
    "double": (("net.double(); torch.set_default_dtype(torch.float64); model = DDP(net)", ADAM,
                "torch.set_default_dtype(torch.float32)"), (8 * P, 0, 8 * P, 16 * P + 8 * 6, 8 * P)),
    "in a list, in a dict": ((WRAPPED, SGD, "kept = {'all': [model]}; del model, net, optimizer"),
                             (4 * P, 0, 4 * P, 0, 4 * P)),
    "in an object": (
        (WRAPPED, ADAM, "class Trainer: pass\nt = Trainer(); t.a, t.b = model, optimizer; del model, net, optimizer"),
        (4 * P, 0, 4 * P, 8 * P + 4 * 6, 4 * P)),
    "only in a function": (
        (WRAPPED, ADAM, "def hide():\n    m, o = model, optimizer\n    return lambda: (m, o)\n"
         "hidden = hide(); del model, net, optimizer"), (4 * P, 0, 4 * P, 8 * P + 4 * 6, 4 * P)),
    "replaced but in a cycle": (
        (WRAPPED, ADAM, "import gc; gc.disable(); net.above = {'model': model}; del model, net, optimizer\n"
         "model = torch.nn.Linear(3, 1)"), (16, 0, 0, 0, 0)),
    "no module": (("w = torch.zeros(10, requires_grad=True); model = lambda x: w",
                   "optimizer = torch.optim.SGD([w], 0.1, momentum=0.9); del net", ""), (40, 0, 40, 40, 0)),
    "not trained yet": ((WRAPPED, ADAM, "model = DDP(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)]))"
                         "\ndel net, optimizer"), (4 * P, 0, 0, 0, 4 * P)),
}  # fmt: skip


LAZY = "lazy_bucket_allocation=True"  # torch 2.15: buckets in backward alone
FAILS = f"""
model = DDP(net, {LAZY}, bucket_cap_mb=0.01)
for fails in (False, False, True):
    hook = net[0].bias.register_hook(lambda g: 1 / 0 if fails else g)
    try: model(torch.ones(2, 64)).sum().backward()
    except ZeroDivisionError: pass
    hook.remove()
    model.zero_grad()
"""
PENDING = f"""
model = DDP(net, {LAZY})
model.require_manual_backward_finalization = True
for last in (False, False, True):
    model(torch.ones(2, 64)).sum().backward()
    if not last: model.finalize_backward()
"""
# model, what follows its training → gradients, buckets that are held, buckets that backward alone has
LAZY_CASES: dict[str, tuple[tuple[str, str], tuple[int, int, int]]] = {
    "trained": ((f"model = DDP(net, {LAZY})", "train(); train()"), (4 * P, 0, 4 * P)),
    "gradients set to None": ((f"model = DDP(net, {LAZY})", "train(); optimizer.zero_grad()"), (0, 0, 4 * P)),
    "gradients are views of buckets": ((f"model = DDP(net, {LAZY}, gradient_as_bucket_view=True)", "train()"),
                                       (4 * P, 0, 0)),
    "views set to None": ((f"model = DDP(net, {LAZY}, gradient_as_bucket_view=True)",
                           "train(); optimizer.zero_grad()"), (0, 0, 0)),
    "not trained yet": (("model = net", f"optimizer.zero_grad(); model = DDP(net, {LAZY})"), (0, 0, 4 * P)),
    "a backward that failed": (("model = net", f"optimizer.zero_grad()\n{FAILS}"),
                               (0, 2 * 4 * P // 3, 4 * P // 3)),
    "a backward that the program has not ended": (("model = net", f"optimizer.zero_grad()\n{PENDING}"),
                                                  (4 * P, 4 * P, 0)),
}  # fmt: skip


@needs_lazy
@pytest.mark.parametrize("case", LAZY_CASES)
def test_buckets_that_live_in_backward_alone_are_not_counted_as_held(pool: WorkerPool, case: str) -> None:
    (model, after), expected = LAZY_CASES[case]
    pool.run_cell(MODEL.format(model=model, optimizer=SGD, after=after), screen=NullScreen())
    found = pool.memory()
    assert [(r.gradients, r.buckets, r.passing) for r in found] == [expected] * 2
    said = f"in backward DDP holds another {size(expected[2])} of buckets (lazy_bucket_allocation), which count in the"
    assert (said in draw_memory(found).words) == bool(expected[2])


@pytest.mark.parametrize("case", CASES)
def test_parts_are_those_of_the_closed_forms(pool: WorkerPool, case: str) -> None:
    (model, optimizer, after), expected = CASES[case]
    pool.run_cell(MODEL.format(model=model, optimizer=optimizer, after=after), screen=NullScreen())
    found = pool.memory()
    assert [r.rank for r in found] == [0, 1]
    assert [r.parts for r in found] == [expected] * 2


def test_without_recording_buckets_are_known_from_the_parameters(pool: WorkerPool) -> None:
    pool.run_cell(MODEL.format(model=WRAPPED, optimizer=MOMENTUM, after=""), timings=False, screen=NullScreen())
    assert [r.parts for r in pool.memory()] == [(4 * P, 0, 4 * P, 4 * P, 4 * P)] * 2


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="torch 2.6 has no fully_shard on CPU")
def test_of_a_sharded_model_the_ranks_own_part_counts(pool: WorkerPool) -> None:
    shard = "from torch.distributed.fsdp import fully_shard; model = fully_shard(net)"
    pool.run_cell(MODEL.format(model=shard, optimizer=ADAM, after=""), screen=NullScreen())
    found = pool.memory()
    assert [r.parts for r in found] == [(2 * P, 0, 2 * P, 4 * P + 4 * 6, 0)] * 2


def test_peak_is_the_last_cells(pool: WorkerPool) -> None:
    small = MODEL.format(model=WRAPPED, optimizer=SGD, after="")
    pool.run_cell(small, screen=NullScreen())
    before = pool.memory()
    pool.run_cell("x = torch.ones(50_000_000 * (1 + rank)); del x", screen=NullScreen())
    big = pool.memory()
    assert [b.peak - a.peak > 150_000_000 * (1 + r) for r, (a, b) in enumerate(zip(before, big, strict=True))] == [
        True
    ] * 2
    assert all(r.kind == "cpu" and 0 < r.start < r.peak and not r.since_start for r in big)
    assert all(r.rest == r.peak - r.start - r.kept for r in big)
    pool.run_cell("1", screen=NullScreen())
    assert all(a.peak < b.peak - 150_000_000 for a, b in zip(pool.memory(), big, strict=True))


def test_ranks_without_a_model_say_what_to_do(pool: WorkerPool) -> None:
    pool.restart()
    with pytest.raises(nbddp.BadInput, match="no rank has a module or an optimizer; create them in a %%ddp cell first"):
        pool.memory()
    pool.run_cell("import torch, os\nif os.environ['RANK'] == '1': net = torch.nn.Linear(3, 4)", screen=NullScreen())
    assert [(r.rank, r.kept) for r in pool.memory()] == [(1, 64)]
    with pytest.raises(PoolNotRunning, match="no workers are running; start some with %ddp start"):
        WorkerPool(nproc=2).memory()


def test_memory_in_a_notebook(four: Kernel) -> None:
    assert four.run("%ddp restart").ok
    assert four.run("%ddp memory").evalue.startswith("no rank has a module or an optimizer")
    assert four.run(f"%%ddp\n{MODEL.format(model=WRAPPED, optimizer=ADAM, after='')}").ok
    shown = four.run("%ddp memory").displays[-1]
    assert "image/png" in shown
    assert shown["text/plain"].startswith(
        "memory of 4 ranks: each rank keeps 244 KiB: parameters 49 KiB, gradients 49 KiB, "
        "optimizer state 98 KiB, DDP buckets 49 KiB\nat the peak of the last cell the process held "
    )


def test_memory_after_a_cell_without_a_step_says_so(four: Kernel) -> None:
    trained = four.run(f"%%ddp\n{MODEL.format(model=WRAPPED, optimizer=ADAM, after='')}")
    assert "recorded step" not in four.run("%ddp memory").displays[-1]["text/plain"]
    other = four.run("%%ddp\n1 + 1")
    expected = (
        f"\nthe last recorded step is from In[{trained.number}]; "
        f"the last cell, In[{other.number}], recorded none, so this peak may not be that of a step\n"
    )
    assert expected in four.run("%ddp memory").displays[-1]["text/plain"]
    assert four.run("%%ddp --no-timings\ntrain()").ok, "an optimizer's step is known without recording"
    assert "recorded step" not in four.run("%ddp memory").displays[-1]["text/plain"]


@pytest.mark.every(4)
@pytest.mark.parametrize("count", [1, 2, 16, 24])
def test_figure_of_any_size_is_drawn_and_says_itself(count: int) -> None:
    shown = draw_memory([of(r) for r in range(count)])
    assert shown.png().startswith(b"\x89PNG")
    text = "activations and temporaries"
    most = "30 GiB" if count == 1 else f"30 GiB to {29 + count} GiB"
    assert f"at the peak of the last cell {most} more were allocated: {text}" in shown.words
    folded = f"16 of 24 ranks are drawn; overall: least 60 GiB (rank 0), median {72} GiB, most 83 GiB (rank 23)"
    assert (folded in shown.words) == (count == 24)
    (axes,) = shown.figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"rank {r}" for r in (*range(min(count, MOST - 1)), *range(max(count, MOST) - 1, count))]
    assert [f"rank {row[0]}" for row in table([of(r) for r in range(count)]).rows] == labels
    assert len(axes.get_legend().get_texts()) == 5


def test_no_text_of_the_figure_overlaps_another_or_is_cut() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for some in ([of(r) for r in range(24)], [of(0, "cpu", 31), of(1, "cpu", 100)], [of(0, "cpu", 999)]):
        figure = draw_memory(some).figure
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        drawn = [t for axes in figure.axes for t in (*axes.texts, *axes.get_xticklabels(), axes.xaxis.label)
                 if t not in axes.get_xticklabels() or t.get_position()[0] <= axes.get_xlim()[1]]  # fmt: skip
        texts = [*figure.texts, *drawn, *figure.axes[0].get_legend().get_texts()]
        boxes = [t.get_window_extent(canvas.get_renderer()) for t in texts if t.get_text()]
        assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
        assert all(figure.bbox.x0 <= b.x0 and b.x1 <= figure.bbox.x1 for b in boxes)


def test_parts_of_a_small_model_are_not_lost_beside_the_process() -> None:
    for peak, panels in ((299, 1), (310, 2)):  # the parts are 30 GiB
        figure = draw_memory([of(0, "cpu", peak)]).figure
        assert len(figure.axes) == panels
        assert sum(p.get_width() for p in figure.axes[0].patches) / 2 == (peak if panels == 1 else 30)


def test_cuda_peak_is_the_allocators_since_the_cell_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through stand-ins: each cell begins the statistics of all devices anew, the peaks of all are added."""
    began: list[int] = []
    cuda = types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: 2,
        reset_peak_memory_stats=began.append, max_memory_allocated=lambda device: 1000 * (device + 1),
    )  # fmt: skip

    class Tensor:
        is_meta = is_sparse = False
        is_cuda, requires_grad, grad = True, False, None

        def __init__(self, device: str, size: int):
            self.device, self.size = device, size

        def untyped_storage(self) -> Any:
            return types.SimpleNamespace(data_ptr=lambda: id(self), nbytes=lambda: self.size)

    class Module:
        own = (Tensor("cuda:0", 100), Tensor("cuda:1", 50))

        def parameters(self) -> Any:
            return iter(self.own)

        def buffers(self) -> Any:
            return iter([Tensor("cpu", 8)])

        def modules(self) -> Any:
            return [self]

    nn = types.SimpleNamespace(Module=Module)
    optim = types.SimpleNamespace(Optimizer=types.SimpleNamespace)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda, nn=nn, optim=optim, Tensor=Tensor))
    monkeypatch.setitem(sys.modules, "torch.nn", nn)
    monkeypatch.setitem(sys.modules, "torch.nn.parallel", types.SimpleNamespace(DistributedDataParallel=bytes))
    own = Memory()
    own.begin(RunSpec(CELL, 1))
    assert began == [0, 1]
    recorder = types.SimpleNamespace(models=list, optimizers=[], trained=None)
    found = own.collect({"net": Module()}, recorder)
    assert found is not None
    rank, _ = found
    assert (rank.kind, rank.peak, rank.outside, rank.parts) == ("cuda", 3000, 8, (150, 8, 0, 0, 0))
    assert (rank.rest, rank.total) == (3000 - 150, 3008)

    def lacks(device: int) -> int:
        raise RuntimeError("a pluggable allocator has no statistics")

    cuda.reset_peak_memory_stats = cuda.max_memory_allocated = lacks  # then the process's peak has to do
    own.begin(RunSpec(CELL, 1))
    found = own.collect({"net": Module()}, recorder)
    assert found is not None
    assert (found[0].kind, found[0].outside) == ("cpu", 150)
