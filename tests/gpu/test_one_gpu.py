"""One rank on a real GPU: what nbddp has read in torch's, CUDA's and NCCL's sources, seen."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import nbddp
from nbddp.capabilities.gpus import on_agent as devices
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.codec import from_json
from nbddp.protocol.position import Whereabouts
from nbddp.protocol.run_spec import Question
from tests.screens import Hearing

Row = Callable[[str], None]
NCCL = """
import os, time, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
if not dist.is_initialized(): dist.init_process_group("nccl")
"""
MATMUL = """
import torch
t = torch.ones(512, 512, device="cuda")
(t @ t).sum().item(), torch.cuda._is_in_bad_fork()
"""


def test_the_agent_touches_no_gpu_and_a_forked_rank_uses_one(one: WorkerPool, row: Row) -> None:
    assert one.agent is not None
    found = one.run_cell(MATMUL, want_value=True, screen=NullScreen())[0]
    assert found == (512.0**3, False)
    agent = one.agent.hello.pid
    open_files = [os.readlink(f"/proc/{agent}/fd/{fd}") for fd in os.listdir(f"/proc/{agent}/fd")]
    assert [path for path in open_files if path.startswith("/dev/nvidia")] == []
    row(f"the agent has {len(open_files)} descriptors, none of /dev/nvidia*")


PROPERTIES = """
import torch
p = torch.cuda.get_device_properties(0)
bus = f"{p.pci_domain_id:08x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
torch.cuda.device_count(), str(p.uuid), bus, p.total_memory
"""


def test_what_nvml_tells_is_what_cuda_has(one: WorkerPool, cards: list[dict[str, Any]], row: Row) -> None:
    count, uuid, bus, memory = one.run_cell(PROPERTIES, want_value=True, screen=NullScreen())[0]
    assert count == len(cards)
    assert cards[0]["uuid"].removeprefix("GPU-") == uuid
    assert cards[0]["bus_id"].lower() == bus
    assert memory <= cards[0]["memory"] < 1.1 * memory
    masks = ("", "-1", cards[0]["uuid"])
    assert [len(devices.gpus({**os.environ, "CUDA_VISIBLE_DEVICES": m})["devices"]) for m in masks] == [0, 0, 1]
    row(f"uuid, bus id and count are equal; {memory / 2**30:.1f} GiB")


EIGHT = f"""{NCCL}
from nbddp.deadlock.on_rank import flight
t = torch.ones(4, device="cuda")
for _ in range(8): dist.all_reduce(t)
torch.cuda.synchronize()
found = flight.entries(flight.dumps(active=False))
dist.destroy_process_group()
[e.backend for e in found if e.op == "all_reduce"]
"""


def test_nccls_recorder_is_read(one: WorkerPool, row: Row) -> None:
    found = one.run_cell(EIGHT, want_value=True, screen=NullScreen())[0]
    assert found == ["nccl"] * 8
    row("8 of 8 all_reduces, all of NCCL's recorder")


BUSY = f"""{NCCL}
t = torch.ones(4, device="cuda")
dist.all_reduce(t); torch.cuda.synchronize()
print("ready", flush=True)
torch.cuda._sleep(int(1e10))  # cycles: five seconds and more
dist.all_reduce(t)
t.sum().item()
dist.destroy_process_group()
"""


class Ready(Hearing):
    """Says when the rank has printed `ready`."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = threading.Event()

    def line(self, rank: int, stream: str, text: str) -> None:
        if text == "ready":
            self.ready.set()


def test_a_rank_that_waits_for_the_gpu_says_where_it_is(one: WorkerPool, row: Row) -> None:
    shown = Ready()
    running = threading.Thread(target=one.run_cell, args=(BUSY,), kwargs={"screen": shown})
    running.start()
    assert shown.ready.wait(60)
    time.sleep(0.5)  # the GPU sleeps for seconds yet; the rank is in item()
    began = time.monotonic()
    found = from_json(Whereabouts, one.ask(0, Question.of("where")))
    took = time.monotonic() - began
    running.join()
    assert took < 0.3
    assert found.waits in ("busy", "futex")
    assert found.pending is not None
    assert found.pending.op == "all_reduce"
    row(f"answered after {took * 1000:.0f} ms: {found.waits}, pending all_reduce #{found.pending.sequence}")


ASSERT = f"""{NCCL}
t = torch.ones(4, device="cuda")
dist.all_reduce(t); torch.cuda.synchronize()
model = 1
index = torch.tensor([99], device="cuda")
torch.zeros(4, device="cuda")[index].sum().item()
"""


def test_a_rank_whose_context_a_device_side_assert_has_broken_is_replaced(one: WorkerPool, row: Row) -> None:
    before = one.workers[0].pid
    with pytest.raises(nbddp.WorkerFailed) as failed:
        one.run_cell(ASSERT, screen=NullScreen())
    assert "device-side assert" in str(failed.value)
    assert "its CUDA context is broken" in failed.value.report
    assert "lost: " in failed.value.report
    assert one.run_cell(MATMUL, want_value=True, screen=NullScreen())[0][0] == 512.0**3
    assert one.workers[0].pid != before
    row(str(failed.value))


OUT_OF_MEMORY = """
import torch
free = torch.cuda.mem_get_info()[0]
def hold():
    held = [torch.ones(free // 8, dtype=torch.uint8, device="cuda") for _ in range(16)]
hold()
"""


def test_after_running_out_of_memory_the_next_cell_has_it_again(one: WorkerPool, row: Row) -> None:
    one.run_cell("import torch; torch.ones(1, device='cuda')", screen=NullScreen())
    before = one.run_cell("torch.cuda.mem_get_info()[0]", want_value=True, screen=NullScreen())[0]
    pid = one.workers[0].pid
    with pytest.raises(nbddp.WorkerFailed, match="OutOfMemoryError"):
        one.run_cell(OUT_OF_MEMORY, screen=NullScreen())
    after = one.run_cell("torch.cuda.mem_get_info()[0]", want_value=True, screen=NullScreen())[0]
    assert after > before - (256 << 20)
    assert one.workers[0].pid == pid, "an error that does not last replaces nobody"
    row(f"free before {before / 2**30:.2f} GiB, after {after / 2**30:.2f} GiB")


TRAIN = f"""{NCCL}
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
net = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]).cuda()
model, x = DDP(net), torch.randn(2048, 2048, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
def step():
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
for _ in range({{steps}}): step()
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
begin.record()
for _ in range(20): step()
end.record(); torch.cuda.synchronize()
begin.elapsed_time(end) / 20
"""


def test_steps_take_as_long_as_the_gpu_takes(one: WorkerPool, row: Row) -> None:
    """The host is through with a step long before the GPU is: its own clock would tell another time."""
    of_events = one.run_cell(TRAIN.format(steps=100), want_value=True, screen=NullScreen())[0]
    steps = one.timings().steps[0][-20:]
    of_steps = (steps[-1].end - steps[0].start) / 20 / 1e6
    assert of_steps == pytest.approx(of_events, rel=0.05)
    for s in steps:
        order = [*s.forward, *s.backward, *(s.optimizer or ())]
        assert order == sorted(order)
        assert s.backward[1] - s.backward[0] > s.forward[1] - s.forward[0], "backward is twice as much work"
    row(f"{of_steps:.3f} ms by the recorder, {of_events:.3f} ms by events around 20 steps")


GRAPH = """
import os
os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
torch.cuda.set_device(0)
if dist.is_initialized(): dist.destroy_process_group()
dist.init_process_group("nccl")
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    model = DDP(torch.nn.Linear(256, 256).cuda())
    x = torch.randn(64, 256, device="cuda")
    for _ in range(11): model(x).square().mean().backward()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): model(x).square().mean().backward()
for _ in range(5): graph.replay()
torch.cuda.synchronize()
del graph, model
dist.destroy_process_group()
os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
"""


def test_a_step_that_is_captured_in_a_cuda_graph_is_left_alone(one: WorkerPool, row: Row) -> None:
    one.run_cell(GRAPH, screen=NullScreen())
    found = one.timings()
    assert len(found.steps[0]) == 11, "the steps before the capture"
    row("11 steps before the capture are recorded, 1 captured and 5 replayed are not")


def test_a_trace_has_the_gpus_kernels(one: WorkerPool, row: Row) -> None:
    one.run_cell(MATMUL, trace=True, screen=NullScreen())
    merged = one.trace()
    kernels = [e for e in merged.data["traceEvents"] if e.get("cat") == "kernel"]
    assert kernels
    row(f"{len(kernels)} kernels in the trace of a rank that was forked")


def test_memory_is_that_of_the_allocator(one: WorkerPool, row: Row) -> None:
    one.run_cell(TRAIN.format(steps=3), screen=NullScreen())
    found = one.memory()[0]
    parameters = 8 * (2048 * 2048 + 2048) * 4
    assert (found.kind, found.parameters, found.gradients) == ("cuda", parameters, parameters)
    allocated = one.run_cell("torch.cuda.memory_allocated()", want_value=True, screen=NullScreen())[0]
    assert found.peak >= allocated
    row(f"peak {found.peak / 2**20:.0f} MiB, allocated between steps {allocated / 2**20:.0f} MiB")


def test_a_value_of_the_gpu_comes_as_a_copy_on_the_cpu(one: WorkerPool, row: Row) -> None:
    one.run_cell("import torch; t = torch.arange(4, device='cuda')", screen=NullScreen())
    found = one.pull(["t"])["t"][0]
    assert (found.device.type, found.tolist()) == ("cpu", [0, 1, 2, 3])
    row("cpu")
