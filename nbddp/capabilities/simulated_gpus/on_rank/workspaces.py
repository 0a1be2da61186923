"""Memory that CUDA's libraries take beside an operator's results: the CPU's kernels have none of it.

cuBLAS keeps a workspace for each thread and stream from its first product on. cuDNN takes one while a convolution
runs, for its arguments in the order that tensor cores need. The sizes are those that an H100 took under torch 2.11.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from nbddp.capabilities.simulated_gpus.cards import MIB
from nbddp.capabilities.simulated_gpus.on_rank import devices, machine, memory, streams
from nbddp.capabilities.simulated_gpus.on_rank.allocator import Block

Kernel = Callable[..., Any]
Rule = Callable[..., None]  # index of the GPU, result, the operator's arguments
HOPPER = 32 * MIB  # cuBLAS's workspace from capability 9.0 on
BEFORE = 8320 << 10  # and for older cards: 4096 KiB twice and 16 KiB eight times
LT = 1 * MIB  # cublasLt's, for a product with a bias
TENSOR_CORES = (8, 0)  # the capability from which float32 convolutions use them (TF32)
_kept: dict[tuple[str, int, int, int], Block] = {}  # library, thread, GPU, stream → its workspace
_handles: set[tuple[int, int]] = set()  # thread, GPU


def product(index: int, out: Any, *args: Any) -> None:
    """cuBLAS has a workspace from now on."""
    _keep("cublas", index, HOPPER if devices.card(index).capability >= (9, 0) else BEFORE)


def product_with_bias(index: int, out: Any, bias: Any, one: Any, other: Any) -> None:
    """The same, and cublasLt's where the bias is a vector: then cublasLt adds it."""
    product(index, out)
    if bias.dim() == 1 and min(other.shape) > 1 and bias.shape[0] == other.shape[1]:
        _keep("cublasLt", index, LT)


def _keep(library: str, index: int, size: int) -> None:
    thread = threading.get_ident()
    key = library, thread, index, streams.current(index)
    if key not in _kept:
        _kept[key] = memory.of(index).take(size)
        if (thread, index) not in _handles:
            _handles.add((thread, index))
            memory.of(index).libraries += memory.CUBLAS


def clear() -> None:
    """As `torch._C._cuda_clearCublasWorkspaces`."""
    for (_, _, index, _), block in _kept.items():
        memory.of(index).allocator.give(block)
    _kept.clear()


def convolution(index: int, out: Any, x: Any, weight: Any, *more: Any) -> None:
    """cuDNN's copies of the arguments."""
    _for_a_while(index, _copies(index, out, x, weight, more[-1]))


def convolution_backward(index: int, out: Any, grad: Any, x: Any, weight: Any, *more: Any) -> None:
    """The same in backward, and a gradient that is not contiguous is copied."""
    copies = _copies(index, grad, x, weight, more[-2])
    _for_a_while(index, _uncontiguous(grad), copies)
    _for_a_while(index, _uncontiguous(grad), _sums(index, grad, x, weight, more[-2], copies))


def _copies(index: int, out: Any, x: Any, weight: Any, groups: int) -> int:
    """Bytes of the copies. None are needed of depthwise convolutions and where the order is right already."""
    low = devices.card(index).capability < TENSOR_CORES and x.element_size() > 2
    if groups != 1 or low or x.element_size() > 4 or not x.is_contiguous():
        return 0
    if math.prod(weight.shape[2:]) > 1:
        return _bytes(x) + _bytes(out) + _bytes(weight)
    strided = x.shape[2:] != out.shape[2:]
    return _bytes(x) + _bytes(out) if strided or math.prod(out.shape[2:]) % 4 else 0


def _sums(index: int, grad: Any, x: Any, weight: Any, groups: int, copies: int) -> int:
    """Bytes for the weight's gradient: the copies, and partial sums of it in float32 that are added at the end."""
    if groups != 1 or devices.card(index).capability < TENSOR_CORES or not x.is_contiguous():
        return copies
    one, wide = 4 * int(weight.numel()), bool(x.element_size() > 2)
    if math.prod(weight.shape[2:]) > 1 or copies:
        most, room = (15, 9 * MIB) if wide else (13, 9 * MIB // 4)
        return copies + one * min(most, room // one)
    if one <= MIB:
        return 32 * one
    return _bytes(x) + _bytes(grad) + (4 * one if wide else 0)


def copied_gradient(index: int, out: Any, grad: Any, *more: Any) -> None:
    """The kernel wants a contiguous gradient."""
    _for_a_while(index, _uncontiguous(grad))


def _uncontiguous(tensor: Any) -> int:
    return 0 if tensor.is_contiguous() else _bytes(tensor)


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _for_a_while(index: int, *sizes: int) -> None:
    of = memory.of(index)
    blocks = [of.take(size) for size in sizes if size]
    for block in blocks:
        of.allocator.give(block)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("mm", "bmm", "addmv", "addbmm", "baddbmm", "dot", "addr", "linalg_inv_ex"), product),
    **dict.fromkeys(("mm.out", "bmm.out", "addmv.out", "addmm.out", "baddbmm.out"), product),
    "addmm": product_with_bias,
    "convolution": convolution,
    "convolution_overrideable": convolution,
    "convolution_backward": convolution_backward,
    **dict.fromkeys(
        (
            "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm_backward",
            "native_group_norm_backward", "max_pool2d_with_indices_backward", "avg_pool2d_backward",
            "embedding_dense_backward", "upsample_nearest2d_backward",
        ),
        copied_gradient,
    ),
}  # fmt: skip


def beside(name: str, kernel: Kernel) -> Kernel:
    """The kernel, and then what its libraries take. The operators without a rule keep theirs."""
    rule = RULES.get(name)
    if rule is None:
        return kernel

    def counted(*args: Any, **kwargs: Any) -> Any:
        out = kernel(*args, **kwargs)
        tensor = out if not isinstance(out, tuple) else next((one for one in out if one is not None), None)
        if tensor is not None and tensor.is_cuda:
            rule(machine.index_of(tensor), tensor, *args)
        return out

    return counted
