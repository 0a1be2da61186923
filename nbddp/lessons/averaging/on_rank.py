"""What a rank does for lesson 05's checks: a backward on its own shard, with the learner's averaging.

Twice: once from parameters that are equal on all ranks, for two steps, beside one process that has the union of all
shards; once from parameters that differ from rank to rank, where an averaging that touches parameters instead of
gradients shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SHARD = 4  # samples of each rank
RATE = 0.5  # learning rate between the two steps
COMMON = 7  # seed of the data, and of the equal start


def averaged(function: Callable[..., Any], hooks: bool) -> dict[str, Any]:
    """What `function(model)` makes of the gradients; called after backward, or with `hooks` once before.

    "steps" has for each of two steps, by the parameter's name and flat, the gradients "yours"; "apart" the same of one
    backward from different parameters, and those "after". {"unwritten": True} if the function raises
    NotImplementedError.
    """
    try:
        return _both(lambda: _steps(function, hooks, _model()), lambda: _apart(function, hooks, _model()))
    except NotImplementedError:
        return {"unwritten": True}


def expected() -> dict[str, Any]:
    """What is right: as `averaged`, with the gradients "own" (this rank's, before any exchange) and "reference" (one
    process, all shards) of each step, and "own" and the parameters "before" of the one from different parameters."""
    return _both(lambda: _right_steps(_model()), lambda: _own_apart(_model()))


def _both(equal: Callable[[], Any], different: Callable[[], Any]) -> dict[str, Any]:
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


def _data() -> tuple[Any, Any, slice]:
    """All inputs and targets, the same on every rank, and where this rank's shard is: every rank-th sample."""
    import torch
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    common = torch.Generator().manual_seed(COMMON)
    x = torch.randn(SHARD * world_size, 3, generator=common)
    y = x.sum(1, keepdim=True) + torch.randn(len(x), 1, generator=common)
    return x, y, slice(rank, None, world_size)


def _steps(function: Callable[..., Any], hooks: bool, model: Any) -> list[dict[str, Any]]:
    import torch

    x, y, mine = _data()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    if hooks:
        function(model)
    steps = []
    for _ in range(2):
        optimizer.zero_grad()
        _backward(model, x[mine], y[mine])
        if not hooks:
            function(model)
        steps.append({"yours": _gradients(model)})
        optimizer.step()
    return steps


def _right_steps(model: Any) -> list[dict[str, Any]]:
    import torch

    x, y, mine = _data()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    steps = []
    for _ in range(2):
        own = _own(model, x[mine], y[mine])
        optimizer.zero_grad()
        _backward(model, x, y)
        steps.append({"own": own, "reference": _gradients(model)})
        optimizer.step()
    return steps


def _apart(function: Callable[..., Any], hooks: bool, model: Any) -> dict[str, Any]:
    x, y, mine = _data()
    if hooks:
        function(model)
    _backward(model, x[mine], y[mine])
    if not hooks:
        function(model)
    return {"yours": _gradients(model), "after": _parameters(model)}


def _own_apart(model: Any) -> dict[str, Any]:
    x, y, mine = _data()
    return {"own": _own(model, x[mine], y[mine]), "before": _parameters(model)}


def _own(model: Any, x: Any, y: Any) -> dict[str, list[float] | None]:
    """The gradients of this rank alone, by a model without hooks."""
    twin = _model()
    twin.load_state_dict(model.state_dict())
    _backward(twin, x, y)
    return _gradients(twin)


def _backward(model: Any, x: Any, y: Any) -> None:
    from torch.nn.functional import mse_loss

    mse_loss(model(x), y).backward()


def _gradients(model: Any) -> dict[str, list[float] | None]:
    return {n: None if p.grad is None else p.grad.flatten().tolist() for n, p in model.named_parameters()}


def _parameters(model: Any) -> dict[str, list[float]]:
    return {n: p.detach().flatten().tolist() for n, p in model.named_parameters()}
