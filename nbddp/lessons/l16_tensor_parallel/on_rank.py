"""A rank's part of lesson 16's check: two linear layers of which each rank has a part, forward and backward.

Imports torch only inside functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, TypedDict

from nbddp.lessons.framework.async_work import waited
from nbddp.lessons.framework.plain_values import plain

SAMPLES, FEATURES, HIDDEN = 3, 4, 12  # HIDDEN: 2, 3 and 4 ranks divide it
Name = Literal["x", "up", "down"]
PARTS: tuple[Name, ...] = ("x", "up", "down")
Rows = list[list[float]]


class Computed(TypedDict):
    output: Any  # no tensor's data if none was returned
    shape: list[int] | None
    graph: bool  # whether the output can go backward
    x: Rows | None  # gradients
    up: Rows | None
    down: Rows | None


class Gradients(TypedDict):
    x: Rows
    up: Rows
    down: Rows


class Expected(Gradients):
    output: Rows


def computed(function: Callable[..., Any]) -> Computed:
    """What `function(x, up, down)` gives on this rank, and the gradients of sum(weights × output)."""
    import torch
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, up, down, weights = _whole()
    given = {"x": x, "up": up.chunk(world_size)[rank], "down": down.chunk(world_size, 1)[rank]}
    given = {name: t.clone().requires_grad_() for name, t in given.items()}
    with waited(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered")
        warnings.filterwarnings("ignore", category=FutureWarning)
        y = function(*given.values())
        right = isinstance(y, torch.Tensor) and y.shape == weights.shape
        graph = bool(right and y.requires_grad)
        if graph:
            (y * weights).sum().backward()
    of_x, of_up, of_down = (None if t.grad is None else plain(t.grad) for t in given.values())
    shape = list(y.shape) if isinstance(y, torch.Tensor) else None
    output = plain(y.detach() if right else y)
    return {"output": output, "shape": shape, "graph": graph, "x": of_x, "up": of_up, "down": of_down}


def expected() -> Expected:
    """The same in one process, with whole weights."""
    x, up, down, weights = (t.requires_grad_() for t in _whole())
    y = (x @ up.T).relu() @ down.T
    (y * weights).sum().backward()
    return {"output": plain(y.detach()), "x": plain(x.grad), "up": plain(up.grad), "down": plain(down.grad)}


def _whole() -> tuple[Any, Any, Any, Any]:
    import torch

    chance = torch.Generator().manual_seed(16)
    shapes = ((SAMPLES, FEATURES), (HIDDEN, FEATURES), (FEATURES, HIDDEN), (SAMPLES, FEATURES))
    return tuple(torch.randn(s, generator=chance) for s in shapes)
