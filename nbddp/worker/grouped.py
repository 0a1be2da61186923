"""A learner's function in a process group that outlives it, so that a rank that ends too early shows as a deadlock.

If each rank ended the group when it is done, a rank that still waits in a collective would see its connection reset,
and be told of sockets where the news is that another rank did not make the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbddp.worker.exercise import in_group


def staying(function: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    """Whether a group was made for this call, which `leave` must end, and `function(*args)` as `in_group` runs it."""
    import torch.distributed as dist

    own = not dist.is_initialized()
    if own:
        dist.init_process_group()
    return own, in_group(function, *args)


def leave() -> None:
    """End the default group."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
