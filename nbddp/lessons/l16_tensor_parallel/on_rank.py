"""What lesson 16's check has a rank do: two linear layers of which each rank has a part, forward and backward.

Imports torch only inside functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from nbddp.lessons.framework.async_work import waited
from nbddp.protocol.plain_values import plain

SAMPLES, FEATURES, HIDDEN = 3, 4, 12  # HIDDEN: 2, 3 and 4 ranks divide it
PARTS = ("x", "up", "down")


def computed(function: Callable[..., Any]) -> dict[str, Any]:
    """What `function(x, up, down)` gives on this rank, and the gradients of sum(weights × output), as plain data.

    A dict of `output`, which is no tensor's data if none was returned, and `shape`; `x`, `up` and `down`: their
    gradients, None where there is none; and `graph`, whether the output can go backward.
    """
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
    gradients = {name: None if t.grad is None else plain(t.grad) for name, t in given.items()}
    shape = list(y.shape) if isinstance(y, torch.Tensor) else None
    return {"output": plain(y.detach() if right else y), "shape": shape, "graph": graph, **gradients}


def expected() -> dict[str, Any]:
    """The same in one process, with whole weights."""
    x, up, down, weights = (t.requires_grad_() for t in _whole())
    y = (x @ up.T).relu() @ down.T
    (y * weights).sum().backward()
    return {"output": plain(y.detach()), **{n: plain(t.grad) for n, t in zip(PARTS, (x, up, down), strict=True)}}


def _whole() -> tuple[Any, Any, Any, Any]:
    import torch

    chance = torch.Generator().manual_seed(16)
    shapes = ((SAMPLES, FEATURES), (HIDDEN, FEATURES), (FEATURES, HIDDEN), (SAMPLES, FEATURES))
    return tuple(torch.randn(s, generator=chance) for s in shapes)
