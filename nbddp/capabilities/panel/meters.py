"""What a run's processes use while it lasts, and what is kept of runs that have ended. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nbddp.capabilities.panel.curves import Curve
from nbddp.capabilities.panel.rows import Use

SAMPLES = 240  # of a run; a longer one keeps every second, then every fourth
PAST = 8  # runs


@dataclass(frozen=True)
class Sample:
    """At a moment of a run. at: seconds since it began; memory: bytes of the rank that has most; gpu: percent, the mean
    of the ranks' busiest GPUs; gpu_memory: bytes of the rank with most in use. None: not known."""

    at: float
    memory: int | None = None
    gpu: float | None = None
    gpu_memory: int | None = None


@dataclass(frozen=True)
class PastRun:
    """A run that has ended. step, exposed: median seconds of the slowest rank; memory: the most, in bytes."""

    number: int
    name: str
    steps: int
    step: float
    exposed: float
    seconds: float
    memory: int | None = None


def sample(at: float, uses: Iterable[Use]) -> Sample:
    """Of what the ranks use now."""
    found = [*uses]
    memory = [use.memory for use in found if use.memory is not None]
    busy = [use.gpu for use in found if use.gpu is not None]
    held = [use.gpu_memory for use in found if use.gpu_memory is not None]
    return Sample(
        at, max(memory, default=None), statistics.mean(busy) if busy else None, max(held, default=None)
    )  # fmt: skip


def sampled(before: Sequence[Sample], new: Sample) -> tuple[Sample, ...]:
    """With a new sample; if there are too many, with every second of them. Another run's are dropped."""
    if before and new.at < before[-1].at:
        return (new,)
    both = (*before, new)
    return both[::2] if len(both) > SAMPLES else both


def past(number: int, name: str, curve: Curve, meters: Sequence[Sample]) -> PastRun | None:
    """What is kept of a run; None if it had no step of DDP."""
    if not curve.points:
        return None
    most = max((s.memory for s in meters if s.memory is not None), default=None)
    middle = [statistics.median(p[which] for p in curve.points) for which in (1, 2)]
    return PastRun(
        number, name, curve.last - curve.first + 1, middle[0], middle[1], meters[-1].at if meters else 0.0, most
    )  # fmt: skip


def kept(before: Sequence[PastRun], run: PastRun) -> tuple[PastRun, ...]:
    """The newest runs, the last one last."""
    return (*(one for one in before if one.number != run.number), run)[-PAST:]
