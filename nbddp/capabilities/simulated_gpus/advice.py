"""That a program failed since it asks for CUDA on a machine without GPUs, and which option simulates them. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nbddp.capabilities.simulated_gpus.cards import MOST
from nbddp.errors import Cause, Frame, Raised
from nbddp.launch.topology import Topology


@dataclass(frozen=True)
class NoCuda:
    """An error that torch raises where it has no GPU. `said`: found in its message. `called`: and a function of this
    name is among its frames; `line`: and found in the user's failing line, where the message alone says too little."""

    type: str
    said: str
    called: str = ""
    line: str = ""


ASKS = r"\.cuda\(|set_device\("
ERRORS = (
    NoCuda("AssertionError", r"^Torch not compiled with CUDA enabled"),
    NoCuda("RuntimeError", r"^Found no NVIDIA driver on your system"),
    NoCuda("RuntimeError", r"^No CUDA GPUs are available"),
    NoCuda("RuntimeError", r"^Cannot access accelerator device when none is available"),
    NoCuda("RuntimeError", r"^Distributed package doesn't have NCCL built in"),
    NoCuda(
        "RuntimeError", r"^Attempting to deserialize object on a CUDA device but torch\.cuda\.is_available\(\) is False"
    ),
    NoCuda("RuntimeError", r"^Tried to instantiate dummy base class (Stream|Event|CUDAGraph)"),
    NoCuda("RuntimeError", r"^torch\.cuda\.(Stream|Event) requires CUDA support"),
    NoCuda("RuntimeError", r"^Cannot get CUDA generator without ATen_cuda library"),
    NoCuda("ValueError", r"^ProcessGroupNCCL is only supported with GPUs, no GPUs found"),
    NoCuda("DistBackendError", r"^ProcessGroupNCCL is only supported with GPUs, no GPUs found"),
    NoCuda("AttributeError", r"^module 'torch\._C' has no attribute '_cuda_"),
    NoCuda("NotImplementedError", r"^Could not run 'aten::\S+' with arguments from the 'CUDA' backend"),
    # torch.accelerator.current_accelerator() is None there
    NoCuda("TypeError", r"got \(NoneType\)", called="get_default_backend_for_device"),
    # torch.cuda.device_count() is 0 there, and a share of its devices is empty
    NoCuda("IndexError", r"^list index out of range", line=ASKS),
)


def without_gpus(cause: Cause, placed: Topology) -> str:
    """The line that names the option, where no GPU is the cause; else empty."""
    node = placed.nodes[cause.node]
    if node.devices or node.untold or placed.hides_gpus or not any(map(_is_no_cuda, cause.chain)):
        return ""
    number = placed.nproc_per_node * max(1, placed.gpus_per_proc)
    if number > MOST:
        return ""
    return (
        f"No CUDA GPU is visible here; with --simulate-gpus {number} the program runs on simulated GPUs, computed on "
        "the CPU."
    )


def _is_no_cuda(raised: Raised) -> bool:
    return any(_fits(error, raised) for error in ERRORS)


def _fits(error: NoCuda, raised: Raised) -> bool:
    if raised.type.rpartition(".")[2] != error.type or not re.search(error.said, raised.message.strip()):
        return False
    if error.called and error.called not in {frame.name for frame in raised.frames}:
        return False
    return not error.line or bool(re.search(error.line, _failing_line(raised.frames)))


def _failing_line(frames: Sequence[Frame]) -> str:
    """The innermost line of the user's, if no library was called from there."""
    last = frames[-1] if frames else None
    return next((text for number, text in last.context if number == last.line), "") if last and last.user else ""
