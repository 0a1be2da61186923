"""A rank's part of lesson 04's check: a learner's all-reduce on the first few ranks, and the data that it sent.

What is sent is seen at torch's ProcessGroup, below all the ways
to import its functions.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

from nbddp.deadlock.on_rank.call_log import COLLECTIVES
from nbddp.lessons.framework.async_work import Misused
from nbddp.lessons.framework.plain_values import plain
from nbddp.lessons.framework.worlds import STANDS, world_of

BASE = 16  # a rank's part is BASE ** rank: the digits of a sum say how often each part is in it
ANY = "recv_anysource"  # recv without a sender
MESSAGES = ("send", "recv", ANY)
GROUP_CALLS = ("init_process_group", "destroy_process_group")
NEIGHBOURS = (
    "the neighbours are (rank + 1) % world_size and (rank - 1) % world_size, with world_size from dist.get_world_size()"
)
DROPPED = (
    "a send ends when its Work object is deleted: write work = dist.isend(chunk, right), then recv, then wait for "
    "the send with work.wait()"
)


class Heard(TypedDict):
    """What a process sends: for each message its receiver and how many numbers, and the names of other calls."""

    sent: list[tuple[int, int]]
    dtypes: list[list[str]]  # of what is sent, and of what is received
    collectives: list[str]


class RingSum(Heard):
    """What the learner's function gives; `Heard` is of the first of two runs."""

    digits: Any  # the answer where every number of rank r is BASE ** r
    numbers: Any  # the answer for `given[r]`


def all_reduced(function: Callable[..., Any], given: Sequence[Sequence[float]]) -> RingSum | None:
    """What `function` made of tensors of equal length on the first ranks, one for each of `given`; None on the others.
    Raises Misused."""
    import torch
    import torch.distributed as dist

    with world_of(len(given)) as mine:
        if not mine:
            return None
        rank = dist.get_rank()
        with listening() as heard:
            digits = _called(function, torch.full((len(given[rank]),), float(BASE**rank)))
        return {"digits": digits, "numbers": _called(function, torch.tensor(given[rank])), **heard}


def _called(function: Callable[..., Any], tensor: Any) -> Any:
    with left_standing():
        return plain(function(tensor))


@contextmanager
def left_standing() -> Iterator[None]:
    """The process group can be neither made nor ended while the block lasts: Misused reports it."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    def refuse(name: str) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            raise Misused(f"remove {name}(): {STANDS}")

        return refused

    originals = [(owner, name, getattr(owner, name)) for owner in (dist, c10d) for name in GROUP_CALLS]
    for owner, name, _ in originals:
        setattr(owner, name, refuse(name))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _there(peer: int, rank: int, size: int, neighbours: str) -> None:
    """Raises Misused for a peer that a rank cannot have. gloo does not ask: the process aborts, or waits for ever."""
    if peer != rank and 0 <= peer < size:
        return
    what = "the rank itself" if peer == rank else "a rank that does not exist"
    raise Misused(f"a send or recv names {what}; the ranks are 0 to {size - 1}, and {neighbours}")


def _not_empty(tensors: list[Any]) -> None:
    if not all(t.numel() for t in tensors):
        raise Misused("gloo cannot receive an empty tensor from any source; name the sender: dist.recv(buffer, left)")


@contextmanager
def listening(neighbours: str = NEIGHBOURS) -> Iterator[Heard]:
    """What this process sends while the block lasts.

    neighbours: what to say of them to who names a rank that is not there.
    """
    import torch.distributed as dist

    heard: Heard = {"sent": [], "collectives": [], "dtypes": [[], []]}
    kind, sends = dist.ProcessGroup, Sends()
    # as they stand in the class; getattr would unbind them
    originals = {n: vars(kind)[n] for n in (*COLLECTIVES, *MESSAGES) if n in vars(kind) and n != "barrier"}
    for name in originals:
        setattr(kind, name, _listened(name, getattr(kind, name), heard, sends, neighbours))
    try:
        with sends.seen_to_end():
            yield heard
        sends.refuse_dropped()
    finally:
        for name, original in originals.items():
            setattr(kind, name, original)


def _listened(
    name: str, original: Callable[..., Any], heard: Heard, sends: Sends, neighbours: str
) -> Callable[..., Any]:
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()

    @functools.wraps(original)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        sends.refuse_dropped()
        if name == ANY:
            _not_empty(args[0])
        elif name in MESSAGES:
            _there(args[1], rank, size, neighbours)
            heard["dtypes"][name == "recv"] += [str(t.dtype).removeprefix("torch.") for t in args[0]]
        if name == "send":
            heard["sent"].append((args[1], sum(t.numel() for t in args[0])))
        elif name in COLLECTIVES:
            heard["collectives"].append(COLLECTIVES[name][0])
        work = original(group, *args, **kwargs)
        if name == "send":
            sends.watch(work)
        return work

    return call


class Sends:
    """Sends whose `Work` is kept, and whether one was dropped before it was seen to end: gloo gives that send up."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        self._dropped = 0

    def watch(self, work: Any) -> None:
        self._kept[id(work)] = weakref.finalize(work, self._drop, id(work))

    def _drop(self, number: int) -> None:
        self._kept.pop(number, None)
        self._dropped += 1

    def refuse_dropped(self) -> None:
        if self._dropped:
            raise Misused(DROPPED)

    @contextmanager
    def seen_to_end(self) -> Iterator[None]:
        """While the block lasts, a Work that was waited for, or that says it has completed, may be dropped."""
        import torch.distributed as dist

        def ending(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def call(work: Any, *args: Any, **kwargs: Any) -> Any:
                ended = original(work, *args, **kwargs)
                if ended and id(work) in self._kept:
                    self._kept.pop(id(work)).detach()
                return ended

            return call

        originals = {name: vars(dist.Work)[name] for name in ("wait", "is_completed")}
        for name in originals:
            setattr(dist.Work, name, ending(getattr(dist.Work, name)))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(dist.Work, name, original)
