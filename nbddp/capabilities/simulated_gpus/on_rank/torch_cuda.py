"""torch.cuda's Python runs as it is, on the functions here: a CUDA build would have them in `torch._C`."""

from __future__ import annotations

import functools
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from nbddp.capabilities.simulated_gpus.cards import MIB
from nbddp.capabilities.simulated_gpus.on_rank import (
    alerts,
    devices,
    kernels,
    machine,
    memory,
    streams,
    versions,
    workspaces,
)
from nbddp.capabilities.simulated_gpus.on_rank.machine import CUDA

CUDA_VERSION = 12080  # of a CPU build, which has none


MEASURED: Mapping[str, Mapping[str, int]] = {  # what a card said of itself, by its name
    "NVIDIA H100 80GB HBM3": {
        "L2_cache_size": 50 * MIB, "clock_rate": 1980000, "memory_bus_width": 5120, "memory_clock_rate": 2619000,
        "shared_memory_per_block_optin": 232448, "shared_memory_per_multiprocessor": 233472,
    },
}  # fmt: skip


class Properties:
    """As `torch.cuda.get_device_properties`."""

    def __init__(self, index: int) -> None:
        card = devices.card(index)
        self.name, self.total_memory = card.name, card.memory
        self.major, self.minor = card.capability
        self.multi_processor_count = card.multi_processor_count
        self.warp_size, self.max_threads_per_block = 32, 1024
        self.max_threads_per_multi_processor = 1024 if card.capability == (7, 5) else 2048
        self.regs_per_multiprocessor, self.shared_memory_per_block = 65536, 49152
        self.shared_memory_per_block_optin = self.shared_memory_per_multiprocessor = 65536
        self.is_integrated = self.is_multi_gpu_board = 0
        self.L2_cache_size, self.gcnArchName = 4 * MIB, card.name
        self.uuid = uuid.UUID(f"5173a7ed-0000-0000-0000-{devices.physical(index):012x}")
        self.pci_bus_id, self.pci_device_id, self.pci_domain_id = devices.physical(index) + 1, 0, 0
        vars(self).update(MEASURED.get(card.name, {}))

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // MIB}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size // MIB}MB)"
        )


Properties.__module__, Properties.__qualname__ = "torch._C", "_CudaDeviceProperties"


def properties(device: Any = None) -> Properties:
    torch.cuda._lazy_init()
    index = torch.cuda._utils._get_device_index(device, optional=True)
    if not 0 <= index < devices.count():
        raise AssertionError("Invalid device id")
    return _properties(devices.card(index), devices.physical(index), index)


@functools.cache
def _properties(card: Any, physical: int, index: int) -> Properties:
    """The same object each time, as torch's: programs compare two."""
    return Properties(index)


def initialise() -> None:
    if devices.count() < 1:
        raise RuntimeError("No CUDA GPUs are available")
    memory.begin()


def nothing(*args: Any, **kwargs: Any) -> None:
    """What has no effect where work is done at once and on the host."""


def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    devices.set_current(device_index)
    streams.set_current(device_index, stream_id)


def empty_cache() -> None:
    for one in memory.everything():
        one.allocator.release()


def synchronise(index: int | None = None) -> None:
    """Work is done at once, so there is none to wait for; a capture refuses it."""
    devices.check()
    if kernels.recording:
        raise versions.driver_error(versions.CAPTURING)
    if index is not None:
        devices.known_to_driver(index)


def in_range(index: int) -> int:
    """The same index. Raises what torch does if there is no such GPU."""
    if not 0 <= index < devices.count():
        raise RuntimeError(f"Device index value {index} is out of index range [0, {devices.count()})")
    return index


def memory_info(index: int) -> tuple[int, int]:
    """Bytes free and in total."""
    torch.cuda._lazy_init()
    one = memory.of(devices.known_to_driver(index))
    return one.free(), one.total


def set_fraction(fraction: float, index: int) -> None:
    memory.of(index).allowed = int(fraction * memory.of(index).total)


def get_fraction(index: int) -> float:
    one = memory.of(index)
    return 1.0 if one.allowed is None else one.allowed / one.total


def no_capabilities(index: int) -> None:
    raise RuntimeError("Backend doesn't support getting device capabilities.")


def used(device: Any = None) -> int:
    """As `torch.cuda.device_memory_used`."""
    free, total = memory_info(torch.cuda._utils._get_device_index(device, optional=True))
    return total - free


def processes(device: Any = None) -> str:
    """As `torch.cuda.list_gpu_processes`."""
    torch.cuda._lazy_init()
    index = torch.cuda._utils._get_device_index(device, optional=True)
    found = [(os.getpid(), memory.of(index).used), *memory.ledger.others(index)]
    rows = [f"process {pid:>10d} uses {size / MIB:>12.3f} MB GPU memory" for pid, size in found if size]
    return "\n".join([f"GPU:{index}", *(rows or ["no processes are running"])])


def blas_handle() -> int:
    """cuBLAS begins, and keeps its workspace."""
    workspaces.product(devices.current(), None)
    return 1


def archs() -> str:
    """The compute capabilities for which torch was compiled; a CPU build has none, so those of a CUDA build."""
    built = str(_own_archs()) if _own_archs is not None else ""
    return built or "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"


_own_archs = getattr(torch._C, "_cuda_getArchFlags", None)


def pin(address: int, size: int, flags: int) -> int:
    """As `cudaHostRegister`. A tensor is known as pinned by the address where its storage begins."""
    torch.ones(1).pin_memory()  # before the first pinned tensor torch asks nobody
    machine.pinned_blocks.add(address)
    return 0


def unpin(address: int) -> int:
    machine.pinned_blocks.discard(address)
    return 0


FUNCTIONS: Mapping[str, Callable[..., Any]] = {  # of torch._C
    "_cuda_init": initialise,
    "_cuda_getDeviceCount": devices.count,
    "_cuda_getDevice": devices.current,
    "_cuda_setDevice": devices.set_checked,
    "_cuda_exchangeDevice": devices.exchange_checked,
    "_cuda_maybeExchangeDevice": devices.exchange,
    "_cuda_isInBadFork": lambda: devices.forked,
    "_cuda_getArchFlags": archs,
    "_cuda_getCompiledVersion": lambda: CUDA_VERSION,
    "_cuda_synchronize": synchronise,
    "_cuda_ipc_collect": nothing,
    "_cuda_sleep": nothing,
    "_cuda_hasPrimaryContext": lambda index: bool(memory.everything()) and memory.of(index).used > 0,
    "_cuda_canDeviceAccessPeer": lambda one, other: one != other,
    "_cuda_emptyCache": empty_cache,
    "_cuda_getAllocatorBackend": lambda: "native",
    "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
    "_cuda_cudaCachingAllocator_enable": nothing,
    "_cuda_cudaCachingAllocator_set_allocator_settings": nothing,
    "_cuda_hostMemoryStats": dict,
    "_cuda_resetAccumulatedHostMemoryStats": nothing,
    "_cuda_resetPeakHostMemoryStats": nothing,
    "_host_emptyCache": nothing,
    "_cuda_getMemoryMetadata": lambda: "",
    "_cuda_setMemoryMetadata": nothing,
    "_cuda_setMemoryFraction": set_fraction,
    "_cuda_getMemoryFraction": get_fraction,
    "_cuda_getDefaultStream": lambda index: (0, index, CUDA),
    "_cuda_getCurrentStream": lambda index: (streams.current(in_range(index)), index, CUDA),
    "_cuda_getCurrentRawStream": streams.current,
    "_cuda_setStream": set_stream,
    "_cuda_get_sync_debug_mode": lambda: alerts.mode,
    "_cuda_set_sync_debug_mode": alerts.set_mode,
    "_cuda_lock_mutex": nothing,
    "_cuda_unlock_mutex": nothing,
    "_cuda_getCurrentBlasHandle": blas_handle,
    "_cuda_clearCublasWorkspaces": workspaces.clear,
    "_cuda_getCublasWorkspaceSize": lambda: 0,
    "_cuda_setCublasWorkspaceSize": nothing,
    "_cuda_getCublasLtWorkspaceSize": lambda: 0,
    "_cuda_setCublasLtWorkspaceSize": nothing,
    "_cuda_tunableop_is_enabled": lambda: False,
    "_cuda_tunableop_tuning_is_enabled": lambda: False,
    "_cuda_get_cudnn_benchmark_limit": lambda: 10,
    "_cuda_set_cudnn_benchmark_limit": nothing,
    "_cuda_resetCublasWorkspaceSize": nothing,
    "_cuda_resetCublasLtWorkspaceSize": nothing,
    "_cuda_get_conv_benchmark_empty_cache": lambda: False,
    "_cudnn_set_conv_benchmark_empty_cache": nothing,
    "_cuda_record_untuned_enable": nothing,
    "_cuda_record_untuned_is_enabled": lambda: False,
    **dict.fromkeys(
        ("_can_use_flash_attention", "_can_use_mem_efficient_attention", "_can_use_cudnn_attention"),
        lambda parameters, debug=False: False,  # else a CUDA build asks the driver; attention is written out
    ),
}
ACCELERATOR: Mapping[str, Callable[..., Any]] = {  # of torch._C, from 2.6 on; those that it has
    "_accelerator_setDeviceIndex": devices.set_checked,
    "_accelerator_getDeviceIndex": devices.current,
    "_accelerator_synchronizeDevice": synchronise,
    "_accelerator_exchangeDevice": devices.exchange,
    "_accelerator_maybeExchangeDevice": devices.exchange,
    "_accelerator_getStream": lambda index: streams.AcceleratorStream(
        stream_id=streams.current(in_range(index)), device_index=index, device_type=CUDA
    ),
    "_accelerator_isAllocatorInitialized": lambda: bool(memory.everything()),
    "_accelerator_getDeviceCapability": no_capabilities,
    "_accelerator_setStream": lambda stream: set_stream(stream.stream_id, stream.device_index, CUDA),
    "_accelerator_emptyCache": empty_cache,
    "_accelerator_getMemoryInfo": memory_info,
}
CLASSES = ("_cuda_CUDAAllocator_AllocatorState", "_cuda_CUDAAllocator")  # that torch.compile imports
ERRORS: Mapping[int, str] = {  # of the driver, that programs name
    0: "no error", 1: "invalid argument", 2: "out of memory", 3: "initialization error",
    35: "CUDA driver version is insufficient for CUDA runtime version", 100: "no CUDA-capable device is detected",
    101: "invalid device ordinal", 201: "invalid device context", 400: "invalid resource handle",
    700: "an illegal memory access was encountered", 710: "device-side assert triggered",
    719: "unspecified launch failure", 999: "unknown error",
}  # fmt: skip


class Error(int):
    """As `cudaError` of `torch.cuda.cudart()`."""

    success = 0


cudart = SimpleNamespace(
    cudaError=Error,
    cudaError_t=int,
    cudaGetErrorString=lambda code: ERRORS.get(int(code), "unrecognized error code"),
    cudaMemGetInfo=memory_info,
    cudaHostRegister=pin,
    cudaHostUnregister=unpin,
    cudaProfilerStart=lambda: 0,
    cudaProfilerStop=lambda: 0,
    cudaStreamCreate=lambda *args: 0,
    cudaStreamDestroy=lambda *args: 0,
)


def install() -> None:
    cuda = torch.cuda
    put(FUNCTIONS)
    put(ACCELERATOR)
    put(_remembered("_get_linalg_preferred_backend", "_set_linalg_preferred_backend"))
    put(_remembered("_get_blas_preferred_backend", "_set_blas_preferred_backend"))
    for name in CLASSES:
        if not hasattr(torch._C, name):
            setattr(torch._C, name, type(name, (), {}))
    cuda._exchange_device, cuda._maybe_exchange_device = devices.exchange_checked, devices.exchange
    cuda._is_in_bad_fork = FUNCTIONS["_cuda_isInBadFork"]
    torch._C._has_cuda = True
    torch.version.cuda = torch.version.cuda or f"{CUDA_VERSION // 1000}.{CUDA_VERSION % 1000 // 10}"
    cuda._queued_calls.clear()  # a check of compute capabilities that asks the driver
    cuda._cudart = cudart
    cuda._device_count_nvml = cuda._raw_device_count_nvml = devices.count
    cuda.get_device_properties = properties
    cuda.device_memory_used, cuda.list_gpu_processes = used, processes
    cuda.memory.list_gpu_processes = processes
    cuda._CudaDeviceProperties = torch._C._CudaDeviceProperties = Properties
    cuda.is_bf16_supported = _bf16
    cuda.nccl.version = versions.nccl
    cuda.amp.common.amp_definitely_not_available = lambda: False


def _remembered(read: str, write: str) -> Mapping[str, Callable[..., Any]]:
    """A choice among CUDA's libraries is accepted, and changes nothing: a CPU build refuses those it lacks."""
    chosen: list[Any] = []
    now = getattr(torch._C, read)
    return {write: chosen.append, read: lambda: chosen[-1] if chosen else now()}


def _bf16(including_emulation: bool = True) -> bool:
    return including_emulation or devices.card(devices.current()).capability[0] >= 8


def put(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Puts them into torch._C, and into the modules of torch.cuda that have copied them when they were imported."""
    for name, function in functions.items():
        if not name.startswith("_accelerator") or hasattr(torch._C, name):  # which a torch has since 2.6 to 2.9
            setattr(torch._C, name, function)
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.cuda.") and module is not None:
            for copied in functions.keys() & vars(module).keys():
                setattr(module, copied, functions[copied])
