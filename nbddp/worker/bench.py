"""Collectives, timed as nccl-tests times them, and their results checked element by element.

A size is measured in blocks: all ranks meet at a barrier, then each calls the collective some times in a row and waits
for the last result; a block's time is divided by its calls, and of the ranks the slowest counts. Before and
after, one call runs on numbers of which every rank knows what must come out: small whole numbers, exact in
float32. Buffers are zero while it is timed, since an in-place sum of anything else grows without bound.

`size` is nccl-tests': bytes of the whole buffer, that is, of all that is gathered or scattered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbddp.base.clock import clock

ITEM = 4  # bytes of a float32
BLOCK_SECONDS = 0.02  # a block has so many calls that it lasts about this long
MOST_CALLS = 50
SIZE_SECONDS, LEAST_BLOCKS = 1.5, 3  # a size gets fewer blocks than asked for, but not less than three, if it is slow
PATTERN = 251  # values of the pattern; a sum over 1,000 ranks is exact in float32

Plan = tuple[Callable[[], Any], Any, Any, Any, Callable[[], Any] | None]


@dataclass
class Case:
    """One collective at one size: `call()` runs it on its buffers, `fill()` writes the pattern into them, and
    `wrong()` counts the elements of the result that are not what they must be."""

    bytes: int
    call: Callable[[], Any]
    fill: Callable[[], None]
    wrong: Callable[[], int]
    zero: Callable[[], None]


def open_group(device: int | None) -> bool:
    """Make a process group for the measurement, over NCCL if this rank has a GPU of its own, else over gloo; False if
    the user's own is alive, which then is used."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return False
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device is None else "nccl")
    return True


def close_group() -> None:
    """End the group that `open_group` made."""
    import torch.distributed as dist

    dist.destroy_process_group()


def measure(collective: str, size: int, repeat: int, warmup: int) -> dict[str, Any]:
    """Seconds per call of each block, of the slowest rank; wrong elements on all ranks; and the bytes: the nearest size
    that the ranks can share, at least one element each."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", torch.cuda.current_device()) if _on_cuda(dist) else torch.device("cpu")
    case = _case(collective, size, device)
    wrong = _checked(case)
    case.zero()
    calls, blocks = _plan(case, warmup, repeat, device)
    seconds = [_block(case, calls, device) for _ in range(blocks)]
    wrong += _checked(case)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    total = torch.tensor([wrong], dtype=torch.int64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return {"bytes": case.bytes, "seconds": slowest.tolist(), "wrong": int(total)}


def _on_cuda(dist: Any) -> bool:
    """By the table of backends: of a group that was made without naming one `get_backend` says "undefined"."""
    return "nccl" in str(dist.get_backend_config())


def _checked(case: Case) -> int:
    case.fill()
    case.call()
    return case.wrong()


def _plan(case: Case, warmup: int, repeat: int, device: Any) -> tuple[int, int]:
    """Warm up; how many calls a block gets, and how many blocks the size: the same on all ranks."""
    import torch
    import torch.distributed as dist

    for _ in range(warmup - 1):
        case.call()
    slowest = torch.tensor([_block(case, 1, device)], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    once = max(float(slowest), 1e-9)
    calls = max(1, min(MOST_CALLS, int(BLOCK_SECONDS / once)))
    return calls, max(min(repeat, LEAST_BLOCKS), min(repeat, int(SIZE_SECONDS / (once * calls))))


def _block(case: Case, calls: int, device: Any) -> float:
    """Seconds per call on this rank."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = clock.perf_counter()
    for _ in range(calls):
        case.call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (clock.perf_counter() - began) / calls


class _Buffers:
    """Buffers of one size: `share` is a rank's own part of `whole`, `other` and `parts` are for what comes back.

    Each collective is a method that gives its call, the buffer it reads and what that is filled with, the buffer it
    writes and a function for what must then be there; None: this rank gets nothing.
    """

    def __init__(self, dist: Any, count: int, device: Any):
        import torch

        self.dist, self.count, self.device = dist, count, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.whole, self.other = (torch.zeros(self.ranks * count, device=device) for _ in range(2))
        self.share, self.came = (torch.zeros(count, device=device) for _ in range(2))
        self.parts = list(self.whole.chunk(self.ranks))
        self.at = self.rank * count
        self.root = self.rank == 0

    def fill(self, value: float) -> None:
        for buffer in (self.whole, self.other, self.share, self.came):
            buffer.fill_(value)

    def pattern(self, of: int, start: int = 0, length: int | None = None) -> Any:
        """What rank `of` has at these elements of the whole: whole numbers from 0 to PATTERN - 1."""
        import torch

        end = start + (self.ranks * self.count if length is None else length)
        return ((torch.arange(start, end, device=self.device) + 7 * of) % PATTERN).to(torch.float32)

    def total(self, start: int = 0, length: int | None = None) -> Any:
        found = self.pattern(0, start, length)
        for r in range(1, self.ranks):
            found += self.pattern(r, start, length)
        return found

    def each(self, start: int) -> Any:
        """Every rank's elements from `start`, one rank after the other."""
        import torch

        return torch.cat([self.pattern(r, start, self.count) for r in range(self.ranks)])

    def all_reduce(self) -> Plan:
        return lambda: self.dist.all_reduce(self.whole), self.whole, self.pattern(self.rank), self.whole, self.total

    def broadcast(self) -> Plan:
        call = functools.partial(self.dist.broadcast, self.whole, 0)
        return call, self.whole, self.pattern(self.rank), self.whole, lambda: self.pattern(0)

    def reduce(self) -> Plan:
        call = functools.partial(self.dist.reduce, self.whole, 0)
        return call, self.whole, self.pattern(self.rank), self.whole, self.total if self.root else None

    def all_gather(self) -> Plan:
        call = functools.partial(self.dist.all_gather_into_tensor, self.whole, self.share)
        return call, self.share, self.pattern(self.rank, 0, self.count), self.whole, lambda: self.each(0)

    def reduce_scatter(self) -> Plan:
        call = functools.partial(self.dist.reduce_scatter_tensor, self.share, self.whole)
        return call, self.whole, self.pattern(self.rank), self.share, lambda: self.total(self.at, self.count)

    def all_to_all(self) -> Plan:
        call = functools.partial(self.dist.all_to_all_single, self.other, self.whole)
        return call, self.whole, self.pattern(self.rank), self.other, lambda: self.each(self.at)

    def gather(self) -> Plan:
        call = functools.partial(self.dist.gather, self.share, self.parts if self.root else None, 0)
        own = self.pattern(self.rank, 0, self.count)
        return call, self.share, own, self.whole, (lambda: self.each(0)) if self.root else None

    def scatter(self) -> Plan:
        call = functools.partial(self.dist.scatter, self.share, self.parts if self.root else None, 0)
        return call, self.whole, self.pattern(self.rank), self.share, lambda: self.pattern(0, self.at, self.count)

    def send_recv(self) -> Plan:
        """To the next rank and from the one before, in a ring."""
        right, left = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks

        def call() -> None:
            both = [self.dist.P2POp(self.dist.isend, self.share, right),
                    self.dist.P2POp(self.dist.irecv, self.came, left)]  # fmt: skip
            for work in self.dist.batch_isend_irecv(both):
                work.wait()

        own = self.pattern(self.rank, 0, self.count)
        return call, self.share, own, self.came, lambda: self.pattern(left, 0, self.count)


def _case(collective: str, size: int, device: Any) -> Case:
    import torch.distributed as dist

    sharing = 1 if collective == "send_recv" else dist.get_world_size()
    count = max(1, size // (ITEM * sharing))
    buffers = _Buffers(dist, count, device)
    call, source, given, result, expected = getattr(buffers, collective)()

    def fill() -> None:
        buffers.fill(-1)
        source.copy_(given)

    def wrong() -> int:
        return 0 if expected is None else int((result != expected()).sum())

    return Case(ITEM * count * sharing, call, fill, wrong, functools.partial(buffers.fill, 0))
