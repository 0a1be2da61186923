"""A rank's part of lesson 14's checks: it takes steps with a learner's function, and clips gradients with it.

Imports torch only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

from nbddp.lessons.framework.async_work import waited
from nbddp.lessons.framework.plain_values import plain
from nbddp.lessons.l14_precision.plan import (
    MOMENTUM,
    RATE,
    REPLICATED,
    SHARDED,
    STEPS,
    finders,
    gradients_of,
    groups,
    layouts,
    parameters_of,
    shard,
)

_groups: dict[int, list[Any]] = {}  # shards → the groups of the ranks that hold one copy


class Stepped(TypedDict):
    before: list[float]  # all parameters, flat
    after: list[float]
    returned: Any


class Clipped(TypedDict):
    gradients: list[list[float] | None]  # of the sharded parameters and of the replicated one
    parameter: bool  # whether one changed
    returned: Any


def stepped(function: Callable[..., Any]) -> list[Stepped]:
    """What `function(optimizer, scale)` does in each of STEPS."""
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    parameters = [torch.nn.Parameter(torch.tensor(p)) for p in parameters_of(rank)]
    unused = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*parameters, unused], lr=RATE, momentum=MOMENTUM)
    found: list[Stepped] = []
    for step, (scale, who, which, value) in enumerate(STEPS):
        for p, gradient in zip(parameters, gradients_of(rank, step), strict=True):
            p.grad = torch.tensor(gradient) * scale
        if rank in finders(who, world):
            gradient = parameters[which].grad
            assert gradient is not None
            gradient[-1] = value
        before = _flat(parameters)
        with waited():
            returned = function(optimizer, scale)
        found.append({"before": before, "after": _flat(parameters), "returned": _number(returned)})
    return found


def _flat(parameters: list[Any]) -> list[float]:
    return [x for p in parameters for x in p.detach().tolist()]


def _number(value: Any) -> Any:
    """A tensor of one number as that number."""
    import torch

    return plain(value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value)


def make_groups() -> None:
    """Make the groups of all layouts. All ranks call it, in a run of its own. A function that fails at once on one rank
    would cut off another that still connects."""
    import torch.distributed as dist

    world = dist.get_world_size()
    for _, shards in layouts(world):
        _groups[shards] = [dist.new_group(ranks) for ranks in groups(world, shards)]


def end_groups() -> None:
    """End them, those that a failed run has not ended already."""
    import torch.distributed as dist

    from nbddp.compat import torch as torch_compat

    for made in _groups.values():
        for group in made:
            if isinstance(group, dist.ProcessGroup) and group in torch_compat.world().pg_map:
                dist.destroy_process_group(group)
    _groups.clear()


def clipped(function: Callable[..., Any], layout: int, limit: float) -> Clipped:
    """What `function(sharded, replicated, max_norm, shard_group)` makes of the gradients on a mesh of `layouts`."""
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    _, shards = layouts(world)[layout]
    own = [shard(values, shards, rank % shards) for values in SHARDED]
    sharded = [_with_gradient(values) for values in own]
    unused = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    copied = _with_gradient(list(REPLICATED))
    group = _groups[shards][rank // shards]
    with torch.no_grad(), waited():
        returned = function([*sharded, unused[0]], [copied, unused[1]], limit, group)
    both = [*sharded, copied]
    return {
        "gradients": [None if p.grad is None else p.grad.tolist() for p in both],
        "parameter": any(bool((p != 1).any()) for p in (*both, *unused)),
        "returned": _number(returned),
    }


def _with_gradient(values: list[float]) -> Any:
    import torch

    made = torch.nn.Parameter(torch.ones(len(values), dtype=torch.float64))
    made.grad = torch.tensor(values, dtype=torch.float64)
    return made
