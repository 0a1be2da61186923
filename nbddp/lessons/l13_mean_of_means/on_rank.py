"""A rank's part of lesson 13's checks: it calls the learner's function on a DDP, and records gradients and exchanges.

Imports torch only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypedDict

from nbddp.capabilities.timings import on_rank as timings_on_rank
from nbddp.capabilities.timings.on_rank_marks import passed
from nbddp.lessons.framework.async_work import Misused
from nbddp.lessons.framework.on_rank import all_gradients, gradients

if TYPE_CHECKING:
    import torch

FEATURES, HIDDEN, SAMPLES = 5, 4, 3  # SAMPLES: of a micro-batch
WORDS, WIDTH, LENGTH, PADDING = 11, 6, 6, -100
Known = dict[str, list[float]]  # by the parameter's name, flat


class Watched(TypedDict):
    gradients: Mapping[str, list[float] | None]  # as `Known`; None where there is none
    called: int  # how often no_sync was called
    entered: int  # and its block begun
    exchanged: list[bool]  # whether DDP exchanged anything, for each pass through it
    kept: int  # of how many micro-batches the activations were there at once
    moved: bool  # whether a parameter changed


class Accumulated(Watched):
    turned: bool  # whether loss_of got the targets first


class RightAccumulation(TypedDict):
    """What one plain model gives that sees all ranks' samples."""

    count: int  # micro-batches
    world: int  # ranks
    reference: Known
    last: Known  # of all ranks' last micro-batches alone


class Part(TypedDict):
    """A micro-batch of a rank, in one process without DDP."""

    tokens: int
    positions: int  # padding included
    gradient: Known  # of the sum of the tokens' losses


def accumulated(function: Callable[..., Any], count: int) -> Accumulated:
    """What `function(model, micro_batches, loss_of)` does with `count` micro-batches of one size.

    model is a float64 DDP; every rank has samples of its own.
    """
    import torch.distributed as dist

    turned = list[int]()

    def loss_of(outputs: Any, targets: Any) -> Any:
        if targets.requires_grad and not outputs.requires_grad:
            turned.append(1)
        return weighted(outputs, targets)

    found = _watched(function, _net(), _shard(dist.get_rank(), count), loss_of)
    return {**found, "turned": bool(turned)}


def token_weighted(function: Callable[..., Any], case: int) -> Watched:
    """What `_watched` tells of `function(model, micro_batches, loss_sum)` with this rank's micro-batches of a case."""
    import torch.distributed as dist

    return _watched(function, _language(), _sentences(dist.get_rank(), case), _loss_sum)


def parts(cases: Sequence[int]) -> list[list[Part]]:
    """For each case, this rank's micro-batches."""
    import torch.distributed as dist

    return [[_part(*pair) for pair in _sentences(dist.get_rank(), case)] for case in cases]


def _watched(function: Callable[..., Any], net: Any, micro_batches: Any, loss_of: Callable[..., Any]) -> Watched:
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP

    ddp = DDP(net)
    before = {n: p.detach().clone() for n, p in ddp.module.named_parameters()}
    called, entered, kept = list[int](), list[int](), [0]
    _count_entries(ddp, called, entered)
    steps, begun = _recorder().steps, timings_on_rank.now()
    function(ddp, micro_batches, _counted(loss_of, kept))
    own = dict(ddp.module.named_parameters())
    return {
        "gradients": gradients(ddp.module),
        "called": len(called),
        "entered": len(entered),
        "exchanged": [bool(s.buckets) for s in steps if passed(s.entered) >= begun],
        "kept": max(kept),
        "moved": not all(torch.equal(p, before[n]) for n, p in own.items()),
    }


def expected(counts: Sequence[int]) -> list[RightAccumulation]:
    """What is right for each of `counts`."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    begin = {n: p.detach().clone() for n, p in DDP(_net()).module.named_parameters()}
    world = dist.get_world_size()
    found: list[RightAccumulation] = []
    for count in counts:
        shards = [_shard(rank, count) for rank in range(world)]
        everything = [pair for shard in shards for pair in shard]
        last = _alone(begin, [s[-1] for s in shards])
        found.append({"count": count, "world": world, "reference": _alone(begin, everything), "last": last})
    return found


def _net() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)).double()


def _shard(rank: int, count: int) -> list[tuple[Any, Any]]:
    """A rank's micro-batches: inputs of shape (SAMPLES, FEATURES), targets of shape (SAMPLES, 1); no two are alike."""
    import torch

    source = torch.Generator().manual_seed(100 * count + rank)
    shapes = ((SAMPLES, FEATURES), (SAMPLES, 1))
    return [
        (torch.randn(shapes[0], generator=source).double(), torch.randn(shapes[1], generator=source).double())
        for _ in range(count)
    ]


def _alone(parameters: Mapping[str, torch.Tensor], pairs: Sequence[tuple[Any, Any]]) -> Known:
    """The gradient of the mean loss over all samples of `pairs`, in one process without DDP."""
    import torch

    net = _net()
    net.load_state_dict(parameters)
    inputs, targets = (torch.cat(some) for some in zip(*pairs, strict=True))
    weighted(net(inputs), targets).backward()
    return all_gradients(net)


def weighted(outputs: Any, targets: Any) -> Any:
    """A mean loss in which outputs and targets cannot change places."""
    return ((outputs - targets).square() * (1 + targets.square())).mean()


def _language() -> Any:
    """The same model on every rank: which word follows each word."""
    import torch
    from torch import nn

    torch.manual_seed(WORDS)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS)).double()


def plan(rank: int, case: int) -> list[tuple[int, ...]]:
    """The tokens of the two sentences of each micro-batch of a rank. Case 0 has three unlike micro-batches on every
    rank, case 1 a single one; in case 2 ranks differ in their number, and the first is all padding on every second
    rank."""
    if case == 0:
        return [(1 + (rank + 2 * i) % 4, 2 + (3 * rank + i) % LENGTH) for i in range(3)]
    if case == 1:
        return [(1 + 2 * rank % 5, 1 + rank % 2)]
    return [(0, 0) if rank % 2 and i == 0 else (3 + i, 1 + (rank + i) % 3) for i in range(2 + rank % 2)]


def _sentences(rank: int, case: int) -> list[tuple[Any, Any]]:
    """A rank's micro-batches: words and the words that follow, both of shape (2, LENGTH); targets of -100 are
    padding."""
    import torch

    source = torch.Generator().manual_seed(1000 * case + rank)
    found = []
    for lengths in plan(rank, case):
        words, following = torch.randint(0, WORDS, (2, 2, LENGTH), generator=source)
        for row, length in enumerate(lengths):
            following[row, length:] = PADDING
        found.append((words, following))
    return found


def _loss_sum(outputs: Any, targets: Any) -> Any:
    from torch.nn.functional import cross_entropy

    if targets.requires_grad:
        raise Misused("loss_sum takes the outputs first, then the targets: loss_sum(model(inputs), targets)")
    return cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")


def _part(words: Any, following: Any) -> Part:
    net = _language()
    _loss_sum(net(words), following).backward()
    tokens = int((following != PADDING).sum())
    return {"tokens": tokens, "positions": following.numel(), "gradient": all_gradients(net)}


def _count_entries(ddp: Any, called: list[int], entered: list[int]) -> None:
    """Have `called` grow by one whenever no_sync is called, and `entered` whenever its block begins."""
    original = ddp.no_sync

    @contextmanager
    def block() -> Iterator[None]:
        entered.append(1)
        with original():
            yield

    def no_sync() -> Any:
        called.append(1)
        return block()

    ddp.no_sync = no_sync


def _counted(loss_of: Any, kept: list[int]) -> Any:
    """`loss_of`, which appends to `kept` how many of its losses have not gone backward yet."""

    def counted(outputs: Any, targets: Any) -> Any:
        loss = loss_of(outputs, targets)
        if loss.requires_grad:
            kept.append(kept[-1] + 1)
            loss.register_hook(lambda gradient: kept.append(kept[-1] - 1))
        return loss

    return counted


def _recorder() -> timings_on_rank.Recorder:
    """This worker's own."""
    from IPython.core.getipython import get_ipython

    found: timings_on_rank.Recorder = get_ipython().kernel.parts["timings"]
    return found
