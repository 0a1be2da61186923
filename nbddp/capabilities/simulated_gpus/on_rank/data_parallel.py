"""What DataParallel asks of `torch._C`: tensors cut, copied to several GPUs, collected, and summed over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nbddp.capabilities.simulated_gpus.on_rank import torch_cuda, versions


def broadcast(tensor: Any, to: Sequence[int]) -> list[Any]:
    return [tensor if tensor.get_device() == index else tensor.to(f"cuda:{index}") for index in to]


def broadcast_out(tensor: Any, out: Sequence[Any]) -> list[Any]:
    return [one.copy_(tensor) for one in out]


def broadcast_coalesced(tensors: Sequence[Any], to: Sequence[int], buffer_size: int) -> list[list[Any]]:
    return [[tensor.to(f"cuda:{index}") for tensor in tensors] for index in to]


def scatter(tensor: Any, to: Sequence[int], sizes: Sequence[int] | None, dim: int, streams: Any = None) -> list[Any]:
    parts = tensor.split(list(sizes), dim) if sizes is not None else tensor.chunk(len(to), dim)
    return [part.to(f"cuda:{index}") for part, index in zip(parts, to, strict=False)]


def scatter_out(tensor: Any, out: Sequence[Any], dim: int, streams: Any = None) -> list[Any]:
    parts = tensor.split([one.size(dim) for one in out], dim)
    return [one.copy_(part) for one, part in zip(out, parts, strict=True)]


def gather(tensors: Sequence[Any], dim: int, to: int | None) -> Any:
    for at, tensor in enumerate(tensors):
        if not tensor.is_cuda:
            raise RuntimeError(
                f"Expected all input tensors to be CUDA tensors, but tensor at index {at} has device {tensor.device}"
            )
    where = "cpu" if to == -1 else f"cuda:{torch.cuda.current_device() if to is None else to}"
    return torch.cat([tensor.to(where) for tensor in tensors], dim)


def gather_out(tensors: Sequence[Any], out: Any, dim: int) -> Any:
    return out.copy_(gather(tensors, dim, out.get_device()))


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
