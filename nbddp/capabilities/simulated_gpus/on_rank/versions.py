"""Differences between versions of torch: the text of errors from CUDA, from its allocator and from NCCL.

Each text was compared with what its version has. Of 2.6, 2.11, 2.13 and 2.14 that is libc10_cuda, libtorch_cuda and
libnccl of the wheels; of the others it is their sources.
"""

from __future__ import annotations

import re

import torch

from nbddp.capabilities.simulated_gpus.cards import MIB

GIB, KIB = 1 << 30, 1 << 10
ORDINAL = "invalid device ordinal", "cudaErrorInvalidDevice"
ASSERTED = "device-side assert triggered", "cudaErrorAssert"
CAPTURING = "operation not permitted when stream is capturing", "cudaErrorStreamCaptureUnsupported"
NO_HANDLE = "invalid resource handle", "cudaErrorInvalidResourceHandle"
INVALID_USAGE = "NCCL Error 5: invalid usage (run with NCCL_DEBUG=WARN for details)"
NUMBER = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
ASYNCHRONOUS = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)
SEARCH = (
    "Search for `{}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information."
)
ENOUGH = "GPU device may be out of range, do you have enough GPUs?"
OLD_PAGE = "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables"
NEW_PAGE = "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
NCCL = {  # from this torch on, the NCCL of its wheels
    (2, 6): (2, 21, 5), (2, 7): (2, 26, 2), (2, 8): (2, 27, 3), (2, 9): (2, 27, 5), (2, 11): (2, 28, 9),
    (2, 12): (2, 29, 3), (2, 14): (2, 30, 7),
}  # fmt: skip
NCCL_UTILS = {  # from this torch on, the place in its sources that reports NCCL's errors
    (2, 6): "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:268",
    (2, 8): "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77",
    (2, 10): "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94",
    (2, 11): "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93",
    (2, 14): "/__w/pytorch/pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94",
}


def at_least(*number: int) -> bool:
    return number <= NUMBER


def nccl() -> tuple[int, int, int]:
    """The version of NCCL that the wheels of this torch have."""
    return NCCL[max((v for v in NCCL if v <= NUMBER), default=(2, 6))]


def driver_error(error: tuple[str, str]) -> RuntimeError:
    """The exception for an error of the CUDA driver: its text and its name."""
    text, name = error
    help_ = f"{ENOUGH}\n" if name == "cudaErrorInvalidDevice" else f"{SEARCH.format(name)}\n"
    if not at_least(2, 9 if name != "cudaErrorInvalidDevice" else 8):
        help_ = ""
    kind: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)
    return kind(f"CUDA error: {text}\n{help_}{ASYNCHRONOUS}")


def size(n: int) -> str:
    """As the allocator writes sizes."""
    if n < KIB:
        return f"{n} bytes"
    unit, name = (KIB, "KiB") if n < MIB else (MIB, "MiB") if n < GIB else (GIB, "GiB")
    return f"{n / unit:.2f} {name}"


def alloc_conf() -> str:
    """The end of an out-of-memory error."""
    variable = "PYTORCH_ALLOC_CONF" if (2, 9) <= NUMBER < (2, 11) else "PYTORCH_CUDA_ALLOC_CONF"
    page = NEW_PAGE if at_least(2, 11) else OLD_PAGE
    return (
        f" If reserved but unallocated memory is large try setting {variable}=expandable_segments:True to avoid "
        f"fragmentation.  See documentation for Memory Management  ({page})"
    )


def other_device(argument: str, device: object, common: object, method: str) -> RuntimeError:
    """A tensor on another device than those before it, found by the check before a CUDA kernel."""
    if at_least(2, 9):
        return RuntimeError(
            f"Expected all tensors to be on the same device, but got {argument} is on {device}, different from other "
            f"tensors on {common} (when checking argument in method {method})"
        )
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {common} and {device}! "
        f"(when checking argument for argument {argument} in method {method})"
    )


def two_devices(common: object, device: object) -> RuntimeError:
    """The same, found by TensorIterator."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {common} and {device}!"
    )


def one_gpu_twice(rank: int, other: int, bus: int) -> str:
    """NCCL's error when two ranks bring the same GPU. bus: the GPU's PCI bus, as NCCL numbers it."""
    where = NCCL_UTILS[max((v for v in NCCL_UTILS if v <= NUMBER), default=(2, 6))]
    number = nccl()
    last = f"Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device {bus:x}"
    if number >= (2, 30, 0):
        last = (
            "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this "
            "configuration."
        )
    return (
        f"NCCL error in: {where}, invalid usage (run with NCCL_DEBUG=WARN for details), "
        f"NCCL version {'.'.join(map(str, number))}\n"
        f"ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n{last}"
    )


def aborted(rank: int) -> str:
    """torch's error for a collective on a group that has been destroyed or aborted."""
    return f"NCCL communicator was aborted on rank {rank}. "


def no_such_root(word: str, root: int, size: int) -> str:
    """NCCL's error for a root that is not a rank. word: Broadcast or Reduce."""
    return invalid_argument(f"{word} : invalid root {root} (root should be in the 0..{size} range)")


def invalid_argument(last: str) -> str:
    """NCCL's error for an argument. last: what it says of it."""
    return (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3780, invalid argument (run with "
        f"NCCL_DEBUG=WARN for details), NCCL version {'.'.join(map(str, nccl()))}\n"
        f"ncclInvalidArgument: Invalid value for an argument.\nLast error:\n{last}"
    )
