"""What a rank does for lesson 04's check: an all-reduce of the learner's on the first few ranks, and what it sent.

The first `size` ranks of the pool get a default process group of their own for it, so that the function sees a world of
that size; a group that a cell has left is put back. What is sent is seen at torch's ProcessGroup, below all the ways
to import its functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nbddp.worker.check import COLLECTIVES
from nbddp.worker.exercise import plain

BASE = 16  # a rank's part is BASE ** rank: the digits of a sum say how often each part is in it
LARGEST = 50  # of the random whole numbers; float32 holds their sums exactly


def all_reduced(function: Callable[..., Any], size: int, length: int) -> dict[str, Any] | None:
    """What `function` made of tensors of `length` numbers on the first `size` ranks; None on the others.

    "digits" is its answer where every number of rank r is BASE ** r, "numbers" its answer for random whole numbers
    that differ from rank to rank, "given" are those; "sent" has a pair (receiver, count of numbers) for each
    message of the first of the two runs, and "collectives" the names of other calls in it.
    """
    import torch
    import torch.distributed as dist

    with world_of(size) as mine:
        if not mine:
            return None
        rank = dist.get_rank()
        with listening() as heard:
            digits = _called(function, torch.full((length,), float(BASE**rank)))
        given = torch.randint(-LARGEST, LARGEST, (length,)).float()
        numbers = _called(function, given.clone())
        return {"digits": digits, "numbers": numbers, "given": given.tolist(), **heard}


_worlds: dict[int, Any] = {}  # size → the group of the first ranks; a run that fails ends them all


def end_worlds() -> None:
    """End the groups that `world_of` has made. Not done there: a rank that ends first would cut off a neighbour that
    still waits for it, which then sees a broken connection instead of a deadlock."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    for group in _worlds.values():
        if group in c10d._world.pg_map:
            dist.destroy_process_group(group)
    _worlds.clear()


def _called(function: Callable[..., Any], tensor: Any) -> Any:
    try:
        return plain(function(tensor))
    except NotImplementedError:
        return None


@contextmanager
def world_of(size: int) -> Iterator[bool]:
    """The first `size` ranks as the default process group of each of them; whether this rank is one. All call it."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    whole, rank = c10d._get_default_group(), dist.get_rank()
    if size not in _worlds:
        _worlds[size] = dist.new_group(list(range(size)))
    if rank >= size:
        yield False
        return
    c10d._update_default_pg(_worlds[size])
    try:
        yield True
    finally:
        c10d._update_default_pg(whole)


@contextmanager
def listening() -> Iterator[dict[str, list[Any]]]:
    """What this process sends while the block lasts: {"sent": [(receiver, count), ...], "collectives": [name, ...]}."""
    import torch.distributed as dist

    heard: dict[str, list[Any]] = {"sent": [], "collectives": []}

    def listened(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if name == "send":
                heard["sent"].append((args[1], sum(t.numel() for t in args[0])))
            else:
                heard["collectives"].append(COLLECTIVES[name][0])
            return original(group, *args, **kwargs)

        return call

    kind = dist.ProcessGroup
    # as they stand in the class; getattr would unbind them
    originals = {n: vars(kind)[n] for n in (*COLLECTIVES, "send") if n in vars(kind) and n != "barrier"}
    for name in originals:
        setattr(kind, name, listened(name, getattr(kind, name)))
    try:
        yield heard
    finally:
        for name, original in originals.items():
            setattr(kind, name, original)
