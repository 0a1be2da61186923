"""A rank's part of lesson 09's check: it trains a small model by the learner's function on its own batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Batch = tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]  # inputs (samples, features), targets (samples, 1)


def trained(
    train: Callable[..., Any], shards: Sequence[Sequence[Batch]], start: Sequence[float], lr: float
) -> list[float]:
    """Parameters after `train(model, optimizer, batches)`: weights, then the bias. In a process group.

    model: DDP around a linear layer in float64 that begins at `start`. shards: the batches of each rank.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    layer = torch.nn.Linear(len(start) - 1, 1, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([list(start[:-1])], dtype=torch.float64))
        layer.bias.copy_(torch.tensor([start[-1]], dtype=torch.float64))
    model = DDP(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr)
    batches = [
        (torch.tensor(inputs, dtype=torch.float64), torch.tensor(targets, dtype=torch.float64))
        for inputs, targets in shards[dist.get_rank()]
    ]
    train(model, optimizer, batches)
    return [float(v) for p in (layer.weight, layer.bias) for v in p.detach().flatten()]
