"""Ranks that share a GPU (`--oversubscribe`): NCCL takes one rank per GPU, from version 2.30 on more if it is told to.

So a default group is gloo's there, which works on CUDA tensors, or NCCL's where that allows it; and who asks for an
older NCCL by name gets a sentence at once, where NCCL would say "Duplicate GPU detected" in the first collective.
"""

from __future__ import annotations

import os
from typing import Any

ALLOWS, ALLOW = (2, 30), "NCCL_MULTI_RANK_GPU_ENABLE"
GLOO = "cpu:gloo,cuda:gloo"


def nccl_version() -> tuple[int, ...]:
    """Of the NCCL that this torch was built with; empty where it was built without."""
    import torch

    try:
        found: Any = torch.cuda.nccl.version()
    except (AttributeError, RuntimeError):
        return ()
    return tuple(found) if isinstance(found, tuple) else ()


def backend(asked: str | None, version: tuple[int, ...]) -> str | None:
    """The backend of a group whose ranks share GPUs. Raises RuntimeError for one that would refuse them."""
    if version >= ALLOWS and os.environ.get(ALLOW, "1") != "0":
        os.environ[ALLOW] = "1"
        return asked
    if not asked:
        return GLOO
    if "nccl" not in asked.lower():
        return asked
    which = "NCCL " + ".".join(map(str, version)) if version else "NCCL"
    raise RuntimeError(
        f"ranks share a GPU here (--oversubscribe), but {which} does not allow that: call init_process_group() "
        "without a backend, which takes gloo and works on CUDA tensors, or start as many ranks as there are GPUs"
    )
