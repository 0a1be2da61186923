"""Trials of torch's seams in DDP, autograd and tensors, as those of process groups in `probes_torch`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from nbddp.compat import torch as torch_compat
from nbddp.compat.probes import Untried, alone, expect
from nbddp.worker.call_log import COLLECTIVES


def frames_of_backward() -> None:
    import torch

    names: list[str] = []

    def hook(gradient: Any) -> None:
        frame: Any = sys._getframe()
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back

    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(hook)
    leaf.sum().backward()
    expect(torch_compat.BACKWARD in names, f"backward runs without {torch_compat.BACKWARD}")


def backends_of_a_group() -> None:
    with alone() as (dist, _):
        group = dist.group.WORLD
        other = dist.ProcessGroup(0, 1)
        expect(torch_compat.share_backends(group, other) == group.name(), "one group cannot have another's backends")
        del other


def end_of_backward() -> None:
    import torch

    called: list[int] = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda gradient: torch_compat.autograd_engine().queue_callback(lambda: called.append(1)))
    leaf.sum().backward()
    expect(called, "the engine does not call back")


def data_loaders() -> None:
    import torch
    from torch.utils.data import DataLoader

    owner = torch_compat.loader_iterator()
    expect(owner is not None and "__next__" in vars(owner), "iterators over data loaders have no common __next__")
    batches = iter(DataLoader(torch.arange(2)))
    expect(isinstance(batches, owner), "an iterator over a data loader is of another class")
    del batches


def end_of_data_loaders() -> None:
    import torch
    from torch.utils.data import DataLoader

    asked: list[int] = []

    def hurries() -> Callable[[], bool]:
        asked.append(1)
        return lambda: False

    torch_compat.hurry_loaders(hurries, 60)
    batches = iter(DataLoader(torch.arange(2), num_workers=1))
    del batches
    expect(asked, "an iterator over a data loader ends its processes in another way")


def ddps_hooks() -> None:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    with alone():
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model.register_comm_hook(None, allreduce_hook)
        expect(torch_compat.replace_last_hook(model, allreduce_hook, None), "DDP keeps no list of hooks")
        del model


def methods_of_collectives() -> None:
    with alone() as (dist, one), _called(COLLECTIVES) as called:
        dist.all_gather_into_tensor(one, one)
        dist.reduce_scatter_tensor(one, one)
    names = [COLLECTIVES[method][0] for method in called]
    expect(names == ["all_gather_into_tensor", "reduce_scatter_tensor"], "they go by another method")


@contextmanager
def _called(methods: Iterable[str]) -> Iterator[list[str]]:
    """The names of these methods of a process group, as they are called while the block lasts."""
    import torch.distributed as dist

    called: list[str] = []
    originals = {name: vars(dist.ProcessGroup)[name] for name in methods if name in vars(dist.ProcessGroup)}

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return original(*args, **kwargs)

        return call

    for name in originals:
        setattr(dist.ProcessGroup, name, noting(name, getattr(dist.ProcessGroup, name)))
    try:
        yield called
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


def compiled_modules() -> None:
    import torch

    module = torch.nn.Linear(1, 1)
    made = torch.compile(module)
    expect(torch_compat.is_compiled(made), "a compiled module does not keep the module")
    expect(torch_compat.compiled_from(made) is module, "it keeps another one")


def shards_of_dtensors() -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    with alone():
        made = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)))
        expect(type(torch_compat.shard(made)) is torch.Tensor, "a DTensor does not keep its shard")


def parts_of_sparse() -> None:
    import torch

    indices, values = torch_compat.sparse_parts(
        torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), check_invariants=False)
    )
    expect((indices.shape[1], len(values)) == (2, 2), "the tensor was coalesced")


def profilers_of_programs() -> None:
    from torch import profiler

    seen: list[str] = []
    torch_compat.watch_profilers(lambda: seen.append("begins"), lambda: seen.append("on"), lambda: seen.append("off"))
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]):
        expect("on" in seen and seen[0] == "begins", "that a profiler starts is not noticed before it does")
    expect(seen[-1] == "off", "that a profiler has stopped is not noticed")


def history_of_gpu_memory() -> None:
    import torch

    if not torch_compat.begin_memory_history(100):
        raise Untried("torch sees no GPU here")
    tensor = torch.ones(1, device="cuda")
    found = torch_compat.end_memory_history()
    entries = [e for some in found["device_traces"] for e in some if e["action"] == "alloc"]
    expect(any(e["addr"] == tensor.untyped_storage().data_ptr() for e in entries), "an allocation is not recorded")
    lacking = [key for key in ("size", "time_us", "frames") if key not in entries[-1]]
    expect(not lacking, f"an allocation has no {', '.join(lacking)}")
    expect(all("allocated_size" in segment for segment in found["segments"]), "segments do not say what is allocated")
    expect(entries[-1]["frames"], "an allocation has no Python frames")


def import_of_the_compiler() -> None:
    importlib.import_module(torch_compat.COMPILER)


TRIALS: dict[str, Callable[[], None]] = {
    "frames of backward": frames_of_backward,
    "backends of a group": backends_of_a_group,
    "end of backward": end_of_backward,
    "data loaders": data_loaders,
    "end of data loaders": end_of_data_loaders,
    "DDP's list of hooks": ddps_hooks,
    "methods of collectives": methods_of_collectives,
    "compiled modules": compiled_modules,
    "shards of DTensors": shards_of_dtensors,
    "parts of sparse tensors": parts_of_sparse,
    "profilers of a program": profilers_of_programs,
    "history of GPU memory": history_of_gpu_memory,
    "import of the compiler": import_of_the_compiler,
}
