"""How many workers a machine can hold: a rule over what each needs and what is free.

The agent reports the limits (`agent/hardware.py`), the pool asks before it starts anything. Pure: imports only the
standard library, `nbddp.errors` and `nbddp.launch.machine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbddp.errors import BadInput
from nbddp.launch.machine import counted


@dataclass(frozen=True)
class Limit:
    """`what` there are only so many of: `each` worker takes about so much, and so much is `free` (bytes for memory)."""

    what: str
    each: int
    free: int

    def words(self, workers: int) -> str:
        """`about 244 GiB of memory, but only 17 GiB of memory are free`."""
        return f"about {self._amount(workers * self.each)}, but only {self._amount(max(0, self.free))} are free"

    def _amount(self, number: int) -> str:
        if self.what != "memory":
            return f"{number} {self.what}"
        large = number >= 10 << 30
        return f"{number / (1 << 30 if large else 1 << 20):.0f} {'GiB' if large else 'MiB'} of memory"


MANY = 32  # workers per core: more are slow in all they do, and may seem not to answer


def crowded(workers: int, cores: int) -> str:
    """What is said of many more workers than cores; empty for fewer."""
    if workers <= MANY * cores:
        return ""
    return (
        f"{workers} workers share {counted(cores, 'core')}, so that starts, steps and answers are slow; "
        f"--nproc {cores} gives each worker a core"
    )


def refuse_crowd(living: int, wanted: int, nnodes: int, limits: Sequence[Limit]) -> None:
    """Raise BadInput if the machine cannot hold the workers that are wanted beside those that live, with what to type.

    nnodes: among how many nodes, all on this machine, `wanted` is shared.
    """
    new = wanted - living
    tight = min(limits, key=lambda limit: limit.free // limit.each, default=None)
    if new <= 0 or tight is None or tight.free // tight.each >= new:
        return
    fits = (living + max(0, tight.free // tight.each)) // nnodes
    advice = f"use --nproc {fits}{' or fewer' * (fits > 1)}" if fits else "end other programs"
    raise BadInput(
        f"{counted(new, 'more worker' if living else 'worker')} would need {tight.words(new)}; {advice}, "
        "or add --oversubscribe to start them anyway"
    )
