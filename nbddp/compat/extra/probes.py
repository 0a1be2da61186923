"""How a private API is tried: what a trial says, a group to try it on, and which names are missing.

The private names themselves are in `compat.torch`, `compat.ipykernel` and `compat.ipyparallel`. `%ddp doctor` tries
each one (`capabilities.doctor`). Pure: no torch, no IPython.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Failed(Exception):
    """A trial did not give what it should have; the text says what came instead."""


class Untried(Exception):
    """A private API cannot be tested here, or is not needed; the text says why."""


def expect(condition: object, otherwise: str) -> None:
    """Raises Failed(otherwise) if the condition is not true. A trial is no `assert`: `python -O` leaves those out."""
    if not condition:
        raise Failed(otherwise)


@contextmanager
def alone() -> Iterator[tuple[Any, Any]]:
    """A default process group of one rank, without a network: torch.distributed, and a tensor for its collectives.

    The tensor survives the group. To drop one that Python knows, gloo's thread wants the interpreter, and torch 2.6
    holds that while it waits for the thread.
    """
    import torch
    import torch.distributed as dist

    one = torch.ones(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist, one
    finally:
        dist.destroy_process_group()


def holder(name: str) -> tuple[Any, str]:
    """`module:Class.attribute` → the object that has, or should have, the attribute, and the attribute's name."""
    module, path = name.split(":")
    *owners, last = path.split(".")
    found: Any = importlib.import_module(module)
    for owner in owners:
        found = getattr(found, owner)
    return found, last


def absent(names: Sequence[str]) -> str:
    """The first of these `module:attribute` that is missing, as `module has no attribute`; empty if all are there."""
    for name in names:
        try:
            owner, last = holder(name)
        except (ImportError, AttributeError) as e:
            return str(e)
        if not hasattr(owner, last):
            return f"{name[: -len(last) - 1]} has no {last}".replace(":", ".")
    return ""
