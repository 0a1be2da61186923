"""Whether a learner's function waits for the collectives that it starts with async_op=True.

One that does not answers by chance: right in one run, wrong in the next. Seen at torch's ProcessGroup, below all the
ways to import its functions. Imports torch only inside what needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nbddp.deadlock.on_rank.call_log import COLLECTIVES

ENDINGS = ("wait", "get_future", "is_completed")  # of a Work: who calls one of them knows of the wait


class Misused(Exception):
    """What a learner's function asked of the process group and cannot have. The text is for the learner; it is the same
    on whichever rank it is raised first."""


class StartedCollectives:
    """Collectives that were started and not yet waited for, and their names."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[Any, str]] = {}  # a Work is kept, so that no other one gets its id

    def begin(self, work: Any, name: str) -> None:
        self._pending[id(work)] = (work, name)

    def end(self, work: Any) -> None:
        self._pending.pop(id(work), None)

    def refuse_unfinished(self) -> None:
        """Raises Misused if a collective was never waited for."""
        for _, name in self._pending.values():
            raise Misused(f"{name} was started with async_op=True and nothing waits for it: {BY_CHANCE}")


BY_CHANCE = "the answer differs from run to run; write work = dist.…(…, async_op=True), then work.wait(), then go on"


@contextmanager
def waited() -> Iterator[None]:
    """Raises Misused at the end of the block if a collective was started in it and never waited for."""
    import torch.distributed as dist

    started = StartedCollectives()

    def listened(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(group, *args, **kwargs)
            if isinstance(work, dist.Work):
                started.begin(work, COLLECTIVES[name][0])
            return work

        return call

    def ending(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(work: Any, *args: Any, **kwargs: Any) -> Any:
            started.end(work)
            return original(work, *args, **kwargs)

        return call

    group = dist.ProcessGroup
    patched = [(group, n, listened(n, getattr(group, n))) for n in COLLECTIVES if n in vars(group) and n != "barrier"]
    patched += [(dist.Work, n, ending(getattr(dist.Work, n))) for n in ENDINGS]
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in patched]
    for owner, name, new in patched:
        setattr(owner, name, new)
    try:
        yield
        started.refuse_unfinished()
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
