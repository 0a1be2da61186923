"""Types of elements that CUDA's kernels refuse, in their words. The CPU's take some of them, and have other words.

Each row was seen on an H100 with torch 2.11: tests/data/h100-torch-2.11.json.gz.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

Kernel = Callable[..., Any]
Check = Callable[..., None]  # the operator's arguments; raises as CUDA's kernel does
INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool))
EIGHT = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
HALF = frozenset((torch.float16, torch.bfloat16))
FLOATS = HALF | {torch.float32, torch.float64}
COMPLEX = frozenset((torch.complex64, torch.complex128))
WORDS = {  # as torch writes its types
    torch.float32: "Float", torch.float64: "Double", torch.float16: "Half", torch.bfloat16: "BFloat16",
    torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte",
    torch.bool: "Bool", torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
    torch.float8_e4m3fn: "Float8_e4m3fn", torch.float8_e5m2: "Float8_e5m2",
}  # fmt: skip
IN_CPP = {
    torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16",
    torch.int64: "long", torch.int32: "int",
}  # fmt: skip


class Row(NamedTuple):
    """name: of the kernel, in the error. types: those it lacks. at: which argument has the type."""

    name: str
    types: frozenset[Any]
    at: int = 0


LACKING: Mapping[str, Row] = {
    "mm": Row("addmm_cuda", INTEGERS | EIGHT),
    "bmm": Row("baddbmm_cuda", INTEGERS),
    "dot": Row("dot", INTEGERS),
    "_softmax": Row("host_softmax", INTEGERS),
    "_log_softmax": Row("host_softmax", INTEGERS),
    "native_batch_norm": Row("batch_norm_stats_cuda", INTEGERS),
    "add.Tensor": Row("ufunc_add_CUDA", EIGHT),
    "upsample_nearest2d": Row("upsample_nearest2d_out_frame", INTEGERS - {torch.uint8}),
    "max_pool2d_with_indices": Row("max_pool2d_with_indices_out_cuda_frame", INTEGERS),
    "gelu": Row("GeluCUDAKernelImpl", INTEGERS),
    "normal_": Row("normal_kernel_cuda", INTEGERS),
    "dropout": Row("fused_dropout", INTEGERS),
    "_cdist_forward": Row("cdist_cuda", HALF),
    "bitwise_and.Tensor": Row("bitwise_and_cuda", FLOATS),
    "__lshift__.Scalar": Row("lshift_cuda", FLOATS),
    "linalg_cholesky_ex": Row("cholesky_cusolver", HALF),
    **{
        f"{name}.{kind}": Row("compare_cuda", COMPLEX)
        for name in ("lt", "le", "gt", "ge")
        for kind in ("Scalar", "Tensor")
    },
}


@functools.cache
def _kind() -> type[Exception]:
    """Which exception this torch raises for a type that a kernel lacks."""
    try:
        torch.ones(2, 2, dtype=torch.bool) @ torch.ones(2, 2, dtype=torch.bool)
    except (RuntimeError, NotImplementedError) as error:
        return type(error)
    return NotImplementedError


def lacks(name: str, dtype: Any) -> Exception:
    """The error of a kernel that is not there for a type."""
    return _kind()(f"\"{name}\" not implemented for '{WORDS.get(dtype, dtype)}'")


def products(one: Any, other: Any, *more: Any) -> None:
    if one.dtype != other.dtype:
        names = IN_CPP.get(one.dtype, one.dtype), IN_CPP.get(other.dtype, other.dtype)
        raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got: {names[0]} != {names[1]}")


def products_and_sum(bias: Any, one: Any, other: Any, *more: Any) -> None:
    if one.dtype == other.dtype and one.dtype in INTEGERS | EIGHT:
        raise lacks("addmm_cuda", one.dtype)


def labels(x: Any, target: Any, weight: Any = None, reduction: int = 1, *more: Any) -> None:
    if x.dim() == 2 and reduction and target.dtype not in (torch.int64, torch.uint8):
        raise lacks("nll_loss_forward_reduce_cuda_kernel_2d_index", target.dtype)


def layer_norm(x: Any, shape: Any, weight: Any = None, *more: Any) -> None:
    _same(x, weight)


def group_norm(x: Any, weight: Any = None, *more: Any) -> None:
    _same(x, weight)


def _same(x: Any, weight: Any) -> None:
    if weight is not None and weight.dtype != x.dtype:
        raise RuntimeError(f"expected scalar type {WORDS.get(x.dtype)} but found {WORDS.get(weight.dtype)}")


def small_integers(one: Any, other: Any) -> None:
    if one.shape[0] <= 16:
        raise RuntimeError(f"self.size(0) needs to be greater than 16, but got {one.shape[0]}")


def scaled(one: Any, other: Any, *more: Any, **options: Any) -> None:
    if not one.is_contiguous() or other.is_contiguous():
        raise RuntimeError("Only multiplication of row-major and column-major matrices is supported by cuBLASLt")
    if one.shape[1] % 16:
        rows, columns = one.shape
        raise RuntimeError(
            f"Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: ({rows}x{columns})."
        )


def fourier(x: Any, dims: Any, *more: Any) -> None:
    if x.dtype != torch.float16:
        return
    sizes = [x.shape[dim] for dim in dims]
    if any(n & (n - 1) for n in sizes):
        raise RuntimeError(
            "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, but got a "
            f"signal size of{sizes}"
        )


def convolution(x: Any, *more: Any) -> None:
    if x.dtype in INTEGERS:
        raise RuntimeError(f"getCudnnDataTypeFromScalarType() not supported for {WORDS[x.dtype]}")


def least_squares(one: Any, other: Any, rcond: Any = None, *, driver: str | None = None) -> None:
    if driver not in (None, "gels"):
        raise RuntimeError("torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA")


CHECKS: Mapping[str, Check] = {
    "linalg_lstsq": least_squares,
    "mm": products,
    "addmm": products_and_sum,
    "nll_loss_forward": labels,
    "native_layer_norm": layer_norm,
    "native_group_norm": group_norm,
    "_int_mm": small_integers,
    "_scaled_mm": scaled,
    "_fft_r2c": fourier,
    "_fft_c2c": fourier,
    "convolution": convolution,
    "convolution_overrideable": convolution,
}


def checked(name: str, kernel: Kernel) -> Kernel:
    """The kernel after the checks of its operator. The operators without a row keep theirs."""
    row, check = LACKING.get(name), CHECKS.get(name)
    if row is None and check is None:
        return kernel

    def called(*args: Any, **kwargs: Any) -> Any:
        tensor = args[row.at] if row is not None and len(args) > row.at else None
        if row is not None and isinstance(tensor, torch.Tensor) and tensor.dtype in row.types:
            raise lacks(row.name, tensor.dtype)
        if check is not None and args[0].is_cuda and (not isinstance(args[1], torch.Tensor) or args[1].is_cuda):
            check(*args, **kwargs)
        return kernel(*args, **kwargs)

    return called
