"""What simulated GPUs do not have: answered with nothing where that is true, else refused by name, with why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    "list_gpu_processes": "list of processes by the driver",
}
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
    torch.cuda.nvtx._nvtx = _ranges()
    _profiler()
    _inductor()


def _refuse(why: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise Refused(why)

    return refused


def _ranges() -> SimpleNamespace:
    """nvtx: marks for a profiler that is not there. A range's depth is returned, as by the library."""
    depth = [0]

    def push(text: str) -> int:
        depth[0] += 1
        return depth[0] - 1

    def pop() -> int:
        depth[0] -= 1
        return depth[0]

    def start(text: str, *stream: Any) -> int:
        return 0

    def nothing(*args: Any) -> None: ...

    return SimpleNamespace(
        rangePushA=push, rangePop=pop, rangeStartA=start, rangeEnd=nothing, markA=nothing,
        deviceRangeStart=start, deviceRangeEnd=nothing,
    )  # fmt: skip


def _profiler() -> None:
    """CUDA activities are accepted, and none occur."""
    profiler = torch.autograd.profiler
    cuda = torch.autograd.ProfilerActivity.CUDA
    for name in ("_prepare_profiler", "_enable_profiler"):
        original = getattr(profiler, name)

        def without(config: Any, activities: Any, *more: Any, _original: Any = original, **kwargs: Any) -> Any:
            return _original(config, set(activities) - {cuda}, *more, **kwargs)

        setattr(profiler, name, without)


def _inductor() -> None:
    wrapper = torch._TorchCompileInductorWrapper
    original = wrapper.__call__

    def call(self: Any, module: Any, inputs: Any) -> Any:
        if any(isinstance(one, torch.Tensor) and one.device.type == "cuda" for one in inputs):
            raise Refused(INDUCTOR)
        return original(self, module, inputs)

    wrapper.__call__ = call
