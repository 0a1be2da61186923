"""Collectives between `_start_coalescing` and `_end_coalescing`: NCCL launches them together, gloo lacks both calls.

Here each begins at once, and the work that the second call returns waits for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_noted: dict[str, list[Any]] = {}  # name of a group that coalesces → works


class WorksTogether:
    """The works of several collectives, as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def note(boxed: Any, out: Any) -> None:
    """out: what an operator of the group has returned; the last of it is its work."""
    if not _noted:
        return
    compiled = torch._C._distributed_c10d
    works = _noted.get(compiled.ProcessGroup.unbox(boxed).group_name)
    if works is not None:
        works.append(compiled.Work.unbox(out[-1] if isinstance(out, tuple | list) else out))


def install(is_nccl: Callable[[Any], bool]) -> None:
    """is_nccl: whether a group is known as one of nccl."""
    kind = torch._C._distributed_c10d.ProcessGroup
    start, end = kind._start_coalescing, kind._end_coalescing

    def begin(self: Any, device: Any) -> None:
        if not is_nccl(self):
            return start(self, device)  # type: ignore[no-any-return]
        _noted[self.group_name] = []
        return None

    def ended(self: Any, device: Any) -> Any:
        return WorksTogether(_noted.pop(self.group_name, [])) if is_nccl(self) else end(self, device)

    kind._start_coalescing, kind._end_coalescing = begin, ended
