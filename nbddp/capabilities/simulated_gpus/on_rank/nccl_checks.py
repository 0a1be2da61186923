"""What an nccl group refuses of a collective's arguments, in its words: gloo takes some of them, and has other words.

Each was seen on an H100 with torch 2.11 and NCCL 2.28.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nbddp.capabilities.simulated_gpus.on_rank import devices, machine, versions
from nbddp.capabilities.simulated_gpus.on_rank.arguments import flat
from nbddp.capabilities.simulated_gpus.on_rank.dtypes import EIGHT, WORDS

Arguments = Mapping[str, Any]
UNKNOWN = frozenset((torch.int16, torch.uint16, torch.uint32, torch.uint64))  # types that NCCL has none of
REDUCTIONS = frozenset((
    "allreduce_", "allreduce_coalesced_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
))  # fmt: skip
SENT = ("tensors", "input_tensors", "input_tensor", "input", "inputs")
HOPPER = (9, 0)
BITWISE = ("BAND", "BOR", "BXOR")


def check(op: Any, args: Sequence[Any], group: Any) -> None:
    """Raises what an nccl group does for a c10d operator's arguments. group: its shadow."""
    name = op._schema.name.removeprefix("c10d::")
    named = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)}
    for tensor in flat(args):
        if tensor.layout is not torch.strided:
            raise RuntimeError(
                "NCCL does not support all_reduce with sparse tensors. Please use dense tensors instead."
            )
        if tensor.dtype in UNKNOWN:
            kind = WORDS.get(tensor.dtype, tensor.dtype)
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {kind}")
        if tensor.dtype in EIGHT and name in REDUCTIONS:
            _refuse_float8(devices.card(tensor.get_device()).capability)
        if not _dense(tensor):
            raise ValueError("Tensors must be contiguous")
    if name in OF:
        OF[name](named, group.size)
    if group.nan_check:
        _check_for_nan(name, named, group.rank)


def _check_for_nan(name: str, named: Arguments, rank: int) -> None:
    """With TORCH_NCCL_NAN_CHECK, a kernel asserts that what this rank sends has no NaN."""
    if name.startswith("recv") or (name == "broadcast_" and named["root_rank"] != rank):
        return
    for tensor in flat([named.get(argument) for argument in SENT]):
        values = machine.twin(tensor)
        if (values.float() if tensor.dtype in EIGHT else values).isnan().any():
            devices.broken = True
            cause = FloatingPointError(f"TORCH_NCCL_NAN_CHECK found NaN in what rank {rank} sends in c10d::{name}")
            raise versions.driver_error(versions.ASSERTED) from cause


def _refuse_float8(capability: tuple[int, int]) -> None:
    """torch refused them before NCCL had a type for them; a reduction needs a Hopper."""
    if not versions.at_least(2, 8):
        raise RuntimeError("Float8 dtypes are not currenlty supported for NCCL reductions")
    if capability < HOPPER:
        raise dist.DistBackendError(
            versions.invalid_argument("FP8 reduction support begins with sm90 capable devices.")
        )
    raise NotImplementedError(
        "simulated GPUs reduce no float8 tensors: gloo, which computes for NCCL, has no such type"
    )


def _dense(tensor: Any) -> bool:
    return bool(
        tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
    )


def _gathered(named: Arguments, size: int) -> None:
    out, one = named["output_tensor"], named["input_tensor"]
    if out.dtype != one.dtype:
        raise TypeError("output tensor must have the same type as input tensor")
    if out.numel() != one.numel() * size:
        raise ValueError("output tensor size must be equal to world_size times input tensor size")


def _scattered(named: Arguments, size: int) -> None:
    out, one = named["output_tensor"], named["input_tensor"]
    if out.dtype != one.dtype:
        raise TypeError("input tensor must be the same type as the output tensor.")
    if one.numel() != out.numel() * size:
        raise ValueError("input tensor must be the same size as output size times world size")


def _root(word: str) -> Callable[[Arguments, int], None]:
    def rooted(named: Arguments, size: int) -> None:
        if not 0 <= named["root_rank"] < size:
            raise dist.DistBackendError(versions.no_such_root(word, named["root_rank"], size))

    return rooted


def _from_any(named: Arguments, size: int) -> None:
    raise NotImplementedError("ProcessGroupNCCL does not support recvAnysource")


OF: Mapping[str, Callable[[Arguments, int], None]] = {
    "_allgather_base_": _gathered,
    "_reduce_scatter_base_": _scattered,
    "broadcast_": _root("Broadcast"),
    "reduce_": _root("Reduce"),
    "recv_any_source_": _from_any,
}


def reduction(operation: Any, tensors: Sequence[Any]) -> None:
    """Raises for a reduction that NCCL lacks."""
    for name in BITWISE:
        if operation == getattr(dist.ReduceOp, name):
            raise ValueError(f"Cannot use ReduceOp.{name} with NCCL")
    if operation == dist.ReduceOp.AVG and any(tensor.dtype == torch.bool for tensor in tensors):
        raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
