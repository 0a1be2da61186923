"""Collectives of tensors whose sizes differ: NCCL takes them, and gloo does not.

All-to-all goes as one flat tensor with split sizes. All-gather goes as a broadcast from each rank, as torch has NCCL do
it. Both wait: a rank sees only its own sizes, so all ranks take the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nbddp.capabilities.simulated_gpus.on_rank import machine

Tensors = Sequence[Any]


def _all_to_all(group: Any, out: Tensors, given: Tensors) -> Any:
    compiled = torch._C._distributed_c10d
    flat_in = torch.cat([machine.twin(tensor).reshape(-1) for tensor in given])
    sizes = [tensor.numel() for tensor in out]
    flat_out = flat_in.new_empty(sum(sizes))
    in_sizes = [tensor.numel() for tensor in given]
    group.alltoall_base(flat_out, flat_in, sizes, in_sizes, compiled.AllToAllOptions()).wait()
    for tensor, part in zip(out, flat_out.split(sizes), strict=True):
        machine.twin(tensor).copy_(part.view(tensor.shape))
    return _done(out)


def _all_gather(group: Any, out: Sequence[Tensors], given: Tensors) -> Any:
    """None where the sizes are equal: gloo takes that."""
    if len({tensor.numel() for tensor in out[0]}) < 2:
        return None
    options = torch._C._distributed_c10d.BroadcastOptions()
    for rank, tensor in enumerate(out[0]):
        twin = machine.twin(tensor)
        if rank == group.rank():
            twin.copy_(machine.twin(given[0]))
        options.rootRank = rank
        group.broadcast([twin], options).wait()
    return _done(out[0])


def _done(out: Tensors) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(list(out))
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()


OF: Mapping[str, Callable[[Any, Any, Any], Any]] = {"c10d::alltoall_": _all_to_all, "c10d::allgather_": _all_gather}


def carry_out(name: str, group: Any, args: Sequence[Any]) -> Any:
    """What the operator returns; None: gloo carries it out. args: of the operator, with the program's tensors."""
    work = OF[name](group, args[0], args[1]) if name in OF else None
    return None if work is None else (args[0], work)
