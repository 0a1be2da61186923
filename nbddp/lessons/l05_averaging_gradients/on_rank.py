"""A rank's part of lesson 05's checks: a backward on its own shard, with the learner's averaging.

Twice: once from parameters that are equal on all ranks, for two steps, beside one process that has the union of all
shards; once from parameters that differ from rank to rank, where an averaging that touches parameters instead of
gradients shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from nbddp.lessons.framework.async_work import waited
from nbddp.lessons.framework.on_rank import all_gradients, gradients

SHARD = 4  # samples of each rank
RATE = 0.5  # learning rate between the two steps
COMMON = 7  # seed of the data, and of the equal start
Known = dict[str, list[float]]  # by the parameter's name, flat
Layers = Mapping[str, list[float] | None]  # one may be missing


class Gradients(TypedDict, total=False):
    """Of one backward. `averaged` brings `yours` and `after`, `expected` the others."""

    yours: Layers
    own: Known  # this rank's, before any exchange
    reference: Known  # one process's, which has all shards
    before: Known  # parameters, if they differ from rank to rank
    after: Layers


class Brought(TypedDict, total=False):
    """unwritten: the function raises NotImplementedError; nothing else is there."""

    steps: list[Gradients]
    apart: Gradients  # from different parameters
    unwritten: bool


def averaged(function: Callable[..., Any], hooks: bool) -> Brought:
    """What `function(model)` makes of the gradients; called after backward, or with `hooks` once before."""
    try:
        with waited():
            return _both(lambda: _steps(function, hooks, _model()), lambda: _apart(function, hooks, _model()))
    except NotImplementedError:
        return {"unwritten": True}


def expected() -> list[Brought | None]:
    """What is right in a world of all ranks, and in one without the last; None for a world without this rank."""
    import torch.distributed as dist

    rank, whole = dist.get_rank(), dist.get_world_size()
    return [_expected(rank, size) if rank < size else None for size in (whole, whole - 1)]


def _expected(rank: int, size: int) -> Brought:
    return _both(lambda: _right_steps(_model(), rank, size), lambda: _own_apart(_model(), rank, size))


def _both(equal: Callable[[], list[Gradients]], different: Callable[[], Gradients]) -> Brought:
    """From parameters that are equal on all ranks, and from different ones."""
    import torch

    own_seed = torch.initial_seed()
    torch.manual_seed(COMMON)
    steps = equal()
    torch.manual_seed(own_seed)
    return {"steps": steps, "apart": different()}


def _model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def _place() -> tuple[int, int]:
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size()


def _data(rank: int, world_size: int) -> tuple[Any, Any, slice]:
    """All inputs and targets, the same on every rank, and where a rank's shard is: every world_size-th sample."""
    import torch

    common = torch.Generator().manual_seed(COMMON)
    x = torch.randn(SHARD * world_size, 3, generator=common)
    y = x.sum(1, keepdim=True) + torch.randn(len(x), 1, generator=common)
    return x, y, slice(rank, None, world_size)


def _steps(function: Callable[..., Any], hooks: bool, model: Any) -> list[Gradients]:
    import torch

    x, y, mine = _data(*_place())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    if hooks:
        function(model)
    steps: list[Gradients] = []
    for _ in range(2):
        optimizer.zero_grad()
        _backward(model, x[mine], y[mine])
        if not hooks:
            function(model)
        steps.append({"yours": gradients(model)})
        optimizer.step()
    return steps


def _right_steps(model: Any, rank: int, size: int) -> list[Gradients]:
    import torch

    x, y, mine = _data(rank, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    steps: list[Gradients] = []
    for _ in range(2):
        own = _own(model, x[mine], y[mine])
        optimizer.zero_grad()
        _backward(model, x, y)
        steps.append({"own": own, "reference": all_gradients(model)})
        optimizer.step()
    return steps


def _apart(function: Callable[..., Any], hooks: bool, model: Any) -> Gradients:
    x, y, mine = _data(*_place())
    if hooks:
        function(model)
    _backward(model, x[mine], y[mine])
    if not hooks:
        function(model)
    return {"yours": gradients(model), "after": _parameters(model)}


def _own_apart(model: Any, rank: int, size: int) -> Gradients:
    x, y, mine = _data(rank, size)
    return {"own": _own(model, x[mine], y[mine]), "before": _parameters(model)}


def _own(model: Any, x: Any, y: Any) -> Known:
    """The gradients of this rank alone, by a model without hooks."""
    twin = _model()
    twin.load_state_dict(model.state_dict())
    _backward(twin, x, y)
    return all_gradients(twin)


def _backward(model: Any, x: Any, y: Any) -> None:
    from torch.nn.functional import mse_loss

    mse_loss(model(x), y).backward()


def _parameters(model: Any) -> Known:
    return {n: p.detach().flatten().tolist() for n, p in model.named_parameters()}
