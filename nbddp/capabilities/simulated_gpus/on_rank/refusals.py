"""What simulated GPUs do not have: answered with nothing where that is true, else refused by name, with why."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

NOT_MEASURED = "a simulated GPU has no {}: its work is done by the CPU, whose own tools measure that"
NVML: Mapping[str, str] = {  # of torch.cuda → what it would measure
    "utilization": "utilization",
    "memory_usage": "memory traffic",
    "temperature": "temperature",
    "power_draw": "power draw",
    "clock_rate": "clock",
}
WHY_NONE = {  # why torch._C has none → the names
    "jiterator compiles CUDA C++, which only a GPU runs": (
        "_cuda_jiterator_compile_and_launch_kernel _cuda_jiterator_compile_and_launch_kernel_multi_outputs"
    ),
    "a custom CUDA allocator calls the NVIDIA driver, and there is none": (
        "_cuda_customAllocator _cuda_changeCurrentAllocator"
    ),
    "a stream of another library belongs to the NVIDIA driver, and there is none": "_cuda_getStreamFromExternal",
    "an address in memory belongs to a GPU, and there is none": (
        "_cuda_cudaCachingAllocator_raw_alloc _cuda_cudaCachingAllocator_raw_delete _cuda_cudaHostAllocator "
        "_cuda_getAllocator _cuda_allocationTraceback"
    ),
    "a cuSOLVER handle belongs to the NVIDIA driver, and there is none": "_cuda_getCurrentSolverHandle",
    "the backend cudagraphs looks into the driver's memory; torch.cuda.graph works": (
        "_cuda_checkPoolLiveAllocations _cuda_getCheckpointState _cuda_setCheckpointPoolState "
        "_cuda_beginAllocateCurrentStreamToPool _construct_CUDA_Tensor_From_Storage_And_Metadata"
    ),
    "TunableOp tries kernels of cuBLAS, and there is no cuBLAS": (
        "_cuda_tunableop_enable _cuda_tunableop_tuning_enable _cuda_tunableop_set_max_tuning_duration "
        "_cuda_tunableop_set_max_tuning_iterations _cuda_tunableop_set_filename _cuda_tunableop_read_file "
        "_cuda_tunableop_get_results _cuda_tunableop_get_validators _cuda_tunableop_set_rotating_buffer_size "
        "_cuda_tunableop_set_numerical_check_tolerances _cuda_tunableop_get_filename "
        "_cuda_tunableop_get_max_tuning_duration _cuda_tunableop_get_max_tuning_iterations "
        "_cuda_tunableop_get_rotating_buffer_size"
    ),
    "NCCL in one process is simulated for DataParallel alone; use torch.distributed": (
        "_nccl_all_gather _nccl_reduce_scatter _nccl_unique_id _nccl_init_rank"
    ),
}
OF_DRIVER = {name: why for why, names in WHY_NONE.items() for name in names.split()}
RECORDER = "simulated GPUs have no NCCL whose operations the flight recorder would hold; %ddp collectives shows them"
OF_C10D = ("_dump_nccl_trace", "_dump_nccl_trace_json", "_reset_fr_recording_nccl")  # of torch._C._distributed_c10d
POOLS = "separate pools of the allocator are not simulated; all tensors come from the default pool"
INDUCTOR = (
    "torch.compile's default backend, inductor, writes Triton kernels, which only a GPU runs. On simulated GPUs use "
    "torch.compile(..., backend='aot_eager'): it traces the same graphs, and finds the same graph breaks"
)


class Refused(NotImplementedError):
    """A simulated GPU does not have this."""


def install() -> None:
    for name, what in NVML.items():
        if hasattr(torch.cuda, name):
            setattr(torch.cuda, name, _refuse(NOT_MEASURED.format(what)))
    for name, why in OF_DRIVER.items():
        setattr(torch._C, name, _refuse(f"simulated GPUs: {why}"))
    for name in OF_C10D:
        setattr(torch._C._distributed_c10d, name, _refuse(RECORDER))
    pool = type("MemPool", (), {"__init__": _refuse(f"simulated GPUs: {POOLS}")})  # torch asks what is one
    torch.cuda.MemPool = torch.cuda.memory.MemPool = pool
    torch.cuda.nvtx._nvtx = _ranges()
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # its own answer comes with a warning
    _profiler()
    _inductor()


def _refuse(why: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise Refused(why)

    return refused


def _ranges() -> SimpleNamespace:
    """nvtx: marks for a profiler that is not there, which the library answers with -2."""

    def absent(*args: Any) -> int:
        return -2

    def nothing(*args: Any) -> None: ...

    return SimpleNamespace(
        rangePushA=absent, rangePop=absent, rangeStartA=lambda *args: 0, rangeEnd=nothing, markA=nothing,
        deviceRangeStart=lambda *args: 0, deviceRangeEnd=nothing,
    )  # fmt: skip


def _profiler() -> None:
    """CUDA activities are accepted, and none occur."""
    profiler = torch.autograd.profiler
    cuda = torch.autograd.ProfilerActivity.CUDA
    supported = profiler._supported_activities
    fallback, plain = torch.autograd.ProfilerState.KINETO_GPU_FALLBACK, torch.autograd.ProfilerState.KINETO
    of = profiler.profile.config

    def config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.profiler_kind == fallback:  # which would record CUDA's events
            self.profiler_kind = plain
        return of(self, *args, **kwargs)

    profiler.profile.config = config
    profiler._supported_activities = lambda: supported() | {cuda}
    for name in ("_prepare_profiler", "_enable_profiler"):
        original = getattr(profiler, name)

        def without(config: Any, activities: Any, *more: Any, _original: Any = original, **kwargs: Any) -> Any:
            return _original(config, set(activities) - {cuda}, *more, **kwargs)

        setattr(profiler, name, without)
    profiler.emit_nvtx.__enter__ = _begin_ranges
    profiler.emit_nvtx.__exit__ = lambda self, *error: False


def _begin_ranges(self: Any) -> Any:
    """Of `emit_nvtx`: marks for a profiler that is not there."""
    if self.enabled and self.entered:
        raise RuntimeError("NVTX annotation context manager is not reentrant")
    self.entered = self.enabled
    return self if self.enabled else None


def _inductor() -> None:
    wrapper = torch._TorchCompileInductorWrapper
    original = wrapper.__call__

    def call(self: Any, module: Any, inputs: Any) -> Any:
        made = (node.meta.get("example_value") for node in module.graph.nodes)
        if any(isinstance(one, torch.Tensor) and one.device.type == "cuda" for one in (*inputs, *made)):
            raise Refused(INDUCTOR)
        return original(self, module, inputs)

    wrapper.__call__ = call
    compile_ = torch.compile

    @functools.wraps(compile_)
    def untraced(*args: Any, **kwargs: Any) -> Any:
        """Dynamo leaves the functions of this folder alone, as those of torch itself."""
        import_module("torch._dynamo.trace_rules").add(__package__)
        return compile_(*args, **kwargs)

    torch.compile = untraced
