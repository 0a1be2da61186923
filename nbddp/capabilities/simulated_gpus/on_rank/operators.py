"""Which kernel each operator gets at the CUDA keys. The exceptions have a table, with a reason each."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nbddp.capabilities.simulated_gpus.on_rank import (
    alerts,
    devices,
    dtypes,
    kernels,
    machine,
    mixed_devices,
    versions,
    workspaces,
)
from nbddp.capabilities.simulated_gpus.on_rank.kernels import Kernel, functional, general

aten = torch.ops.aten
DENSE, AUTOGRAD = "CUDA", "AutogradCUDA"
NOT_DENSE = {  # key → the CPU's
    "SparseCUDA": "SparseCPU", "SparseCsrCUDA": "SparseCsrCPU", "NestedTensorCUDA": "NestedTensorCPU",
    "QuantizedCUDA": "QuantizedCPU",
}  # fmt: skip


def copy(tensor: Any, source: Any, non_blocking: bool = False) -> Any:
    """Between any two devices: both sides are host memory."""
    if not tensor.is_cuda and not source.is_cuda:
        return aten.copy_.default.redispatch(kernels.CPU_KEY, tensor, source, non_blocking)
    if kernels.recording:
        return kernels.recording[-1](_copy_now, aten.copy_.default, (tensor, source), {})
    return _copy_now(aten.copy_.default, tensor, source)


def _copy_now(op: Any, tensor: Any, source: Any) -> Any:
    devices.check()
    to = machine.twin(tensor) if tensor.is_cuda else tensor.data
    op._op(to, machine.twin(source) if source.is_cuda else source.data)
    return tensor


def empty_quantized(size: Any, like: Any, *, device: Any = None, **options: Any) -> Any:
    """On the device of another tensor, or on one that is given: so a quantized tensor moves."""
    made = aten.empty_quantized.default(size, machine.twin(like), **options)
    to = like.device if device is None else device
    return made if to.type == "cpu" else kernels.labelled(made, devices.index_for(to))


def convolution(op: Any) -> Kernel:
    """With the check of types, which the CPU's kernel words otherwise."""
    kernel = functional(op)

    def checked(*args: Any, **kwargs: Any) -> Any:
        x, weight, bias, *sizes = args[:9]
        mixed_devices.convolution(x, weight, bias, sizes)
        return kernel(*args, **kwargs)

    return checked


def softmax(op: Any) -> Kernel:
    """CUDA's kernel may read half precision and write float32; the CPU's refuses that."""
    kernel = functional(op)

    def widened(x: Any, dim: int, half_to_float: bool) -> Any:
        return kernel(x.float() if half_to_float else x, dim, False)

    return widened


def softmax_backward(op: Any) -> Kernel:
    """Its other direction: gradients in float32, the result in half precision."""
    kernel = functional(op)

    def narrowed(grad: Any, output: Any, dim: int, input_dtype: Any) -> Any:
        return kernel(grad, output, dim, grad.dtype).to(input_dtype)

    return narrowed


def sizes(args: Sequence[Any]) -> int:
    return math.prod(int(n) for n in args[0])


def sizes_and_strides(args: Sequence[Any]) -> int:
    pairs = [(int(n), int(stride)) for n, stride in zip(args[0], args[1], strict=True)]
    return 1 + sum((n - 1) * stride for n, stride in pairs) if all(n for n, _ in pairs) else 0


OWN = {"QuantizedCUDA empty_quantized"}  # registered by `install` itself


class Exception_(NamedTuple):
    """make: operator → its kernel."""

    make: Callable[[Any], Kernel]
    why: str


def _always(value: Any) -> Callable[[Any], Kernel]:
    return lambda op: lambda *args, **kwargs: value


def _instead(name: str, kernel: Callable[[Any], Kernel] = general) -> Callable[[Any], Kernel]:
    return lambda op: kernel(getattr(aten, name).default)


EXCEPTIONS: Mapping[str, Exception_] = {
    "empty.memory_format": Exception_(lambda op: kernels.new_empty(op, sizes), "what would not fit is refused first"),
    "empty_strided": Exception_(lambda op: kernels.new_empty(op, sizes_and_strides), "as empty"),
    "copy_": Exception_(lambda op: copy, "two devices"),
    "resize_": Exception_(kernels.metadata_write, "it changes the tensor itself"),
    **{
        f"set_{overload}": Exception_(kernels.metadata_write, "it changes the tensor itself")
        for overload in ("", ".source_Storage", ".source_Storage_storage_offset", ".source_Tensor")
    },
    "alias": Exception_(_instead("alias", kernel=kernels.view), "a view"),
    "detach": Exception_(_instead("alias", kernel=kernels.view), "its own kernel asks for the dispatcher again"),
    "_lazy_clone": Exception_(_instead("clone"), "it builds a tensor from the storage, which says cpu"),
    "_unsafe_view": Exception_(kernels.view, "it builds a tensor from the storage, which says cpu"),
    "view.dtype": Exception_(kernels.view, "it builds a tensor from the storage, which says cpu"),
    "record_stream": Exception_(_always(None), "work is done at once"),
    "convolution": Exception_(convolution, "errors about types have CUDA's text"),
    "_convolution": Exception_(convolution, "errors about types have CUDA's text"),
    "convolution_overrideable": Exception_(convolution, "errors about types have CUDA's text"),
    "convolution_backward": Exception_(functional, "else it would take CUDA's way"),
    "_softmax": Exception_(softmax, "half precision in, float32 out: under autocast"),
    "_log_softmax": Exception_(softmax, "half precision in, float32 out: under autocast"),
    "_softmax_backward_data": Exception_(softmax_backward, "float32 in, half precision out: under autocast"),
    "_log_softmax_backward_data": Exception_(softmax_backward, "float32 in, half precision out: under autocast"),
    "_fused_sdp_choice": Exception_(
        _always(0), "there is none of CUDA's kernels, so attention is written out (DTensor asks)"
    ),
    **{
        f"_use_{library}_ctc_loss{overload}": Exception_(_always(False), "there is no such library")
        for library in ("cudnn", "miopen")
        for overload in ("", ".Tensor")
    },
}


def install() -> None:
    """Registers all kernels. It takes 0.25 s."""
    rest, library = kernels.library("_"), kernels.library("aten")
    for key in (DENSE, *NOT_DENSE):
        rest.fallback(kernels.run, key)
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        op = _operator(name) if name != full else None
        if op is not None:
            _register(library, name, op)
    library.impl("copy_", copy, "QuantizedCUDA")  # of which the CPU has no kernel for that key
    library.impl("empty_quantized", empty_quantized, "QuantizedCUDA")
    library.impl("_fused_sdp_choice", lambda *args, **kwargs: 0, "Meta")  # else it asks CUDA for a fake CUDA tensor


def _operator(name: str) -> Any:
    """None for names that Python does not have."""
    packet, _, overload = name.partition(".")
    try:
        return getattr(getattr(aten, packet), overload or "default")
    except (AttributeError, RuntimeError):
        return None


def _register(library: Any, name: str, op: Any) -> None:
    schema = op._schema
    if any("Generator" in str(argument.type) for argument in schema.arguments):
        kernels.random_operators.add(schema.name)
    for key, of_cpu in NOT_DENSE.items():
        if _has(name, of_cpu) and f"{key} {name}" not in kernels.own | OWN:
            library.impl(name, kernels.not_dense(op), key)
    if name in kernels.own:
        return
    if name in EXCEPTIONS:
        library.impl(name, _around(name, EXCEPTIONS[name].make(op)), DENSE)
    elif name.startswith("_foreach_"):
        library.impl(name, kernels.foreach(op), DENSE)
    elif _has(name, "CompositeImplicitAutograd") and not _has(name, "CPU"):
        for key in (AUTOGRAD, DENSE) if _has(name, DENSE) else ():
            library.impl(name, op.decompose, key)  # a CUDA build has a kernel (rms_norm); the composite one is taken
    elif _has(name, "CPU") or _has(name, DENSE):
        # what only a CUDA build has is refused when it is called
        library.impl(name, _around(name, _kernel(name, op)), DENSE)


def _around(name: str, kernel: Kernel) -> Kernel:
    """The kernel with the checks and assertions of CUDA's, and what CUDA's libraries take of memory."""
    counted = workspaces.beside(name, kernel)
    return alerts.alerting(name, asserting(name, dtypes.checked(name, counted)))


def _has(name: str, key: str) -> bool:
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
    return found


def _kernel(name: str, op: Any) -> Kernel:
    if _has(name, "CPU") and kernels.is_view(op):
        return kernels.view(op)
    kinds = [str(argument.type) for argument in op._schema.arguments]
    lists = any("Tensor[]" in kind or "List[Tensor" in kind or "Tensor?[]" in kind for kind in kinds)
    return general(op) if lists or kernels.writes(op) else functional(op)


# -- asserts on the device --------------------------------------------------------------------------

# Assertions inside kernels: a GPU finds a wrong index or label while the kernel runs, and the process loses the GPU.
# The line that the kernel prints and the error are an H100's with torch 2.11. What the CPU's kernel says is the cause.

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
