"""What a rank does for lesson 04's check: an all-reduce of the learner's on the first few ranks, and what it sent.

The first `size` ranks of the pool get a default process group of their own for it, so that the function sees a world of
that size; a group that a cell has left is put back. What is sent is seen at torch's ProcessGroup, below all the ways
to import its functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nbddp.worker.check import COLLECTIVES
from nbddp.worker.exercise import in_group, plain

BASE = 16  # a rank's part is BASE ** rank: the digits of a sum say how often each part is in it
LARGEST = 50  # of the random whole numbers; float32 holds their sums exactly


def all_reduced(function: Callable[..., Any], size: int, length: int) -> dict[str, Any] | None:
    """What `function` made of tensors of `length` numbers on the first `size` ranks; None on the others.

    "digits" is its answer where every number of rank r is BASE ** r, "numbers" its answer for random whole numbers
    that differ from rank to rank, "given" are those; "sent" has a pair (receiver, count of numbers) for each
    message of the first of the two runs, and "collectives" the names of other calls in it.
    """
    enter()
    return in_group(_on_the_first, function, size, length)  # type: ignore[no-any-return]


def leave() -> None:
    """End the groups that `all_reduced` has made. Not done there: a rank that ends first would cut off a neighbour that
    still waits for it, which then sees a broken connection instead of a deadlock."""
    import torch.distributed as dist

    if _made.whole and dist.is_initialized():
        dist.destroy_process_group()
    elif dist.is_initialized():
        for group in _made.some.values():
            dist.destroy_process_group(group)
    _made.whole, _made.some = False, {}


@dataclass
class _Made:
    """Whether the default group is ours, and the smaller groups by their size. A run that fails ends them all."""

    whole: bool = False
    some: dict[int, Any] = field(default_factory=dict)


_made = _Made()


def enter() -> None:
    """Make the default group if there is none; `leave` ends it."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group()
        _made.whole, _made.some = True, {}


def _on_the_first(function: Callable[..., Any], size: int, length: int) -> dict[str, Any] | None:
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
    if size not in _made.some:
        _made.some[size] = dist.new_group(list(range(size)))
    if rank >= size:
        yield False
        return
    c10d._update_default_pg(_made.some[size])
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
