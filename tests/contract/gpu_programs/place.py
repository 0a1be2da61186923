"""Where a rank of `ranks.py` computes: on its GPU, or on the CPU."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

KIND = sys.argv[1] if len(sys.argv) > 1 else "cpu"
ON_GPUS = KIND == "cuda"


def device() -> Any:
    return torch.device(KIND, dist.get_rank()) if ON_GPUS else torch.device(KIND)


def weights(module: Any) -> float:
    """A number in which each digit of the parameters counts."""
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return float(sum(p.detach().double().sum().item() for p in full))
