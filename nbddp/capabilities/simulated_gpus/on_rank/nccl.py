"""The nccl backend: gloo on the CPU twins of the tensors.

A program's process group knows gloo as its backend for cuda alone, so a CPU tensor gets torch's own error. The c10d
operators at the CUDA key call themselves on a shadow group, of which the same gloo is the backend for the CPU. So C++
callers, DDP's reducer among them, are served too. Work objects and futures are gloo's own.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nbddp.capabilities.simulated_gpus.on_rank import (
    devices,
    kernels,
    machine,
    nccl_backend,
    nccl_calls,
    versions,
)
from nbddp.capabilities.simulated_gpus.on_rank.arguments import Relabelled, flat
from nbddp.capabilities.simulated_gpus.on_rank.dtypes import EIGHT, WORDS
from nbddp.capabilities.simulated_gpus.on_rank.nccl_backend import SHARED, Shadow, bring, over, shadows, unwrapped

ALONE = {"c10d::send", "c10d::recv_", "c10d::recv_any_source_"}  # not every rank takes part
FLAT = {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"}  # gloo cuts along dimension 0, nccl sees no shapes
FLAT_LISTS = {"c10d::allgather_into_tensor_coalesced_", "c10d::reduce_scatter_tensor_coalesced_"}  # else gloo aborts
BARRIER = "c10d::barrier"
NOT_COLLECTIVE = {"c10d::check_for_nan", "c10d::monitored_barrier_"}
OF_BACKENDS = (  # methods of a backend that a program may call without a group
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_into_tensor_coalesced", "alltoall",
    "alltoall_base", "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
REDUCTIONS = (  # gloo lacks AVG: some versions raise, and reduce-scatter of 2.10 silently sums
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
)  # fmt: skip


def install() -> None:
    c10d, compiled = dist.distributed_c10d, torch._C._distributed_c10d
    nccl_backend.install()
    compiled._hash_tensors = _hash  # which only a build with NCCL has
    compiled.Logger.set_runtime_stats_and_log = lambda self: None  # it wants a CUDA timer, which a CPU build lacks
    for name in REDUCTIONS:
        if hasattr(compiled.ProcessGroup, name):
            setattr(compiled.ProcessGroup, name, _reducing(getattr(compiled.ProcessGroup, name)))
    for name in OF_BACKENDS:
        if hasattr(compiled.ProcessGroupGloo, name):
            setattr(compiled.ProcessGroupGloo, name, _on_twins(getattr(compiled.ProcessGroupGloo, name)))
    if not hasattr(compiled.Backend, "supports_coalescing"):  # torch 2.6 coalesces for every CUDA tensor
        c10d.batch_isend_irecv = dist.batch_isend_irecv = _batch
    c10d.batch_isend_irecv = dist.batch_isend_irecv = nccl_calls.batched(c10d.batch_isend_irecv)
    nccl_calls.install(nccl_backend.is_nccl)
    library = kernels.library("c10d")
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("c10d::") and full not in NOT_COLLECTIVE:
            _register(library, full.removeprefix("c10d::"))


def _hash(tensors: Sequence[Any]) -> int:
    """Of their bytes, for the log of TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    parts = (machine.twin(tensor) if tensor.is_cuda else tensor for tensor in tensors)
    return hash(
        tuple(zlib.crc32(bytes(part.detach().contiguous().view(torch.uint8).flatten().tolist())) for part in parts)
    )


def _batch(ops: Sequence[Any]) -> list[Any]:
    """Sends and receives one by one, as torch has gloo do it."""
    dist.distributed_c10d._check_p2p_op_list(ops)
    works = [one.op(one.tensor, one.peer, one.group, one.tag) for one in ops]
    return [work for work in works if work is not None]


def _on_twins(call: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a backend, called on the CPU twins of its tensors."""

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, *map(_twinned, args), **{name: _twinned(value) for name, value in kwargs.items()})

    return called


def _twinned(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_twinned, value))
    return machine.twin(value) if isinstance(value, torch.Tensor) and value.is_cuda else value


def _register(library: Any, name: str) -> None:
    op = getattr(torch.ops.c10d, name.partition(".")[0]).default
    if any(argument.name == "process_group" for argument in op._schema.arguments):
        for key in ("CUDA", "SparseCUDA"):  # torch's own for sparse tensors reads gloo's memory as a GPU's
            library.impl(name, _collective(op), key)


def _collective(op: Any) -> Callable[..., Any]:
    at = [argument.name for argument in op._schema.arguments].index("process_group")
    name = op._schema.name

    def kernel(*args: Any, **kwargs: Any) -> Any:
        shadow = _shadow_of(args[at])
        if any(not tensor.is_cuda for tensor in flat(args)):
            raise ValueError("Tensors must be CUDA and dense")
        if shadow.device != SHARED:
            _check(op, args, shadow)
        call = Relabelled(op, args, {})
        _place(name, shadow, call.device, args[at:])
        done = _without_gloo(name, shadow, args)
        if done is not None:
            return done
        call.args[at] = shadow.boxed
        _flatten(name, call.args)
        in_bytes = any(tensor.dtype in EIGHT for tensor in flat(args))  # which gloo has no type for
        if in_bytes:
            call.args = [_as_bytes(arg) for arg in call.args]
        out = op(*call.args, **kwargs)
        nccl_calls.note(args[at], out)
        for tensor, twin in call.originals.values():  # gloo works on addresses, so the label may change under way:
            machine.to_cuda(twin, tensor.get_device())  # futures and DDP's views of buckets hold CUDA tensors again
        if name in FLAT or (in_bytes and isinstance(out, tuple)):
            return args[0], out[1]
        return kernels.relabelled(out, call.device or 0, call.originals)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        if kernels.recording:
            return kernels.recording[-1](lambda op, *args, **kwargs: kernel(*args, **kwargs), op, args, kwargs)
        return kernel(*args, **kwargs)

    return recorded


def _shadow_of(boxed: Any) -> Shadow:
    try:
        backend = torch._C._distributed_c10d.ProcessGroup.unbox(boxed)._get_backend(torch.device("cuda"))
    except RuntimeError:
        raise RuntimeError("No backend type associated with device type cuda") from None
    if id(backend) not in shadows:
        shadows[id(backend)] = _shadow_for(backend)
    shadow = shadows[id(backend)]
    if shadow.ended:
        raise dist.DistBackendError(versions.aborted(shadow.rank))
    return shadow


def _shadow_for(backend: Any) -> Shadow:
    """Of a backend that is no nccl of ours: gloo, or either in the wrapper of `TORCH_DISTRIBUTED_DEBUG=DETAIL`."""
    inner = unwrapped(backend)
    known = shadows.get(id(inner))
    if known is not None:
        return over(backend, known.store)
    if isinstance(inner, torch._C._distributed_c10d.ProcessGroupGloo):
        shadow = over(backend, dist.HashStore())
        shadow.device = SHARED  # gloo takes ranks on one GPU
        return shadow
    raise NotImplementedError("simulated GPUs carry out collectives on CUDA tensors with nccl and gloo alone")


def _flatten(name: str, args: list[Any]) -> None:
    if name in FLAT:
        args[:2] = [tensor.view(-1) for tensor in args[:2]]
    elif name in FLAT_LISTS:
        args[:2] = [[tensor.view(-1) for tensor in tensors] for tensors in args[:2]]


def _as_bytes(arg: Any) -> Any:
    if isinstance(arg, list | tuple):
        return type(arg)(map(_as_bytes, arg))
    return arg.view(torch.uint8) if isinstance(arg, torch.Tensor) and arg.dtype in EIGHT else arg


def _without_gloo(name: str, shadow: Shadow, args: Sequence[Any]) -> Any:
    """What an operator that gloo lacks returns; None: gloo has it."""
    if name in nccl_calls.TO_ITSELF and args[2] == shadow.rank:
        nccl_calls.check_batch()
        return nccl_calls.TO_ITSELF[name](shadow.own, args[0][0])
    return nccl_calls.carry_out(name, shadow.group, args)


def _place(name: str, shadow: Shadow, device: int | None, after: Sequence[Any]) -> None:
    """On which GPU this rank is. after: the operator's arguments from the group on."""
    if name == BARRIER:
        _meet(shadow, device, after[0], after[1])
    elif device is not None and name not in ALONE:
        bring(shadow, device)


def _meet(shadow: Shadow, device: int | None, boxed: Any, device_ids: Any) -> None:
    """A barrier takes its `device_ids`, else the group's GPU, else number rank modulo the GPUs, not the current one."""
    given = devices.known_to_driver(device_ids[0]) if device_ids else None
    if device is None or shadow.device is not None:
        return
    if given is not None:
        device = given
    elif torch._C._distributed_c10d.ProcessGroup.unbox(boxed).bound_device_id is None:
        device = (dist.get_rank() if dist.is_initialized() else shadow.rank) % devices.count()
    bring(shadow, device, "simulated/barrier")
    shadow.device = None  # the next collective may be on another GPU


def _is_nccl(group: Any, tensors: Any) -> bool:
    """Whether this group carries out a collective on these tensors as nccl."""
    return any(tensor.is_cuda for tensor in flat([tensors])) and nccl_backend.is_nccl(group)


def _reducing(call: Callable[..., Any]) -> Callable[..., Any]:
    """With the reductions that NCCL has and gloo lacks: averages, and sums of scaled inputs."""

    def reduced(self: Any, *args: Any) -> Any:
        options: Any = args[-1] if args else None
        operation = getattr(options, "reduceOp", None)
        if operation is None or not _is_nccl(self, args[0]):
            return call(self, *args)
        _check_reduction(operation, list(flat([args[0]])))
        averages = operation == dist.ReduceOp.AVG
        if operation == dist.ReduceOp.PREMUL_SUM:
            args = (*_scaled(args, operation.__getstate__()[1]),)
        elif not averages:
            return call(self, *args)
        before = copy.copy(operation)  # what is read is the options' own, and changes with them
        options.reduceOp = dist.ReduceOp.SUM
        try:
            call(self, *args).wait()
        finally:
            options.reduceOp = before
        out: Sequence[Any] = args[0] if isinstance(args[0], list) else [args[0]]
        for tensor in out if averages else ():
            tensor.div_(
                self.size(), rounding_mode=None if tensor.is_floating_point() or tensor.is_complex() else "trunc"
            )
        done = torch.futures.Future()  # not gloo's work, whose second wait() would copy the sum again
        done.set_result(out)
        return torch._C._distributed_c10d._create_work_from_future(done)

    return reduced


def _scaled(args: Sequence[Any], factor: Any) -> Sequence[Any]:
    """The arguments of a reduction with scaled inputs: in place where they are the outputs too."""
    if len(args) == 2:
        for tensor in flat([args[0]]):
            tensor.mul_(factor)
        return args
    return (args[0], _times(args[1], factor), *args[2:])


def _times(value: Any, factor: Any) -> Any:
    return [_times(part, factor) for part in value] if isinstance(value, list | tuple) else value * factor


# -- what NCCL refuses -----------------------------------------------------------------------------
#
# Of a collective's arguments, in its words: gloo takes some of them, and has other words. Each was seen on an H100 with
# torch 2.11 and NCCL 2.28.

Arguments = Mapping[str, Any]
UNKNOWN = frozenset((torch.int16, torch.uint16, torch.uint32, torch.uint64))  # types that NCCL has none of
REDUCING = frozenset((
    "allreduce_", "allreduce_coalesced_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
))  # fmt: skip
SENT = ("tensors", "input_tensors", "input_tensor", "input", "inputs")
HOPPER = (9, 0)
BITWISE = ("BAND", "BOR", "BXOR")


def _check(op: Any, args: Sequence[Any], group: Any) -> None:
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
        if tensor.dtype in EIGHT and name in REDUCING:
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


def _check_reduction(operation: Any, tensors: Sequence[Any]) -> None:
    """Raises for a reduction that NCCL lacks."""
    for name in BITWISE:
        if operation == getattr(dist.ReduceOp, name):
            raise ValueError(f"Cannot use ReduceOp.{name} with NCCL")
    if operation == dist.ReduceOp.AVG and any(tensor.dtype == torch.bool for tensor in tensors):
        raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
