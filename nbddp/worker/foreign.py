"""Libraries that would start ranks of their own in a cell, which is already run by every rank: they are told so.

Lightning's and Fabric's launchers for notebooks (`ddp_notebook`, `ddp_spawn`, `ddp_fork`) start all ranks anew in each
rank, which then meet under numbers that are taken, and hang.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

LAUNCHERS = ("lightning", "pytorch_lightning", "lightning_fabric")
SAYS = (
    'this cell already runs on every rank, and this strategy starts ranks of its own; use strategy="ddp" with as many '
    "devices as there are ranks on a node"
)


def install() -> None:
    """Refuse their processes; once, when the worker starts."""
    import torch.multiprocessing

    torch.multiprocessing.start_processes = _refusing(torch.multiprocessing.start_processes)


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start_processes(*args: Any, **kwargs: Any) -> Any:
        by = sys._getframe(1).f_globals.get("__name__", "")
        if by.partition(".")[0] in LAUNCHERS:
            raise RuntimeError(SAYS)
        return original(*args, **kwargs)

    return start_processes
