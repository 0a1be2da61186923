"""A rank's part of lesson 07's checks: a learner's statistics and batch norm of its shard, forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from nbddp.lessons.framework.async_work import waited
from nbddp.lessons.framework.plain_values import plain

Rows = Sequence[Sequence[float]]  # samples × features


def statistics(function: Callable[..., Any], shards: Sequence[Rows]) -> Any:
    """What `function(x)` gives for this rank's shard, as plain data."""
    with waited():
        return plain(function(_own(shards)))


def normalised(
    function: Callable[..., Any], shards: Sequence[Rows], weights: Sequence[Rows], eps: float
) -> tuple[Any, Any]:
    """`function(x, eps)` for this rank's shard and the gradient of sum(weights × output) with respect to x.

    Both as plain data; the gradient is None if the output is no tensor of the shape of x, and "none" if it has no
    gradient.
    """
    import torch

    x = _own(shards).requires_grad_()
    y = function(x, eps)
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return plain(y), None
    if not y.requires_grad:
        return plain(y), "none"
    with warnings.catch_warnings():
        # Of a collective that autograd does not know; the check says which gradient is lost by it, and on which rank.
        warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered")
        (y * _own(weights)).sum().backward()
    return plain(y.detach()), "none" if x.grad is None else plain(x.grad)


def _own(shards: Sequence[Rows]) -> Any:
    """This rank's shard as a float32 tensor of shape (samples, features)."""
    import torch
    import torch.distributed as dist

    return torch.tensor(shards[dist.get_rank()], dtype=torch.float32)
