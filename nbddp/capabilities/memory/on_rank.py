"""The contents of this rank's memory: tensors that live between steps, and the peak.

The sources of the numbers, all in bytes:

- parameters, module buffers: the storages of parameters and buffers, from three sources. These are all modules that
  names of the rank lead to (also within lists, tuples, dicts and objects of classes that cells wrote); the DDP models
  that the recorder knows; and what living optimizers step. Each storage counts once, however many tensors (tied, views)
  lie in it; of a DTensor this rank's shard.
- gradients: the storages of those parameters' `.grad`.
- optimizer state: the storages of the tensors in `state` of all optimizers that names lead to or that have stepped.
  Closed forms per float32 parameter: Adam 8 bytes (and one 4-byte step counter per tensor), SGD with momentum 4.
- DDP buckets: the buffers of DDP's reducer, with their sizes in the last recorded step with an exchange. Without such a
  step, the bytes of all parameters that require a gradient: the reducer has each in exactly one bucket. With
  `gradient_as_bucket_view` the gradients lie in the buckets: what they hold already is not counted again. With
  `lazy_bucket_allocation` (torch 2.15) the reducer has buckets in backward alone. They are `passing`, a part only in
  the peak. A backward that has not ended still holds the buckets that it had sent.
- peak: since the last cell began. On CUDA `torch.cuda.max_memory_allocated`, whose statistics each cell begins
  anew, over all of the rank's devices; on CPU Linux's VmHWM, reset likewise through /proc/self/clear_refs, or,
  where that cannot be written (macOS), getrusage's since the worker started.

Activations on a CPU are not measured by themselves: that takes a hook on every saved tensor, which costs each
step. They are in the rest of the process.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbddp.capabilities.timings.on_rank import tensors
from nbddp.compat import system
from nbddp.compat.extra import torch as torch_extra
from nbddp.protocol import pickling
from nbddp.protocol.run_spec import RunSpec
from nbddp.worker.parts import RankWorker

if TYPE_CHECKING:
    from nbddp.capabilities.memory.parts import MemoryAnswer, RankMemory

DEEPEST = 4  # containers and objects within each other


class Memory:
    """This worker's peaks, made when it starts."""

    def __init__(self) -> None:
        self.start = resident()
        self.since_start = True

    def begin(self, spec: RunSpec) -> None:
        """A program begins: peaks are taken from here on. Costs some microseconds."""
        if not spec.is_program:
            return
        _each_device("reset_peak_memory_stats")
        self.since_start = True
        with suppress(OSError):
            if system.has_proc():
                with open("/proc/self/clear_refs", "wb", buffering=0) as file:
                    file.write(b"5")  # proc(5): resets the peak resident set size
                self.since_start = False

    def collect(self, namespace: Mapping[str, object], recorder: Any) -> MemoryAnswer | None:
        """What this rank holds, and (run, cell) of the last recorded step; None if there is no module and no
        optimizer."""
        peak = _peak_resident(self.since_start)
        gc.collect()  # a model that a cell has replaced is garbage in a cycle
        modules, optimizers = _living(namespace, recorder)
        if not modules and not optimizers:
            return None
        held, on_gpu = _parts(modules, optimizers, recorder)
        allocated = _each_device("max_memory_allocated") if on_gpu else None
        if allocated is not None:
            found = replace(held, kind="cuda", peak=sum(allocated), outside=held.kept - on_gpu)
        else:
            found = replace(held, peak=peak, outside=on_gpu, start=self.start, since_start=self.since_start)
        return found, recorder.trained


def _parts(modules: list[Any], optimizers: list[Any], recorder: Any) -> tuple[RankMemory, int]:
    """What the parts hold, and how much of all lies on GPUs."""
    from nbddp.capabilities.memory.parts import RankMemory

    tally = _Tally()
    parameters = [p for m in modules for p in m.parameters()]
    parameters += [p for o in optimizers for group in o.param_groups for p in group["params"]]
    held = RankMemory(
        parameters=tally.add(parameters),
        buffers=tally.add(b for m in modules for b in m.buffers()),
        gradients=tally.add(p.grad for p in parameters if p.grad is not None),
        optimizer=tally.add(t for o in optimizers for state in list(o.state.values()) for t in tensors(state)),
    )
    for ddp in _ddps(modules):
        size, passing = _buckets(ddp, recorder)
        held = replace(held, buckets=held.buckets + size, passing=held.passing + passing)
        if next(ddp.parameters()).is_cuda:
            tally.cuda += size
    return held, tally.cuda


class _Tally:
    """Adds up storages, each once."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int]] = set()
        self.cuda = 0

    def add(self, tensors: Iterable[Any]) -> int:
        """Bytes of the storages that were not seen before."""
        total = 0
        for tensor in tensors:
            for device, at, size in storages(tensor):
                if (device, at) not in self._seen:
                    self._seen.add((device, at))
                    total += size
                    self.cuda += size if device.startswith("cuda") else 0
        return total


def storages(tensor: Any) -> list[tuple[str, int, int]]:
    """(device, address, bytes) of what a tensor lies in on this rank; nothing for meta tensors."""
    local = torch_extra.shard(tensor)
    if local.is_meta:
        return []
    if local.is_sparse:
        return [s for part in torch_extra.sparse_parts(local) for s in storages(part)]
    try:
        storage = local.untyped_storage()
    except (RuntimeError, NotImplementedError):  # a layout without one
        return []
    return [(str(local.device), storage.data_ptr(), storage.nbytes())] if storage.nbytes() else []


def _buckets(ddp: Any, recorder: Any) -> tuple[int, int]:
    """Bytes of DDP's buckets that are not its gradients' own memory: those held now, and those that backward has."""
    views, lazy = (getattr(ddp, name, False) for name in ("gradient_as_bucket_view", "lazy_bucket_allocation"))
    parameters = [p for p in ddp.parameters() if p.requires_grad]
    size = recorder.bucket_bytes(ddp)
    if size is None:
        size = sum(p.numel() * p.element_size() for p in parameters)
    now = recorder.unfinished_bytes(ddp) if lazy else int(size)
    if views:
        now = max(0, now - _Tally().add(p.grad for p in parameters if p.grad is not None))
    return now, int(size) - now if lazy and not views else 0


# -- what lives --------------------------------------------------------------------------------


def _living(namespace: Mapping[str, object], recorder: Any) -> tuple[list[Any], list[Any]]:
    """Modules and optimizers, each once."""
    import torch

    seen: dict[int, Any] = {}
    for thing in [*map(namespace.get, user_names(namespace)), *recorder.models(), *list(recorder.optimizers)]:
        for found in _within(thing, DEEPEST):
            seen[id(found)] = found
    return (
        [x for x in seen.values() if isinstance(x, torch.nn.Module)],
        [x for x in seen.values() if isinstance(x, torch.optim.Optimizer)],
    )


def user_names(namespace: Iterable[str]) -> list[str]:
    return [n for n in list(namespace) if not n.startswith("_") and n not in ("In", "Out")]


def _within(thing: Any, depth: int) -> Iterator[Any]:
    """Modules and optimizers in a value."""
    import torch

    if isinstance(thing, torch.nn.Module | torch.optim.Optimizer):
        yield thing
    elif depth and isinstance(thing, dict):
        for value in list(thing.values()):
            yield from _within(value, depth - 1)
    elif depth and isinstance(thing, list | tuple | set):
        for value in list(thing):
            yield from _within(value, depth - 1)
    elif depth and type(thing).__module__ == "__main__":
        yield from _within(getattr(thing, "__dict__", None), depth - 1)


def _ddps(modules: list[Any]) -> list[Any]:
    from torch.nn.parallel import DistributedDataParallel

    found = {id(m): m for module in modules for m in module.modules() if isinstance(m, DistributedDataParallel)}
    return list(found.values())


# -- the process -------------------------------------------------------------------------------


def _each_device(name: str) -> list[Any] | None:
    """`torch.cuda.name(device)` for every device; None where CUDA is not used or its allocator has no statistics."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():  # to ask for more would start the driver
        return None
    try:
        return [getattr(torch.cuda, name)(device) for device in range(torch.cuda.device_count())]
    except RuntimeError:  # a pluggable allocator
        return None


def resident() -> int:
    """Resident memory now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def _peak_resident(since_start: bool) -> int:
    """The most that was resident since the worker started, or since VmHWM was reset."""
    if since_start:
        return system.peak_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


# -- on a worker ---------------------------------------------------------------------------------


def part(worker: RankWorker) -> Memory:
    """The worker's own."""
    return Memory()


def memory(worker: RankWorker, buffers: Sequence[Any]) -> list[bytes]:
    """Where this rank's memory is; None without a module or optimizer."""
    return [pickling.pack_answer(worker.parts["memory"].collect(worker.shell.user_ns, worker.parts["timings"]))]
