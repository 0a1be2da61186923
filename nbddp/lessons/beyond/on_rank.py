"""What lesson 12's check has a rank do: accumulate gradients by the learner's function, and note what DDP did.

Imports torch only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nbddp.worker import recorder as record

FEATURES, HIDDEN, SAMPLES = 5, 4, 3  # SAMPLES: of a micro-batch


def accumulated(function: Callable[..., Any], count: int) -> dict[str, Any]:
    """What `function(model, micro_batches, loss_of)` does with `count` micro-batches, as plain data.

    model is a float64 DDP; every rank has samples of its own. A dict of `gradients` (names → flat lists, None where
    there is none); `called` and `entered`, how often no_sync was; `exchanged`, whether DDP exchanged anything, for each
    pass through it; `kept`, of how many micro-batches the activations were there at once; `turned`, whether loss_of got
    the targets first; and `moved`, whether a parameter changed.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    ddp = DDP(_net())
    before = {n: p.detach().clone() for n, p in ddp.module.named_parameters()}
    entered: list[int] = []
    kept, turned, called = [0], list[int](), list[int]()
    _count_entries(ddp, called, entered)
    steps, begun = _recorder().steps, record.now()
    function(ddp, _shard(dist.get_rank(), count), _counted(weighted, kept, turned))
    own = dict(ddp.module.named_parameters())
    return {
        "gradients": _flat(own),
        "called": len(called),
        "entered": len(entered),
        "exchanged": [bool(s["buckets"]) for s in steps if s["forward"][0] >= begun],
        "kept": max(kept),
        "turned": bool(turned),
        "moved": not all(torch.equal(p, before[n]) for n, p in own.items()),
    }


def expected(counts: Sequence[int]) -> list[dict[str, Any]]:
    """What is right for each of `counts`, from one plain model that sees all ranks' samples: the gradients `reference`,
    and `last`, those of all ranks' last micro-batches alone; with `count` and `world`, how many ranks there are."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    begin = {n: p.detach().clone() for n, p in DDP(_net()).module.named_parameters()}
    world, found = dist.get_world_size(), []
    for count in counts:
        shards = [_shard(rank, count) for rank in range(world)]
        everything = [pair for shard in shards for pair in shard]
        gradients = {"reference": _alone(begin, everything), "last": _alone(begin, [s[-1] for s in shards])}
        found.append({"count": count, "world": world, **gradients})
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


def _alone(parameters: dict[str, Any], pairs: Sequence[tuple[Any, Any]]) -> dict[str, list[float]]:
    """The gradient of the mean loss over all samples of `pairs`, in one process without DDP."""
    import torch

    net = _net()
    net.load_state_dict(parameters)
    inputs, targets = (torch.cat(some) for some in zip(*pairs, strict=True))
    weighted(net(inputs), targets).backward()
    return {n: p.grad.flatten().tolist() for n, p in net.named_parameters()}


def weighted(outputs: Any, targets: Any) -> Any:
    """A mean loss in which outputs and targets cannot change places."""
    return ((outputs - targets).square() * (1 + targets.square())).mean()


def _flat(parameters: dict[str, Any]) -> dict[str, list[float] | None]:
    return {n: None if p.grad is None else p.grad.flatten().tolist() for n, p in parameters.items()}


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


def _counted(loss_of: Any, kept: list[int], turned: list[int]) -> Any:
    """`loss_of`, which appends to `kept` how many of its losses have not gone backward yet, and to `turned` for each
    call in which the targets come first."""

    def counted(outputs: Any, targets: Any) -> Any:
        loss = loss_of(outputs, targets)
        if targets.requires_grad and not outputs.requires_grad:
            turned.append(1)
        if loss.requires_grad:
            kept.append(kept[-1] + 1)
            loss.register_hook(lambda gradient: kept.append(kept[-1] - 1))
        return loss

    return counted


def _recorder() -> record.Recorder:
    """This worker's own."""
    from IPython.core.getipython import get_ipython

    found: record.Recorder = get_ipython().kernel.recorder
    return found
