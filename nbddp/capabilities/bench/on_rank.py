"""Collectives, timed as nccl-tests times them, and their results checked element by element.

A size is measured in blocks. All ranks meet at a barrier; then each calls the collective some times in a row and waits
for the last result; a block's time is divided by its calls, and of the ranks the slowest counts. Before and after, one
call runs on numbers of which every rank knows what must come out: small whole numbers, exact in float32. Buffers are
zero while it is timed, since an in-place sum of anything else grows without bound.

`size` is nccl-tests': bytes of the whole buffer, that is, of all that is gathered or scattered.

The group lives for the measurement alone, as that of `timings.on_rank_clocks` does. It is a backend unknown to torch's
tables and to our notes of calls. So the sequence numbers of the user's groups do not change. torch's flight recorder
has no room for both; `flight.making_room` keeps what it held.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from nbddp.compat import torch as torch_compat
from nbddp.compat.clock import clock
from nbddp.compat.extra import torch as torch_extra
from nbddp.deadlock.on_rank import flight
from nbddp.protocol import pickling
from nbddp.worker.parts import RankWorker

ITEM = 4  # bytes of a float32
BLOCK_SECONDS = 0.02  # a block has so many calls that it lasts about this long
MOST_CALLS = 50
SIZE_SECONDS, LEAST_BLOCKS = 1.5, 3  # a size gets fewer blocks than asked for, but not less than three, if it is slow
TIMEOUT = timedelta(minutes=30)  # torch's own for a group of gloo's
PATTERN = 251  # values of the pattern; a sum over 1,000 ranks is exact in float32

Plan = tuple[Callable[[], Any], Any, Any, Any, Callable[[], Any] | None]


@dataclass
class Case:
    """One collective at one size. `call()` runs it on its buffers, and `fill()` writes the pattern into them. `wrong()`
    counts the elements of the result that differ from the expected ones."""

    bytes: int
    call: Callable[[], Any]
    fill: Callable[[], None]
    wrong: Callable[[], int]
    zero: Callable[[], None]


@dataclass
class BenchGroup:
    """The group in which all ranks measure. device: the tensors'."""

    group: Any
    device: Any

    @property
    def rank(self) -> int:
        return int(self.group.rank())

    @property
    def ranks(self) -> int:
        return int(self.group.size())

    def reduced(self, values: Any, op: Any) -> Any:
        """All ranks' values, put together; no rank leaves before all have come."""
        self.group.allreduce([values], op).wait()
        return values


_open: list[BenchGroup] = []  # at most one


def bench(
    worker: RankWorker,
    buffers: Sequence[Any],
    *,
    part: str,
    devices: Sequence[int | None] = (),
    collective: str = "",
    size: int = 0,
    repeat: int = 0,
    warmup: int = 0,
) -> list[bytes]:
    """One size of a benchmark, or its group made or ended."""
    if part == "open":
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        with worker.groups.sockets.watch():
            open_group(worker.groups.store("bench"), rank, world_size, devices[rank])
        return [pickling.pack_answer(None)]
    if part == "close":
        _open.clear()
        return [pickling.pack_answer(None)]
    found = measure(collective, size, repeat, warmup)
    return [pickling.pack_answer(found)]


def open_group(store: Any, rank: int, size: int, device: int | None) -> None:
    """Make a process group for the measurement. It is over NCCL if this rank has a GPU of its own (`device`) and no
    living group of the user's has another backend; else over gloo. One that an interrupted measurement has left is
    ended."""
    import torch
    import torch.distributed as dist

    _open.clear()
    on_gpu = device is not None and (not dist.is_initialized() or _on_cuda(dist))
    place = torch.device("cuda", device) if on_gpu else torch.device("cpu")
    with flight.making_room(), _on(place):
        if on_gpu:
            nccl = dist.distributed_c10d.ProcessGroupNCCL
            group = nccl(store, rank, size, nccl.Options())
        else:
            group = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
        _open.append(BenchGroup(group, place))
        _open[0].reduced(torch.zeros(1, device=place), dist.ReduceOp.SUM)


def measure(collective: str, size: int, repeat: int, warmup: int) -> tuple[int, tuple[float, ...], int]:
    """The bytes: the nearest size that the ranks can share, at least one element each; seconds per call of each block,
    of the slowest rank; and wrong elements on all ranks."""
    import torch
    import torch.distributed as dist

    (met,) = _open
    device = met.device
    with _on(device):
        case = _case(collective, size, met)
        wrong = _checked(case)
        case.zero()
        calls, blocks = _plan(case, warmup, repeat, met)
        seconds = [_block(case, calls, met) for _ in range(blocks)]
        wrong += _checked(case)
        slowest = met.reduced(torch.tensor(seconds, dtype=torch.float64, device=device), dist.ReduceOp.MAX)
        total = met.reduced(torch.tensor([wrong], dtype=torch.int64, device=device), dist.ReduceOp.SUM)
    return case.bytes, tuple(slowest.tolist()), int(total)


def _on(device: Any) -> Any:
    """The user's current GPU stays what it is."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _on_cuda(dist: Any) -> bool:
    """By the table of backends: of a group that was made without naming one `get_backend` says "undefined"."""
    return "nccl" in str(dist.get_backend_config())


def _checked(case: Case) -> int:
    case.fill()
    case.call()
    return case.wrong()


def _plan(case: Case, warmup: int, repeat: int, met: BenchGroup) -> tuple[int, int]:
    """Warm up; how many calls a block gets, and how many blocks the size: the same on all ranks."""
    import torch
    import torch.distributed as dist

    for _ in range(warmup - 1):
        case.call()
    alone = torch.tensor([_block(case, 1, met)], dtype=torch.float64, device=met.device)
    once = max(float(met.reduced(alone, dist.ReduceOp.MAX)), 1e-9)
    calls = max(1, min(MOST_CALLS, int(BLOCK_SECONDS / once)))
    return calls, max(min(repeat, LEAST_BLOCKS), min(repeat, int(SIZE_SECONDS / (once * calls))))


def _block(case: Case, calls: int, met: BenchGroup) -> float:
    """Seconds per call on this rank."""
    import torch
    import torch.distributed as dist

    device = met.device
    met.reduced(torch.zeros(1, device=device), dist.ReduceOp.SUM)
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

    Each collective is a method. It gives its call, the buffer it reads, the pattern for that, the buffer it writes, and
    a function for the expected result; None: this rank gets nothing.
    """

    def __init__(self, met: BenchGroup, count: int):
        import torch

        self.group, self.count, self.device = met.group, count, met.device
        self.rank, self.ranks, device = met.rank, met.ranks, met.device
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

    def call(self, method: str, *tensors: Any, root: str = "") -> Callable[[], None]:
        """What calls a method of the backend, as torch's function of it does, and waits. root: the class of its options
        that has one, which is rank 0."""
        import torch.distributed as dist

        bound, given = getattr(self.group, method), list(tensors)
        if root:
            given.append(getattr(dist, root)())
            given[-1].rootRank = 0
        return lambda: bound(*given).wait()

    def all_reduce(self) -> Plan:
        return self.call("allreduce", [self.whole]), self.whole, self.pattern(self.rank), self.whole, self.total

    def broadcast(self) -> Plan:
        call = self.call("broadcast", [self.whole], root="BroadcastOptions")
        return call, self.whole, self.pattern(self.rank), self.whole, lambda: self.pattern(0)

    def reduce(self) -> Plan:
        call = self.call("reduce", [self.whole], root="ReduceOptions")
        return call, self.whole, self.pattern(self.rank), self.whole, self.total if self.root else None

    def all_gather(self) -> Plan:
        call = self.call(torch_compat.ALL_GATHER_BASE, self.whole, self.share)
        return call, self.share, self.pattern(self.rank, 0, self.count), self.whole, lambda: self.each(0)

    def reduce_scatter(self) -> Plan:
        call = self.call(torch_compat.REDUCE_SCATTER_BASE, self.share, self.whole)
        return call, self.whole, self.pattern(self.rank), self.share, lambda: self.total(self.at, self.count)

    def all_to_all(self) -> Plan:
        call = self.call("alltoall_base", self.other, self.whole, [], [])
        return call, self.whole, self.pattern(self.rank), self.other, lambda: self.each(self.at)

    def gather(self) -> Plan:
        call = self.call("gather", [self.parts] if self.root else [], [self.share], root="GatherOptions")
        own = self.pattern(self.rank, 0, self.count)
        return call, self.share, own, self.whole, (lambda: self.each(0)) if self.root else None

    def scatter(self) -> Plan:
        call = self.call("scatter", [self.share], [self.parts] if self.root else [], root="ScatterOptions")
        return call, self.whole, self.pattern(self.rank), self.share, lambda: self.pattern(0, self.at, self.count)

    def send_recv(self) -> Plan:
        """To the next rank and from the one before, in a ring."""
        right, left = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks

        def call() -> None:
            with torch_extra.coalescing(self.group) as works:
                works += [self.group.send([self.share], right, 0), self.group.recv([self.came], left, 0)]
            for work in works:
                work.wait()

        own = self.pattern(self.rank, 0, self.count)
        return call, self.share, own, self.came, lambda: self.pattern(left, 0, self.count)


def _case(collective: str, size: int, met: BenchGroup) -> Case:
    sharing = 1 if collective == "send_recv" else met.ranks
    count = max(1, size // (ITEM * sharing))
    buffers = _Buffers(met, count)
    call, source, given, result, expected = getattr(buffers, collective)()

    def fill() -> None:
        buffers.fill(-1)
        source.copy_(given)

    def wrong() -> int:
        return 0 if expected is None else int((result != expected()).sum())

    return Case(ITEM * count * sharing, call, fill, wrong, functools.partial(buffers.fill, 0))
