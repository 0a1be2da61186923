"""Assertions inside kernels: a GPU finds a wrong index or label while the kernel runs, and the process loses the GPU.

The line that the kernel prints and the error are an H100's with torch 2.11. What the CPU's kernel says is the cause.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from nbddp.capabilities.simulated_gpus.on_rank import devices, versions

Kernel = Callable[..., Any]
OUTSIDE = re.compile(
    "out of bounds|out of range|not in the valid range|should be between 0 and 1|probability tensor contains"
    "|sum of probabilities"
)
AT = "/pytorch/aten/src/ATen/native/cuda/"
INDEX = "IndexKernel.cu:111: operator()", '-sizes[i] <= index && index < sizes[i] && "index out of bounds"'
SELECT = "Indexing.cu:1515: indexSelectSmallIndex", "srcIndex < srcSelectDimSize"
SCATTER = "ScatterGatherKernel.cu:409: operator()", 'idx_dim >= 0 && idx_dim < index_size && "index out of bounds"'
ASYNC = "TensorCompare.cu:109: _assert_async_cuda_kernel"
LINES: Mapping[str, tuple[str, str]] = {  # operator, without its overload → where the assertion stands, and its text
    **dict.fromkeys(("index", "_unsafe_index", "index_put_", "_index_put_impl_", "index_put"), INDEX),
    **dict.fromkeys(("index_select", "embedding"), SELECT),
    **dict.fromkeys(
        ("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"), SCATTER
    ),
    "gather": (
        "ScatterGatherKernel.cu:163: operator()",
        'idx_dim >= 0 && idx_dim < index_size && "scatter gather kernel index out of bounds"',
    ),
    **dict.fromkeys(("index_add", "index_add_"), ("Indexing.cu:1021: indexFuncSmallIndex", "dstIndex < dstAddDimSize")),
    **dict.fromkeys(
        ("index_fill", "index_fill_"),
        ("IndexKernel.cu:154: operator()", 'idx >= -self_dim_size && idx < self_dim_size && "index out of bounds"'),
    ),
    "take": (
        "IndexKernel.cu:339: operator()",
        'idx < numel && idx >= -numel && "cuda_take_put_kernel() index out of bounds"',
    ),
    "nll_loss_forward": ("Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d", "t >= 0 && t < n_classes"),
    "nll_loss2d_forward": ("NLLLoss2d.cu:106: nll_loss2d_forward_kernel", "t >= 0 && t < n_classes"),
    "binary_cross_entropy": ("Loss.cu:90: operator()", "input_val >= zero && input_val <= one"),
    **dict.fromkeys(
        ("_embedding_bag", "_embedding_bag_forward_only"),
        (
            "EmbeddingBag.cu:149: EmbeddingBag_updateOutputKernel_sum_mean",
            '!has_invalid_index && "Invalid input index in EmbeddingBag: index out of range [0, numRows)"',
        ),
    ),
    "multinomial": (ASYNC, "probability tensor contains either `inf`, `nan` or element < 0"),
}


def asserting(name: str, kernel: Kernel) -> Kernel:
    """The kernel, whose wrong index takes the GPU from the process. The operators without a row keep theirs."""
    line = LINES.get(name.partition(".")[0])
    if line is None:
        return kernel

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            if not OUTSIDE.search(str(error)):
                raise
            cause = error
        print(f"{AT}{line[0]}: block: [0,0,0], thread: [0,0,0] Assertion `{line[1]}` failed.", file=sys.stderr)
        devices.broken = True
        raise versions.driver_error(versions.ASSERTED) from cause

    return called
