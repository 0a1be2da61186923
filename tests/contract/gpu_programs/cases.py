"""Programs of one process for GPUs, as functions: each raises if what it claims is not so.

`python -m tests.contract.gpu_programs.cases` runs them all on four simulated GPUs, and prints what they raised as JSON.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import os
import re
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

CUDA = "cuda"


def pair(make: Any, seed: int = 0) -> tuple[Any, Any]:
    """A module on the CPU and an equal one on a GPU."""
    torch.manual_seed(seed)
    one = make()
    return one, copy.deepcopy(one).cuda()


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one.detach(), other.detach().cpu())


def case_labels() -> None:
    x = torch.ones(3, device="cuda:1")
    assert str(x.device) == "cuda:1"
    assert x.is_cuda
    assert x.get_device() == 1
    assert x.untyped_storage().device == torch.device("cuda:1")
    assert str(x) == "tensor([1., 1., 1.], device='cuda:1')"
    assert (x.cpu().device.type, x.to("cuda:2").get_device(), x.view(3)[1:].get_device()) == ("cpu", 2, 1)
    assert torch.accelerator.current_accelerator() == torch.device("cuda")


def case_properties_are_one_object() -> None:
    assert torch.cuda.get_device_properties(1) == torch.cuda.get_device_properties("cuda:1")
    assert torch.cuda.get_device_properties(0) != torch.cuda.get_device_properties(1)


def case_memory_registered_with_cudart() -> None:
    x, cudart = torch.ones(20), torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(x.data_ptr(), x.numel() * 4, 0)) == 0
    assert x.is_pinned()
    assert int(cudart.cudaHostUnregister(x.data_ptr())) == 0
    assert not x.is_pinned()


def case_functions_of_a_cuda_build_are_there_or_refused_by_name() -> None:
    """Those of torch._C that torch's Python calls. Without `_cuda_getHip`: ROCm's."""
    folder = Path(torch.__file__).parent
    names = {
        name
        for path in [*(folder / "cuda").rglob("*.py"), folder / "_inductor" / "cudagraph_trees.py"]
        for name in re.findall(r"torch\._C\.(_(?:cuda|nccl)_\w+)", path.read_text())
    }
    assert len(names) > 50
    assert sorted(name for name in names if not hasattr(torch._C, name)) == []
    with pytest.raises(NotImplementedError, match="simulated GPUs: NCCL in one process"):
        torch.cuda.nccl.all_gather([torch.ones(1, device=CUDA)], [torch.ones(1, device=CUDA)])
    with pytest.raises(NotImplementedError, match="simulated GPUs: TunableOp"):
        torch.cuda.tunable.set_filename("x.csv")


def case_train() -> None:
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(128, 10),
    )  # fmt: skip
    on_cpu, on_gpu = pair(make)
    x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))
    losses = []
    for model, device in ((on_cpu, "cpu"), (on_gpu, CUDA)):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    assert all(equal(a, b) for a, b in zip(on_cpu.parameters(), on_gpu.parameters(), strict=True))


def case_recurrent() -> None:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        on_cpu, on_gpu = pair(lambda kind=kind: kind(4, 5, 2, batch_first=True, bidirectional=True))
        x = torch.randn(2, 3, 4)
        a, b = on_cpu(x)[0], on_gpu(x.cuda())[0]
        a.square().sum().backward()
        b.square().sum().backward()
        assert b.is_cuda
        assert equal(a, b), kind
        assert all(equal(p.grad, q.grad) for p, q in zip(on_cpu.parameters(), on_gpu.parameters(), strict=True))
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 5, 4).cuda(), torch.tensor([5, 3, 2]), batch_first=True)
    assert nn.LSTM(4, 5, batch_first=True).cuda()(packed)[0].data.is_cuda


def case_nested() -> None:
    parts = [torch.randn(n, 8) for n in (3, 5, 2)]
    on_cpu, on_gpu = pair(lambda: nn.Linear(8, 8))
    for made in (
        torch.nested.nested_tensor(parts, device="cuda:0"),
        torch.nested.nested_tensor(parts).cuda(),
        torch.nested.as_nested_tensor([part.cuda() for part in parts]),
    ):
        y = on_gpu(made)
        assert {str(one.device) for one in (made, y, y.transpose(1, 2), *y.unbind())} == {"cuda:0"}
        assert all(equal(a, b) for a, b in zip(on_cpu(made.cpu()).unbind(), y.unbind(), strict=True))
    assert made.half().to("cuda:1").unbind()[1].device == torch.device("cuda:1")
    y.to_padded_tensor(0.0).square().sum().backward()
    assert on_gpu.weight.grad.is_cuda
    outputs, grads = [], []
    for device in ("cpu", CUDA):
        jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, device=device, requires_grad=True)
        heads = jagged.unflatten(-1, [2, 4]).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads).values()
        out.square().sum().backward()
        outputs.append(out)
        grads.append(jagged.grad.values())
    assert outputs[1].is_cuda
    assert equal(*outputs)
    assert equal(*grads)


def case_encoder_for_inference() -> None:
    """With a mask of padding its layers have nested tensors."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    on_cpu, on_gpu = pair(lambda: nn.TransformerEncoder(layer, 2).eval())
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    with torch.no_grad():
        a, b = on_cpu(x, src_key_padding_mask=padding), on_gpu(x.cuda(), src_key_padding_mask=padding.cuda())
    assert torch.allclose(a, b.cpu(), atol=1e-6)
    attention, copied = pair(lambda: nn.MultiheadAttention(8, 2, batch_first=True).eval())
    with torch.no_grad():
        assert equal(attention(x, x, x)[0], copied(*[x.cuda()] * 3)[0])


def case_autocast() -> None:
    model = nn.Linear(8, 8).cuda()
    scaler = torch.amp.GradScaler(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with torch.autocast(CUDA, dtype=torch.float16):
        y = model(torch.randn(2, 8).cuda())
        assert (y.dtype, F.softmax(y, -1).dtype) == (torch.float16, torch.float32)
        loss = F.softmax(y, -1, dtype=torch.float32).square().sum() + F.log_softmax(y, -1).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    half = torch.randn(4, 8, device=CUDA, dtype=torch.half, requires_grad=True)
    F.softmax(half, -1, dtype=torch.float32).square().sum().backward()
    assert half.grad.dtype == torch.half


def case_sparse() -> None:
    x = torch.eye(3, device="cuda:1").to_sparse()
    assert (x.get_device(), x.to_dense().get_device(), x.coalesce().indices().get_device()) == (1, 1, 1)
    made = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2), device=CUDA, check_invariants=True)
    assert (made @ torch.ones(2, 2, device=CUDA)).sum().item() == 6
    assert (made.to_sparse_csr() @ torch.ones(2, 2, device=CUDA)).sum().item() == 6
    on_cpu, on_gpu = pair(lambda: nn.Embedding(10, 3, sparse=True))
    for model, device in ((on_cpu, "cpu"), (on_gpu, CUDA)):
        optimizer = torch.optim.SparseAdam(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([1, 2, 2], device=device)).square().sum().backward()
            optimizer.step()
    assert on_gpu.weight.grad.is_sparse
    assert equal(on_cpu.weight, on_gpu.weight)


def case_old_types() -> None:
    """Programs of before 2018 name a type for the device too."""
    kind, x = torch.cuda.FloatTensor, torch.ones(2, dtype=torch.float64)
    assert kind(2, 3).fill_(1).is_cuda
    assert isinstance(kind([1.0]), kind)
    assert not isinstance(x, kind)
    assert x.type(kind).type() == "torch.cuda.FloatTensor"
    assert x.to("cuda:1").type("torch.cuda.HalfTensor").device == torch.device("cuda:1")
    assert (x.cuda().type(torch.FloatTensor).type(), x.type(torch.int64).dtype) == ("torch.FloatTensor", torch.int64)
    for half in (torch.float16, torch.cuda.HalfTensor, "torch.cuda.HalfTensor"):
        compiled = torch.compile(lambda x, half=half: x.type(half), backend="aot_eager", fullgraph=True)
        assert compiled(x.cuda()).dtype == torch.float16
    assert (kind(2, device=1).get_device(), kind([1.0], device="cuda:2").get_device()) == (1, 2)
    torch.set_default_tensor_type(kind)
    made = (torch.ones(1), torch.Tensor([1.0]), torch.Tensor(2, 3), nn.Linear(2, 2).weight, nn.Parameter(torch.ones(1)))
    torch.set_default_tensor_type(torch.FloatTensor)
    assert {one.device.type for one in made} == {CUDA}
    assert {one.device.type for one in (torch.ones(1), torch.Tensor([1.0]), torch.Tensor(2, 3))} == {"cpu"}


def case_capturable_optimizer() -> None:
    """Its lists of tensors come after a number in `_foreach_pow`."""
    on_cpu, on_gpu = pair(lambda: nn.Linear(3, 2))
    for model, device, options in ((on_cpu, "cpu", {}), (on_gpu, CUDA, {"capturable": True})):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, foreach=True, **options)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3, device=device)).square().sum().backward()
            optimizer.step()
    assert all(torch.allclose(a, b.cpu()) for a, b in zip(on_cpu.parameters(), on_gpu.parameters(), strict=True))


def case_random_numbers() -> None:
    gpu, cpu = torch.Generator(CUDA).manual_seed(5), torch.Generator().manual_seed(5)
    assert gpu.get_state().numel() == 16
    for n in (1, 3, 15, 16, 17, 700, 5000):
        assert torch.equal(torch.randn(n, generator=gpu, device=CUDA).cpu(), torch.randn(n, generator=cpu)), n
    state = gpu.get_state()
    first = torch.randn(3, generator=gpu, device=CUDA)
    other = torch.Generator(CUDA)
    other.set_state(state)
    assert torch.equal(first, torch.randn(3, generator=other, device=CUDA))
    torch.cuda.manual_seed_all(7)
    with torch.random.fork_rng(devices=[0]):
        inside = torch.rand(2, device=CUDA)
    assert torch.equal(inside, torch.rand(2, device=CUDA))
    assert torch.cuda.initial_seed() == 7
    second = torch.Generator("cuda:1")
    torch.randn(2, generator=second, device="cuda:0")
    assert second.device == torch.device("cuda:1")


def case_state_from_another_process() -> None:
    """A state is a seed and an offset: what has not been seen here is drawn again."""
    from nbddp.capabilities.simulated_gpus.on_rank import generators

    gpu = torch.Generator(CUDA).manual_seed(11)
    torch.rand(1001, generator=gpu, device=CUDA)
    state = gpu.get_state()
    follow = torch.rand(4, generator=gpu, device=CUDA)
    generators._states.clear()
    gpu.set_state(state)
    assert torch.equal(follow, torch.rand(4, generator=gpu, device=CUDA))


def case_data_parallel() -> None:
    on_cpu, on_gpu = pair(lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    model, x = nn.DataParallel(on_gpu, [0, 1, 2]), torch.randn(7, 4)
    a, b = on_cpu(x), model(x.cuda())
    assert (b.get_device(), b.shape) == (0, (7, 2))
    assert torch.allclose(a, b.cpu())
    a.sum().backward()
    b.sum().backward()
    assert torch.allclose(on_cpu[0].weight.grad, on_gpu[0].weight.grad.cpu(), atol=1e-6)


def case_parts_of_a_batch_on_several_gpus() -> None:
    """What DataParallel is made of, as torch's own tests ask it."""
    from torch.nn.parallel import comm

    x, y = torch.randn(2, 5, device="cuda:0"), torch.randn(2, 5, device="cuda:1")
    assert comm.gather((x, y), -1, destination="cpu").shape == (2, 10)
    assert [part.get_device() for part in comm.scatter(torch.ones(4, 2), (1, 3), dim=-1)] == [1, 3]
    wrong = {
        "Expected at least one device to scatter to": lambda: comm.scatter(x, ()),
        "Expected devices and chunk_sizes to be of same length, but got len(devices) = 2 and len(chunk_sizes) = 1":
            lambda: comm.scatter(x, (0, 1), [2]),
        "Expected at least one output tensor to scatter to": lambda: comm.scatter(x, out=[]),
        "Output tensor at index 0 has incorrect shape: [1, 2, 5]. Expected same shape except for scatter dim 0 as the "
        "source tensor: [2, 5]": lambda: comm.scatter(x, out=[y[None]]),
        "Total size for output tensors along scatter dim 0 does not match the source tensor size at dim 0. Expected "
        "2, but got total size 1": lambda: comm.scatter(x, out=[y[:1]]),
        "Expected all output tensors to be CUDA tensors, but output tensor at index 1 has device 'cpu'":
            lambda: comm.broadcast(x, out=[x, x.cpu()]),
        "Expected all output tensors to have same shape as the source tensor [2, 5], but output tensor at index 0 has "
        "shape [1, 2, 5]": lambda: comm.broadcast(x, out=[y[None]]),
        "Expected at least one tensor to gather from": lambda: comm.gather(()),
        "Input tensor at index 1 has invalid shape [2, 4], but expected [2, 5]": lambda: comm.gather((x, y[:, 1:])),
        "Expected out tensor to have shape [4, 5], but got [2, 5]": lambda: comm.gather((x, y), out=x.clone()),
    }  # fmt: skip
    for words, program in wrong.items():
        with pytest.raises(RuntimeError, match=re.escape(words)):
            program()


def case_graph() -> None:
    x, total, graph = torch.zeros(3, device=CUDA), torch.ones(3, device=CUDA), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        y = x * 2 + 1
        total.add_(y)
    assert total.tolist() == [1, 1, 1]  # what is captured does not run
    x.copy_(torch.tensor([1.0, 2, 3]))
    graph.replay()
    assert (y.tolist(), total.tolist()) == ([3, 5, 7], [4, 6, 8])
    with pytest.raises(RuntimeError, match=r"^CUDA error: operation not permitted when stream is capturing"):  # noqa: SIM117
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            (x * 2).sum().item()
    with pytest.raises(RuntimeError, match=r"^CUDA error: operation not permitted when stream is capturing"):  # noqa: SIM117
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.accelerator.synchronize()


def case_graph_draws_what_the_program_without_it_draws() -> None:
    """A capture draws no numbers, and each replay goes on with the generator."""
    x = torch.ones(100, device=CUDA)
    torch.cuda.manual_seed(5)
    plain = [F.dropout(x, 0.5) for _ in range(3)]
    torch.cuda.manual_seed(5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = F.dropout(x, 0.5)
    for expected in plain:
        graph.replay()
        assert torch.equal(y, expected)


def case_graph_of_what_a_capture_resizes() -> None:
    graph, out = torch.cuda.CUDAGraph(), torch.empty(0, device=CUDA)
    x = torch.ones(3, device=CUDA)
    with torch.cuda.graph(graph), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.add(x, x, out=out)
    graph.replay()
    assert out.tolist() == [2, 2, 2]


def case_graph_misused() -> None:
    with pytest.raises(RuntimeError, match=r"^CUDA graphs must be captured on a non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()
    weight = nn.Parameter(torch.ones(1, device=CUDA))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.Adam([weight], capturable=False)
    with pytest.raises(RuntimeError, match=r"^Attempting CUDA graph capture of step"):  # noqa: SIM117
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
    with pytest.warns(UserWarning, match=r"^The CUDA Graph is empty"):  # noqa: SIM117
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            pass


def case_an_old_type_takes_a_size() -> None:
    size = torch.ones(4, 2).size()
    assert torch.cuda.FloatTensor(size).shape == (4, 2)
    assert torch.cuda.LongTensor([4, 2]).tolist() == [4, 2]


def case_shares_and_names_of_a_gpu() -> None:
    total = torch.cuda.get_device_properties(1).total_memory
    before = torch.cuda.get_per_process_memory_fraction(1)
    torch.cuda.set_per_process_memory_fraction(0.0, 1)
    assert torch.cuda.get_per_process_memory_fraction(1) == 0.0
    with pytest.raises(torch.OutOfMemoryError, match="0 bytes allowed"):
        torch.empty(total // 4, dtype=torch.uint8, device="cuda:1")
    torch.cuda.set_per_process_memory_fraction(before, 1)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory. Tried to allocate more than 1EB memory.$"):
        torch.empty(1 << 62, dtype=torch.uint8, device=CUDA)
    assert (before, len(torch.cuda.get_device_properties(0).uuid.bytes)) == (1.0, 16)
    with pytest.raises(NotImplementedError, match="all tensors come from the default pool"):
        torch.cuda.MemPool()


def case_history() -> None:
    """What is freed was allocated, what a CPU's kernel does not count among it."""
    torch.cuda.memory._record_memory_history(enabled="all")
    assert torch._C._cuda_isHistoryEnabled()
    F.dropout(torch.ones(3, device=CUDA), 0.5)
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    assert not torch._C._cuda_isHistoryEnabled()
    taken, freed = ([e["addr"] for e in events if e["action"] == what] for what in ("alloc", "free_completed"))
    assert len(taken) == 3
    assert sorted(taken) == sorted(freed)


def case_graph_of_a_whole_step() -> None:
    on_cpu, on_gpu = pair(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    x, y, graph = torch.randn(5, 4, device=CUDA), torch.randn(5, 1, device=CUDA), torch.cuda.CUDAGraph()
    mine, theirs = torch.optim.SGD(on_gpu.parameters(), 0.1), torch.optim.SGD(on_cpu.parameters(), 0.1)
    with torch.cuda.graph(graph):
        loss = F.mse_loss(on_gpu(x), y)
        loss.backward()
        mine.step()
    for _ in range(4):
        data = torch.randn(5, 4), torch.randn(5, 1)
        x.copy_(data[0])
        y.copy_(data[1])
        graph.replay()
        theirs.zero_grad()
        expected = F.mse_loss(on_cpu(data[0]), data[1])
        expected.backward()
        theirs.step()
        assert loss.item() == expected.item()


def case_profiler_and_marks() -> None:
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.nvtx.range_push("a")
    torch.cuda.nvtx.range_pop()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as profiled:
            torch.ones(3, device=CUDA).sum().item()
    assert "aten::sum" in profiled.key_averages().table(sort_by="cuda_time_total")


def case_refused_by_name() -> None:
    from torch.utils import cpp_extension

    @torch.compile
    def makes_one() -> Any:
        return torch.ones(1, device=CUDA) + 1

    expected = {
        "utilization": lambda: torch.cuda.utilization(),
        "the CUDA extension 'a'": lambda: cpp_extension.load("a", ["a.cpp", "a.cu"]),
        "the CUDA extension 'b'": lambda: cpp_extension.load_inline("b", "", cuda_sources="__global__ void f() {}"),
        "the CUDA extension 'c'": lambda: cpp_extension.CUDAExtension("c", ["c.cu"]),
        "inductor, writes Triton kernels": makes_one,
        "the backend cudagraphs": lambda: torch.compile(torch.sin, backend="cudagraphs")(torch.ones(1, device=CUDA)),
        "inductor": lambda: torch.compile(nn.Linear(3, 2).cuda())(torch.ones(1, 3, device=CUDA)),
        "_flash_attention_forward": lambda: torch.ops.aten._flash_attention_forward(
            *[torch.randn(1, 3, 2, 8, device=CUDA)] * 3, None, None, 3, 3, 0.0, False, False
        ),
        "aot_eager": lambda: torch.compile(torch.sin)(torch.ones(1, device=CUDA)),
    }
    for words, program in expected.items():
        with pytest.raises(Exception, match=words):
            program()
    assert cpp_extension.CppExtension("d", ["d.cpp"]).name == "d"
    torch._dynamo.reset()
    assert torch.compile(torch.sin, backend="aot_eager")(torch.zeros(1, device=CUDA)).item() == 0


def case_triton() -> None:
    """A launch is refused. Where Triton is not installed, a module that has only what a launch is stands for it."""
    with tempfile.TemporaryDirectory() as folder:
        if importlib.util.find_spec("triton") is None:
            runtime = Path(folder, "triton", "runtime")
            runtime.mkdir(parents=True)
            (runtime / "jit.py").write_text("class JITFunction:\n    def run(self):\n        return 'it ran'\n")
            sys.path.append(folder)
        from triton.runtime.jit import JITFunction

        with pytest.raises(NotImplementedError, match="cannot run the Triton kernel add: Triton compiles for a GPU"):
            JITFunction.run(SimpleNamespace(__name__="add"))


def case_memory() -> None:
    torch.cuda.set_device(3)
    before = torch.cuda.memory_allocated()
    x = torch.ones(1024, 1024, device=CUDA)
    y = x @ x
    del y
    assert torch.cuda.memory_allocated() - before >= 4 << 20
    assert torch.cuda.max_memory_allocated() - before >= 8 << 20
    part = x.view(-1)[:10]
    now = torch.cuda.memory_allocated()
    del x
    assert torch.cuda.memory_allocated() == now  # a view keeps the storage
    del part
    assert torch.cuda.memory_allocated() == now - (4 << 20)
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == torch.cuda.max_memory_allocated()
    assert "PyTorch CUDA memory summary, device ID 3" in torch.cuda.memory_summary()
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total == torch.cuda.get_device_properties(3).total_memory
    assert torch.cuda.memory_snapshot()
    torch.cuda.set_device(0)


def case_memory_is_full() -> None:
    full = r"Tried to allocate 18.26 GiB. GPU 0 has a total capacity of 14.76 GiB"
    with pytest.raises(torch.OutOfMemoryError, match=full):
        torch.ones(70000, 1, device=CUDA) @ torch.ones(1, 70000, device=CUDA)
    torch.cuda.set_per_process_memory_fraction(0.01)
    with pytest.raises(torch.OutOfMemoryError, match=r"151.10 MiB allowed;"):
        torch.empty(1 << 28, dtype=torch.uint8, device=CUDA)
    torch.cuda.set_per_process_memory_fraction(1.0)


def case_flags() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    torch.set_float32_matmul_precision("highest")
    assert torch.backends.cuda.preferred_linalg_library("magma") == torch._C._LinalgBackend.Magma
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        F.scaled_dot_product_attention(*[torch.randn(1, 2, 3, 4, device=CUDA)] * 3)


def case_streams() -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.Stream()
    begin.record()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        torch.ones(2, device=CUDA).record_stream(stream)
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) > 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def case_an_event_belongs_to_the_gpu_of_its_first_stream() -> None:
    event = torch.cuda.Event()
    assert event.device is None
    event.record(torch.cuda.Stream(1))
    assert event.device == torch.device("cuda:1")
    event.record(torch.cuda.Stream("cuda:1"))


def case_loaded_script() -> None:
    model = nn.Linear(3, 2).cuda()
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(model), file)
    x = torch.ones(1, 3)
    for to, place in ((CUDA, "cuda:0"), ("cuda:1", "cuda:1"), (None, "cuda:0"), ("cpu", "cpu")):
        file.seek(0)
        script = torch.jit.load(file, map_location=to)
        assert str(next(script.parameters()).device) == place
        assert equal(model(x.cuda()).cpu(), script(x.to(place)))


def case_quantized() -> None:
    x = torch.tensor([0.1, 0.26], device=CUDA)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        low, on_cpu = (torch.quantize_per_tensor(one, 0.1, 10, torch.quint8) for one in (x, x.cpu()))
    assert low.is_cuda
    assert low.int_repr().tolist() == on_cpu.int_repr().tolist()
    assert equal(on_cpu.dequantize(), low.dequantize())
    assert low.cpu().device.type == "cpu"
    assert on_cpu.cuda().dequantize().is_cuda


def case_ranges_of_autograd_are_marked() -> None:
    with torch.autograd.profiler.emit_nvtx() as ranges:
        assert (torch.ones(2, device=CUDA) * 2).tolist() == [2, 2]
        with pytest.raises(RuntimeError, match="not reentrant"):
            ranges.__enter__()


def case_flight_recorder_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="simulated GPUs have no NCCL whose operations the flight recorder"):
        torch._C._distributed_c10d._dump_nccl_trace()


def case_gradients_of_several_losses() -> None:
    """A backward on a GPU runs in a thread of its own, which numbers the nodes of a second one from the start: autograd
    then adds up in another order than on the CPU. In one thread the order is the same, and so are the digits."""
    on_cpu, on_gpu = pair(lambda: nn.Sequential(nn.Linear(50, 40), nn.LeakyReLU(0.2), nn.Linear(40, 1)))
    grads = []
    for model, device in ((on_cpu, "cpu"), (on_gpu, CUDA)):
        torch.manual_seed(1)
        real, fake = torch.randn(30, 50).to(device), torch.randn(30, 50).to(device).requires_grad_()
        with torch.autograd.set_multithreading_enabled(False):
            apart = model(fake.detach()).mean() - model(real).mean()
            slope = torch.autograd.grad(model(fake).sum(), fake, create_graph=True)[0]
            loss = apart + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
            loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(equal(a, b) for a, b in zip(*grads, strict=True))


def case_a_group_of_one_rank_misused() -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    cpu, x, low = torch.ones(2), torch.ones(2, device=CUDA), torch.ones(2, device=CUDA, dtype=torch.half)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    group, two = dist.group.WORLD, nn.Sequential(nn.Linear(2, 2).cuda(), nn.Linear(2, 2))
    to_itself = "NCCL Error 5: invalid usage"
    wrong: dict[str, Any] = {
        "No backend type associated with device type cpu": [
            lambda: dist.all_reduce(cpu), lambda: dist.broadcast(cpu, 0), lambda: DDP(nn.Linear(2, 2)),
        ],
        "but got device_ids [0], output_device None, and module parameters {device(type='cpu')}.": [
            lambda: DDP(nn.Linear(2, 2), device_ids=[0])
        ],
        "input module must be on the same type of devices, but input module parameters locate in {": [
            lambda: DDP(two, device_ids=[0])
        ],
        "device_ids can only be None or contain a single element.": [
            lambda: DDP(nn.Linear(2, 2).cuda(), device_ids=[0, 1])
        ],
        "CUDA error: invalid device ordinal": [
            lambda: DDP(nn.Linear(2, 2).cuda(), device_ids=[5])(cpu[None]), lambda: dist.barrier(device_ids=[9]),
        ],
        "Tensors must be CUDA and dense": [lambda: dist.all_gather([cpu], x), lambda: dist.gather(x, [cpu], 0)],
        "Invalid usage of tensors with different dtypes": [
            lambda: dist.all_gather([low], x), lambda: dist.all_to_all_single(low, x),
            lambda: dist.reduce_scatter(x, [low]),
        ],
        "output tensor must have the same type as input tensor": [lambda: dist.all_gather_into_tensor(low, x)],
        "Invalid destination rank: destination rank should not be the same as the rank of": [lambda: dist.send(x, 0)],
        to_itself: [lambda: dist.isend(x, 0), lambda: dist.recv(x, 0)],
        "trying to initialize the default process group twice!": [
            lambda: dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        ],
    }  # fmt: skip
    for words, programs in wrong.items():
        for program in programs:
            with pytest.raises((RuntimeError, ValueError, TypeError), match=re.escape(words)):
                program()
    dist.all_reduce(x)
    dist.destroy_process_group()
    with pytest.raises(dist.DistBackendError, match=r"^NCCL communicator was aborted on rank 0\. $"):
        group.allreduce([x])


def case_a_check_for_nan_before_a_collective() -> None:
    """An assertion in a kernel, after which the process has lost the GPU; here it gets it back."""
    import torch.distributed as dist

    from nbddp.capabilities.simulated_gpus.on_rank import devices

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    backend, nan = dist.group.WORLD._get_backend(torch.device(CUDA)), torch.full((2,), float("nan"), device=CUDA)
    backend._set_enable_nan_check(True)
    dist.all_reduce(torch.ones(2, device=CUDA))
    with pytest.raises(RuntimeError, match=r"^CUDA error: device-side assert triggered") as caught:
        dist.all_reduce(nan)
    devices.broken = False
    assert "found NaN in what rank 0 sends in c10d::allreduce_" in str(caught.value.__cause__)
    backend._set_enable_nan_check(False)
    dist.all_reduce(nan)
    dist.destroy_process_group()


def case_a_second_group_on_a_store_has_keys_of_its_own() -> None:
    """With those of the first, a rank may meet the address of a group that is gone."""
    import torch.distributed as dist

    store = dist.HashStore()
    for _ in range(2):
        dist.ProcessGroupNCCL(store, 0, 1)
    assert store.add("simulated/made/0", 0) == 2


def case_a_wrong_value_of_a_switch_of_nccl() -> None:
    import torch.distributed as dist

    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "on"
    try:
        with pytest.raises(RuntimeError, match="Invalid value for environment variable: TORCH_NCCL_BLOCKING_WAIT"):
            dist.ProcessGroupNCCL(dist.HashStore(), 0, 1)
    finally:
        del os.environ["TORCH_NCCL_BLOCKING_WAIT"]


def case_transforms() -> None:
    x = torch.randn(4, 4, device=CUDA)
    assert torch.vmap(lambda row: row.sin().sum())(x).is_cuda
    assert torch.func.grad(lambda one: (one**3).sum())(x).is_cuda
    assert copy.deepcopy(nn.Linear(2, 2).cuda()).weight.is_cuda
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    assert model.to_empty(device="cuda:2").weight.get_device() == 2
    assert torch.from_dlpack(torch.ones(2)).device.type == "cpu"


CASES = {name.removeprefix("case_"): case for name, case in globals().items() if name.startswith("case_")}


def main() -> None:
    from nbddp.capabilities.simulated_gpus.cards import cards_of
    from nbddp.capabilities.simulated_gpus.on_rank import install
    from tests.contract.gpu_programs import wrong

    install(cards_of("4"))
    raised = {}
    for name, case in CASES.items():
        try:
            case()
        except BaseException:
            raised[name] = traceback.format_exc(limit=-4)
        else:
            raised[name] = ""
    print("RAISED", json.dumps({"cases": raised, "wrong": wrong.said()}))


if __name__ == "__main__":
    main()
