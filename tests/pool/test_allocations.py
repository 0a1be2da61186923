"""What ranks allocate over a step: hand-made snapshots of torch's CUDA allocator, samples of real ranks, the figure."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import nbddp
from nbddp.analysis.quantities import MOST
from nbddp.capabilities.memory import on_rank_timeline
from nbddp.capabilities.memory.figure_timeline import draw_allocations
from nbddp.capabilities.memory.history import (
    BEFORE,
    CUDA,
    HEAP,
    Phase,
    PhaseMark,
    Place,
    RankAllocations,
    from_samples,
    from_snapshot,
    steps,
    window,
)
from nbddp.capabilities.memory.timeline import Allocations, sentences
from nbddp.capabilities.timings.on_rank import Recorder
from nbddp.compat.extra import torch as torch_extra
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.kernels import Kernel

MIB = 1 << 20
WORKER: Any = None  # asked for nothing by a recording that the test begins itself

# -- a snapshot of the CUDA allocator, in the format that torch.cuda.memory._snapshot documents ---------------------


def frame(file: str, line: int) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": "f"}


def entry(action: str, address: int, size: int, us: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": us, "frames": list(frames)}


TORCH = frame("/lib/site-packages/torch/nn/linear.py", 125)
SNAPSHOT: dict[str, Any] = {
    "segments": [
        {"device": 0, "address": 0, "total_size": 20 * MIB, "allocated_size": 12 * MIB, "blocks": []},
        {"device": 1, "address": 0, "total_size": 20 * MIB, "allocated_size": 1 * MIB, "blocks": []},
    ],
    "device_traces": [
        [
            entry("segment_alloc", 0, 20 * MIB, 1000),
            entry("alloc", 10, 4 * MIB, 1001, TORCH, frame("cell", 3), frame("/lib/site-packages/IPython/x.py", 1)),
            entry("alloc", 20, 8 * MIB, 1010, TORCH, frame("cell", 7)),
            entry("alloc", 30, 6 * MIB, 1020),  # from the thread of backward, which has no Python frames
            entry("free_requested", 20, 8 * MIB, 1030, TORCH, frame("cell", 9)),
            entry("free_completed", 20, 8 * MIB, 1031),
            entry("alloc", 20, 2 * MIB, 1040, frame("cell", 7)),
            entry("free_requested", 99, 5 * MIB, 1050),  # made before the recording
            entry("snapshot", 0, 0, 1060),
        ],
        [entry("alloc", 10, 1 * MIB, 1015, frame("cell", 4))],  # the same address on another GPU
    ],
}


def in_cell(frames: Sequence[Mapping[str, Any]]) -> Place | None:
    return next(((f["filename"], f["line"]) for f in frames if f["filename"] == "cell"), None)


def recorded(limit: int = 1000) -> Any:
    return from_snapshot(SNAPSHOT, in_cell, 1_000_000, 1_060_000, 0, limit)


def test_a_snapshot_tells_every_level_from_what_is_allocated_in_the_end() -> None:
    found = window(recorded(), 1_000_000, 1_060_000)
    assert found.before == 5 * MIB  # 12 + 1 in the end, and the changes are + 8
    assert [(at, level // MIB) for at, level in found.points] == [
        (0, 5), (1000, 9), (10_000, 17), (15_000, 18), (20_000, 24), (30_000, 16), (40_000, 18), (50_000, 13),
        (60_000, 13),
    ]  # fmt: skip
    assert (found.peak, found.at, found.samples) == (24 * MIB, 20_000, 0)


def test_the_lines_that_hold_the_peak_are_those_whose_allocations_live_then() -> None:
    found = window(recorded(), 1_000_000, 1_060_000)
    held = {("cell", 7): 8, None: 6, BEFORE: 5, ("cell", 3): 4, ("cell", 4): 1}
    assert found.lines == [(place, size * MIB) for place, size in held.items()]
    later = window(recorded(), 1_035_000, 1_060_000)  # another step: what came before it is still known by its line
    assert (later.before, later.peak) == (16 * MIB, 18 * MIB)
    assert dict(later.lines) == {None: 6 * MIB, BEFORE: 5 * MIB, ("cell", 3): 4 * MIB, ("cell", 7): 2 * MIB,
                                 ("cell", 4): 1 * MIB}  # fmt: skip


def test_a_full_recording_begins_with_what_it_has_kept() -> None:
    found = recorded(limit=9)
    assert (found.lost, found.began) == (True, 1_001_000)
    assert not recorded(limit=10).lost


def test_on_a_gpu_the_history_is_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a stand-in for torch.cuda.memory, which no CPU has: it is switched on, read, and switched off."""
    import torch

    said: list[Any] = []
    memory = types.SimpleNamespace(
        _record_memory_history=lambda *args, **kwargs: said.append((*args, kwargs)), _snapshot=lambda: SNAPSHOT
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory", memory)
    own, recorder = on_rank_timeline.AllocationRecorder(WORKER), Recorder()
    own.record(7, 3, recorder, {"cell": "Cell In[3]"})
    own._shift = own._began - 1_000_000  # the snapshot's first microsecond is the cell's
    for at, mark in ((1005, "forward"), (1025, "backward")):
        own._marks += [
            PhaseMark(mark, begins, 0, 1, own._shift + 1000 * (at + 15 * (not begins))) for begins in (True, False)
        ]
    own.stop()
    assert recorder.heard is None
    options = {"context": "alloc", "stacks": "python", "max_entries": on_rank_timeline.ENTRIES, "clear_history": True}
    assert said == [("all", options), (None, {})]
    assert own.summary() == {"run": 7, "cell": 3, "model": "", "why": "", "steps": {0: 24 * MIB}}
    rank = own.of_step(0)
    assert (rank.kind, rank.window.peak, rank.phase()) == (CUDA, 24 * MIB, "in forward")
    assert [place for place, _ in rank.window.lines] == [("Cell In[3]", 7), None, BEFORE, ("Cell In[3]", 3),
                                                        ("Cell In[3]", 4)]  # fmt: skip


def test_an_allocator_without_a_history_is_the_reason_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(entries: int) -> bool:
        raise RuntimeError("this torch keeps no history of GPU memory")

    monkeypatch.setattr(torch_extra, "begin_memory_history", refuses)
    own = on_rank_timeline.AllocationRecorder(WORKER)
    own.record(1, 1, Recorder(), {})
    own.stop()
    summary = own.summary()
    assert summary is not None
    assert summary["why"] == "this torch keeps no history of GPU memory"


def marks(*some: tuple[str, int, int]) -> list[PhaseMark]:
    """(phase, step, when): each lasts 5."""
    return [PhaseMark(p, begins, n, 1, at + 5 * (not begins)) for p, n, at in some for begins in (True, False)]


def test_steps_are_those_of_ddp_or_else_the_optimizers() -> None:
    ddp = marks(("forward", 4, 0), ("backward", 4, 10), ("optimizer", 4, 20), ("forward", 5, 30))
    assert steps(ddp, 0) == {4: [Phase("forward", 0, 5), Phase("backward", 10, 15), Phase("optimizer", 20, 25)]}
    plain = marks(("optimizer", 0, 20), ("optimizer", 0, 40))
    assert steps(plain, 3) == {
        0: [Phase("", 3, 20), Phase("optimizer", 20, 25)],
        1: [Phase("", 25, 40), Phase("optimizer", 40, 45)],
    }
    assert steps([], 0) == {}


# -- real ranks ----------------------------------------------------------------------------------------------------

SEEN = (  # has three samples taken, in its line
    "any(time.sleep(0.001) for n in [len(memory._samples) + 3] for _ in iter(lambda: len(memory._samples) < n, False))"
)
HOLDS = f"""
import threading, time, torch; memory = {{t.name: t for t in threading.enumerate()}}["nbddp-memory"]._target.__self__
def work(more):
    a = torch.ones(64 << 18)
    {SEEN}
    b = torch.ones((16 + 16 * kept) << 18)
    {SEEN}
    del a
    {SEEN}
work(1)
"""


def test_on_a_cpu_samples_tell_true_sizes_and_lines(two: WorkerPool) -> None:
    two.run_cell(HOLDS, memory=True, screen=NullScreen())
    found = two.allocations()
    assert (found.step, found.steps, found.sampled) == (None, [], True)
    for r in found.ranks:
        grown = dict(r.window.lines)
        assert (r.kind, r.lost) == (HEAP, False)
        assert r.window.peak - grown[BEFORE] == pytest.approx((80 + 16 * r.rank) * MIB, abs=MIB / 4)
        first, second = (sum(s for p, s in r.window.lines if p and p[1] in some) for some in ((4, 5), (6, 7)))
        assert first == pytest.approx(64 * MIB, abs=MIB / 4)
        assert second == pytest.approx((16 + 16 * r.rank) * MIB, abs=MIB / 4)
        assert r.code["Cell In[1]", 4] == "a = torch.ones(64 << 18)"
        assert r.window.points[-1][1] < r.window.peak - 64 * MIB
    words = str(draw_allocations(found))
    assert words.startswith("allocations over the cell\nrank 1 peaks at ")
    assert "until the peak, memory grew most at In[1] line 4 (a = torch.ones(64 << 18)): 64 MiB" in words
    assert "\nsampled: memory that malloc has given out since the worker started, " in words


TRAINS = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
if not dist.is_initialized(): dist.init_process_group("gloo")
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)]))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for step in range(4):
    loss = model(torch.ones(4096 * (1 + 2 * (step == 2)), 256)).square().sum()
    loss.backward()
    optimizer.step()
{after}
"""


def test_the_step_with_the_highest_peak_is_shown_and_any_other_can_be(two: WorkerPool) -> None:
    two.run_cell(TRAINS.format(after=""), memory=True, screen=NullScreen())
    found = two.allocations()
    assert (found.step, list(found.steps), found.model) == (2, [0, 1, 2, 3], "Sequential")
    assert [[p.name for p in r.phases] for r in found.ranks] == [["forward", "backward", "optimizer"]] * 2
    other = two.allocations(step=1)
    assert all(a.window.peak > b.window.peak + 8 * MIB for a, b in zip(found.ranks, other.ranks, strict=True))
    assert len(two.allocations(whole=True).ranks[0].phases) == 12
    with pytest.raises(
        nbddp.BadInput, match=r"there is no step 9; steps 0 to 3 are recorded on every rank; --step all"
    ):
        two.allocations(step=9)


def test_without_a_recording_what_to_type_is_said(two: WorkerPool) -> None:
    two.restart()
    with pytest.raises(nbddp.BadInput, match="no allocations have been recorded on these workers; %%ddp --memory"):
        two.allocations()
    two.run_cell("import os\nkept = int(os.environ['RANK'])\n" + HOLDS, memory=True, ranks=[1], screen=NullScreen())
    found = two.allocations()
    assert [r.rank for r in found.ranks] == [1]
    assert "nothing was recorded on rank 0: it did not take part" in str(draw_allocations(found))


def test_a_cell_that_fails_keeps_its_recording_and_a_deadlock_is_found_in_spite_of_the_samples(two: WorkerPool) -> None:
    with pytest.raises(nbddp.WorkerFailed):
        two.run_cell(HOLDS + "raise ValueError(1)", memory=True, screen=NullScreen())
    assert two.allocations().ranks[0].window.peak > 80 * MIB
    stuck = TRAINS.format(after="if dist.get_rank() == 0: model(torch.ones(9, 256)).sum().backward()")
    with pytest.raises(nbddp.RunHung):
        two.run_cell(stuck, memory=True, hang_after=1, screen=NullScreen(), timeout=60)


def test_memory_of_a_cell_in_a_notebook(four: Kernel) -> None:
    shown = four.run("%%ddp --memory\n" + TRAINS.format(after=""))
    words = shown.displays[-1]["text/plain"]
    assert words.startswith("allocations over step 2 of Sequential\nrank ")
    assert "<table>" in shown.displays[-1]["text/html"]
    assert four.run("%ddp memory --timeline").displays[-1]["text/plain"] == words
    everything = four.run("%ddp memory --timeline --step all").displays[-1]["text/plain"]
    assert everything.startswith("allocations over the cell\n")
    named = four.run("%ddp memory model optimizer --ranks 1").displays[-1]["text/plain"]
    assert named.startswith("model (DistributedDataParallel): 1.5 MiB on rank 1\noptimizer (SGD): 771 KiB on rank 1\n")
    reply = four.ask(four.client.complete, "%ddp memory mo", 14)
    assert "model" in reply["matches"]
    assert "--timeline" in four.ask(four.client.complete, "%ddp memory --t", 15)["matches"]


# -- names ---------------------------------------------------------------------------------------------------------

NAMES = """
import torch, numpy as np
net = torch.nn.Linear(100, 100, bias=False)
twice = torch.nn.Sequential(net, torch.nn.Linear(100, 100, bias=False)); twice.again = net
net(torch.ones(1, 100)).sum().backward()
view, array, kept_in = net.weight[:3], np.ones(1000), {"some": [torch.ones(500), 3], "none": None}
same = torch.from_numpy(array)
"""


def test_names_are_told_with_what_they_share(two: WorkerPool) -> None:
    two.run_cell(NAMES, screen=NullScreen())
    found = two.sizes("net", "twice", "view", "array", "kept_in")
    assert [(n, of[1].total) for n, of in found.held.items()] == [
        ("net", 80_000), ("twice", 120_000), ("view", 40_000), ("array", 8000), ("kept_in", 2000)
    ]  # fmt: skip
    assert found.held["net"][0].parts == {"parameters": 40_000, "gradients": 40_000}
    assert found.held["net"][0].shared == {"twice": 80_000, "view": 40_000}
    assert found.held["array"][0].shared == {"same": 8000}
    view = "view (Tensor): 39 KiB on each of 2 ranks; a view of 1.2 KiB in a storage of 39 KiB, which it keeps alive"
    assert view in str(found)
    assert found.columns[-1] == "each rank holds"


def test_of_a_sharded_module_the_shard_and_the_whole_are_told(two: WorkerPool) -> None:
    code = "import torch, torch.distributed as dist\nif not dist.is_initialized(): dist.init_process_group('gloo')\n"
    code += "from torch.distributed.fsdp import fully_shard\n"
    two.run_cell(code + "part = fully_shard(torch.nn.Linear(3, 5, bias=False))", screen=NullScreen())
    found = two.sizes("part")
    assert [h.parts["parameters"] for h in found.held["part"].values()] == [36, 36], "FSDP2 pads to equal shards"
    assert {h.whole for h in found.held["part"].values()} == {60}
    assert "part (FSDPLinear): 36 B on each of 2 ranks; a shard of 60 B: Shard(dim=0) over 2 ranks" in str(found)
    assert list(found.columns[-2:]) == ["each rank holds", "unsharded"]


def test_a_name_that_holds_nothing_is_an_error_that_says_so(two: WorkerPool) -> None:
    with pytest.raises(nbddp.BadInput, match="'nope' is not defined on ranks 0–1; assign it in a %%ddp cell"):
        two.sizes("nope")
    with pytest.raises(nbddp.BadInput, match="'kept' holds a value of type int, without tensors; name a tensor"):
        two.sizes("kept")


# -- the figure ----------------------------------------------------------------------------------------------------


def made(rank: int, kind: str = HEAP, points: int = 400) -> RankAllocations:
    more = (rank == 40) - (rank == 50)  # the highest peak and the lowest
    samples = [(i * 50_000, (30 + more + (i * (rank + 3)) % 97) * MIB, ("cell", 1 + i % 12)) for i in range(points)]
    found = window(from_samples(HEAP, samples, 0), 0, samples[-1][0])
    phases = (
        Phase("forward", 0, 5_000_000),
        Phase("backward", 5_100_000, 15_000_000),
        Phase("optimizer", 15_000_000, 19_000_000),
    )
    code = {("cell", line): f"line_{line}()" for line in range(1, 13)}
    return RankAllocations(rank, kind, found, phases, samples[-1][0], code)


def test_a_few_samples_do_not_tell_which_line_memory_grew_at() -> None:
    for kind, samples, told in ((HEAP, 4, False), (HEAP, 5, True), (CUDA, 0, True)):
        one = made(0, kind)
        words = sentences(Allocations([replace(one, window=replace(one.window, counted=samples))], 3, [3], "Net"))
        assert ("line" in words[1]) == told
        assert told or words[1] == "where memory grew most is not known: the samples are too few"


@pytest.mark.every(4)
@pytest.mark.parametrize("count", [1, 4, 16, 64])
@pytest.mark.parametrize("kind", [CUDA, HEAP])
def test_the_figure_of_any_size_is_bounded_and_nothing_in_it_overlaps(count: int, kind: str) -> None:
    found = Allocations([made(r, kind) for r in range(count)], 3, [1, 2, 3], "Net")
    shown = draw_allocations(found)
    assert ("sampled" in str(shown)) == (kind == HEAP)
    assert ("16 of 64 ranks are drawn" in str(shown)) == (count == 64)
    assert " other lines" in str(shown)
    bundle, _ = shown._repr_mimebundle_()
    assert sum(map(len, bundle.values())) < 1_000_000
    figure = shown.figure
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert len(figure.axes) == min(count, MOST)
    rows = {axes.get_ylabel().partition("\n")[0] for axes in figure.axes}
    named = set(re.findall(r"rank \d+", sentences(found)[0]))
    assert named <= rows
    assert named == {"rank 40", "rank 50"} or count < 64
    labels = [t for axes in figure.axes for t in (*axes.texts, axes.yaxis.label)]
    texts = [*figure.texts, *labels, *figure.legends[0].get_texts()]
    boxes = [t.get_window_extent(canvas.get_renderer()) for t in texts if t.get_text()]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
    assert all(figure.bbox.x0 <= b.x0 and b.x1 <= figure.bbox.x1 for b in boxes)
