"""A world of only the first ranks of a pool: a function that was written for one world size shows itself on another.

The first `size` ranks get a default process group of their own, and a group that a cell has left is put back.
Imports torch only inside what needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nbddp.compat import torch
from nbddp.lessons.framework.async_work import Misused
from nbddp.lessons.framework.on_rank import seeded

STANDS = "the check has created the process group and still needs it"


_worlds: dict[int, Any] = {}  # size → the group of the first ranks; a run that fails ends them all


def make_world(size: int) -> None:
    """Make the group of the first `size` ranks, unless it is there. All ranks call it, in a run of its own. A function
    that fails at once on one rank would cut off another that still connects, and torch prints errors about that."""
    import torch.distributed as dist

    if size not in _worlds:
        _worlds[size] = dist.new_group(list(range(size)))


def end_worlds() -> None:
    """End the groups that `world_of` has made. Not done there: a rank that ends first would cut off a neighbour that
    still waits for it. That one would see a broken connection instead of a deadlock."""
    import torch.distributed as dist

    for group in _worlds.values():
        if group in torch.world().pg_map:
            dist.destroy_process_group(group)
    _worlds.clear()


@contextmanager
def world_of(size: int) -> Iterator[bool]:
    """The first `size` ranks as the default process group of each of them; whether this rank is one. All call it."""
    import torch.distributed as dist

    whole, rank = torch.default_group(), dist.get_rank()
    make_world(size)
    if rank >= size:
        yield False
        return
    torch.set_default_group(_worlds[size])
    try:
        yield True
    finally:
        stands = whole in torch.world().pg_map
        torch.set_default_group(whole if stands else None)
        if not stands:  # the function has ended it, or made another: nothing of it may come back
            _worlds.clear()
    if not stands:
        raise Misused(STANDS)


def within(size: int, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """`function(*args)`, seeded, in a world of the first `size` ranks; None on the others. All ranks call it."""
    with world_of(size) as mine:
        return seeded(function, *args) if mine else None
