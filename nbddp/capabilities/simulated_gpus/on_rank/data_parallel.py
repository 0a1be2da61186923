"""What DataParallel asks of `torch._C`: tensors cut, copied to several GPUs, collected, and summed over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nbddp.capabilities.simulated_gpus.on_rank import torch_cuda, versions


def _shape(sizes: Any) -> str:
    return str(list(sizes))


def _check(true: bool, words: str) -> None:
    if not true:
        raise RuntimeError(words)


def _gpu(index: int) -> str:
    _check(index >= 0, f"Expected non-negative device index, but got {index}")
    return f"cuda:{index}"


def _outputs_on_gpus(out: Sequence[Any]) -> None:
    for at, one in enumerate(out):
        _check(
            one.is_cuda,
            f"Expected all output tensors to be CUDA tensors, but output tensor at index {at} has device "
            f"'{one.device}'",
        )


def broadcast(tensor: Any, to: Sequence[int]) -> list[Any]:
    return [tensor if tensor.get_device() == index else tensor.to(_gpu(index)) for index in to]


def broadcast_out(tensor: Any, out: Sequence[Any]) -> list[Any]:
    _outputs_on_gpus(out)
    for at, one in enumerate(out):
        _check(
            one.shape == tensor.shape,
            f"Expected all output tensors to have same shape as the source tensor {_shape(tensor.shape)}, but output "
            f"tensor at index {at} has shape {_shape(one.shape)}",
        )
    return [one.copy_(tensor) for one in out]


def broadcast_coalesced(tensors: Sequence[Any], to: Sequence[int], buffer_size: int) -> list[list[Any]]:
    everywhere = all(tensor.get_device() == to[0] for tensor in tensors)
    _check(everywhere, f"All tensors must be on devices[0]: {to[0]}")
    return [[tensor.to(_gpu(index)) for tensor in tensors] for index in to]


def scatter(tensor: Any, to: Sequence[int], sizes: Sequence[int] | None, dim: int, streams: Any = None) -> list[Any]:
    _check(bool(to), "Expected at least one device to scatter to")
    if sizes is not None:
        _check(
            len(sizes) == len(to),
            f"Expected devices and chunk_sizes to be of same length, but got len(devices) = {len(to)} and "
            f"len(chunk_sizes) = {len(sizes)}",
        )
    parts = tensor.split(list(sizes), dim) if sizes is not None else tensor.chunk(len(to), dim)
    return [part.to(_gpu(index)) for part, index in zip(parts, to, strict=False)]


def scatter_out(tensor: Any, out: Sequence[Any], dim: int, streams: Any = None) -> list[Any]:
    _check(bool(out), "Expected at least one output tensor to scatter to")
    _outputs_on_gpus(out)
    dim %= tensor.dim()
    for at, one in enumerate(out):
        expected = [size if n != dim or one.dim() <= dim else one.size(dim) for n, size in enumerate(tensor.shape)]
        _check(
            list(one.shape) == expected,
            f"Output tensor at index {at} has incorrect shape: {_shape(one.shape)}. Expected same shape except for "
            f"scatter dim {dim} as the source tensor: {_shape(tensor.shape)}",
        )
    total = sum(one.size(dim) for one in out)
    _check(
        total == tensor.size(dim),
        f"Total size for output tensors along scatter dim {dim} does not match the source tensor size at dim {dim}. "
        f"Expected {tensor.size(dim)}, but got total size {total}",
    )
    parts = tensor.split([one.size(dim) for one in out], dim)
    return [one.copy_(part) for one, part in zip(out, parts, strict=True)]


def _gathered_shape(tensors: Sequence[Any], dim: int, quote: str, space: str) -> list[int]:
    """quote and space: torch's two checks differ in them."""
    _check(bool(tensors), "Expected at least one tensor to gather from")
    expected = list(tensors[0].shape)
    for at, one in enumerate(tensors):
        _check(
            one.is_cuda,
            f"Expected all input tensors to be CUDA tensors, but tensor at index {at} has device "
            f"{quote}{one.device}{quote}",
        )
        _check(
            one.dim() == len(expected),
            "Expected all input tensors to have the same number of dimensions, but tensor at index "
            f"{at}{space}has {one.dim()} dimensions, (expected {len(expected)})",
        )
        expected[dim] = one.size(dim)
        _check(
            list(one.shape) == expected,
            f"Input tensor at index {at} has invalid shape {_shape(one.shape)}, but expected {_shape(expected)}",
        )
    expected[dim] = sum(one.size(dim) for one in tensors)
    return expected


def gather(tensors: Sequence[Any], dim: int, to: int | None) -> Any:
    _gathered_shape(tensors, dim, "", "")
    where = "cpu" if to == -1 else f"cuda:{torch.cuda.current_device() if to is None else to}"
    return torch.cat([tensor.to(where) for tensor in tensors], dim)


def gather_out(tensors: Sequence[Any], out: Any, dim: int) -> Any:
    expected = _gathered_shape(tensors, dim, "'", " ")
    _check(
        list(out.shape) == expected,
        f"Expected out tensor to have shape {_shape(expected)}, but got {_shape(out.shape)}",
    )
    return out.copy_(torch.cat([tensor.to(out.device) for tensor in tensors], dim))


def reduce(inputs: Sequence[Any], output: Any, root: int = 0, op: int = 0, *more: Any) -> None:
    """NCCL in one process: the sum over GPUs."""
    if op:
        raise NotImplementedError("nccl in one process is simulated for sums only")
    target = output if isinstance(output, torch.Tensor) else output[root]
    target.copy_(sum(one.to(target.device) for one in inputs))


def all_reduce(inputs: Sequence[Any], outputs: Sequence[Any], op: int = 0, *more: Any) -> None:
    for target, total in zip(outputs, [inputs[0].clone() for _ in outputs], strict=True):
        reduce(inputs, total, 0, op)
        target.copy_(total)


def nccl_broadcast(inputs: Sequence[Any], root: int = 0, *more: Any) -> None:
    for one in inputs:
        one.copy_(inputs[root])


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "_broadcast": broadcast, "_broadcast_out": broadcast_out, "_broadcast_coalesced": broadcast_coalesced,
    "_scatter": scatter, "_scatter_out": scatter_out, "_gather": gather, "_gather_out": gather_out,
    "_nccl_reduce": reduce, "_nccl_all_reduce": all_reduce, "_nccl_broadcast": nccl_broadcast,
    "_nccl_version": lambda: (lambda v: v[0] << 32 | v[1] << 16 | v[2])(versions.nccl()),
    "_nccl_version_suffix": lambda: b"",
}  # fmt: skip


def install() -> None:
    torch_cuda.put(FUNCTIONS)
