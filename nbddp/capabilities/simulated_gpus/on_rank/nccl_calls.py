"""What NCCL takes of a program and gloo lacks: sends of a rank to itself, sizes that differ, and coalescing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nbddp.capabilities.simulated_gpus.on_rank import machine, versions

# -- sends of a rank to itself ----------------------------------------------------------------------

# Sends of a rank to itself: NCCL takes them in a batch, and gloo has no connection from a rank to itself.


@dataclass
class Own:
    """What one rank of a group has sent to itself and not received yet, or the reverse. NCCL does not look at tags."""

    sent: deque[Any] = field(default_factory=deque)  # copies of tensors
    waiting: deque[tuple[Any, Any]] = field(default_factory=deque)  # tensors, and the futures of their receives


def _send(own: Own, tensor: Any) -> Any:
    content, done = machine.twin(tensor).clone(), torch.futures.Future[Any]()
    done.set_result([])
    if own.waiting:
        _arrive(content, *own.waiting.popleft())
    else:
        own.sent.append(content)
    return _work(done)


def _receive(own: Own, tensor: Any) -> Any:
    done = torch.futures.Future[Any]()
    if own.sent:
        _arrive(own.sent.popleft(), tensor, done)
    else:
        own.waiting.append((tensor, done))
    return _work(done)


def _arrive(content: Any, tensor: Any, done: Any) -> None:
    machine.twin(tensor).view(-1).copy_(content.view(-1))
    done.set_result([tensor])


def _work(done: Any) -> Any:
    return torch._C._distributed_c10d._create_work_from_future(done).boxed()


_batches: list[Callable[..., Any]] = []  # calls of `batch_isend_irecv` that are under way


def batched(batch: Callable[..., Any]) -> Callable[..., Any]:
    """`batch_isend_irecv`, in which a rank may send to itself."""

    def batching(ops: Any) -> Any:
        _batches.append(batch)
        try:
            return batch(ops)
        finally:
            _batches.pop()

    return batching


def check_batch() -> None:
    """A send of a rank to itself without its receive in the same batch, or the reverse: NCCL refuses that."""
    if not _batches:
        raise RuntimeError(versions.INVALID_USAGE)


TO_ITSELF: Mapping[str, Callable[[Own, Any], Any]] = {"c10d::send": _send, "c10d::recv_": _receive}


# -- sizes that differ ------------------------------------------------------------------------------

# Collectives of tensors whose sizes differ: NCCL takes them, and gloo does not.
# All-to-all goes as one flat tensor with split sizes. All-gather goes as a broadcast from each rank, as torch has NCCL
# do it. Both wait: a rank sees only its own sizes, so all ranks take the same way.

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


def _reduce_scatter(group: Any, out: Tensors, given: Sequence[Tensors], operation: Any) -> Any:
    """None where gloo has it: not with torch 2.6."""
    if versions.at_least(2, 10):
        return None
    flat = torch.cat([machine.twin(tensor).reshape(-1) for tensor in given[0]])
    works = torch.ops.c10d.allreduce_([flat], group.boxed(), operation, None, timeout=-1)
    torch._C._distributed_c10d.Work.unbox(works[1]).wait()
    part = flat.split([tensor.numel() for tensor in given[0]])[group.rank()]
    machine.twin(out[0]).view(-1).copy_(part)
    return _done(out)


def _done(out: Tensors) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(list(out))
    return _work(future)


SIZES_DIFFER: Mapping[str, Callable[..., Any]] = {
    "c10d::alltoall_": lambda group, args: _all_to_all(group, args[0], args[1]),
    "c10d::allgather_": lambda group, args: _all_gather(group, args[0], args[1]),
    "c10d::reduce_scatter_": lambda group, args: _reduce_scatter(group, args[0], args[1], args[3]),
}


def carry_out(name: str, group: Any, args: Sequence[Any]) -> Any:
    """What the operator returns; None: gloo carries it out. args: of the operator, with the program's tensors."""
    work = SIZES_DIFFER[name](group, args) if name in SIZES_DIFFER else None
    return None if work is None else (args[0], work)


# -- coalescing -------------------------------------------------------------------------------------

# Collectives between `_start_coalescing` and `_end_coalescing`: NCCL launches them together, gloo lacks both calls.
# Here each begins at once, and the work that the second call returns waits for all of them.

_noted: dict[str, list[Any]] = {}  # name of a group that coalesces → works


class WorksTogether:
    """The works of several collectives, as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def note(boxed: Any, out: Any) -> None:
    """out: what an operator of the group has returned; the last of it is its work."""
    if not _noted:
        return
    compiled = torch._C._distributed_c10d
    works = _noted.get(compiled.ProcessGroup.unbox(boxed).group_name)
    if works is not None:
        works.append(compiled.Work.unbox(out[-1] if isinstance(out, tuple | list) else out))


def install(is_nccl: Callable[[Any], bool]) -> None:
    """is_nccl: whether a group is known as one of nccl."""
    kind = torch._C._distributed_c10d.ProcessGroup
    start, end = kind._start_coalescing, kind._end_coalescing

    def begin(self: Any, device: Any) -> None:
        if not is_nccl(self):
            return start(self, device)  # type: ignore[no-any-return]
        _noted[self.group_name] = []
        return None

    def ended(self: Any, device: Any) -> Any:
        return WorksTogether(_noted.pop(self.group_name, [])) if is_nccl(self) else end(self, device)

    kind._start_coalescing, kind._end_coalescing = begin, ended
