"""Lesson 14's explorer: the loss scale of each rank over some steps, by where ranks look for inf.

`GradScaler`'s rule: an overflow halves the scale and skips the step, and after `interval` good steps in a row the scale
doubles. Scales are powers of 2, and so are the largest gradients: a product of 2^16 and more is inf in float16. Where
each rank has a scale of its own, what is reduced is the mean of the ranks' scaled gradients. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

AVERAGED = "all gradients, after the all-reduce (DDP)"
ALONE = "own shard, alone"
AGREED = "own shard, then MAX over ranks"
WHERE = (AVERAGED, ALONE, AGREED)
RANKS, STEPS = 4, 24
TOP = 16  # 2^16 and more is inf in float16
SPIKES = {(2, 6): 5, (0, 10): 4, (2, 13): 5, (1, 17): 6, (3, 20): 3}  # (rank, step) → how many times 2 more


def gradient(rank: int, step: int) -> int:
    """Which power of 2 a rank's largest gradient is in a step: its own, or that of its shard."""
    return -6 + (3 * step + 2 * rank + step * rank) % 3 + SPIKES.get((rank, step), 0)


@dataclass(frozen=True)
class ScaledStep:
    """What one step was, by rank: the exponent of the scale in it, whether its gradients overflowed, whether it was
    skipped."""

    scales: tuple[int, ...]
    overflowed: tuple[bool, ...]
    skipped: tuple[bool, ...]


@dataclass(frozen=True)
class Scaled:
    """steps: those taken so far; scales: the exponents after them."""

    where: str
    interval: int
    steps: tuple[ScaledStep, ...]
    scales: tuple[int, ...]

    def skips(self, rank: int) -> int:
        return sum(step.skipped[rank] for step in self.steps)

    @property
    def apart(self) -> int | None:
        """The first step, from 1, that some ranks skipped and others took."""
        return next((i + 1 for i, s in enumerate(self.steps) if len(set(s.skipped)) > 1), None)

    def wrong(self) -> list[float]:
        """How much too large each rank's gradients come out now: the mean of the scales over its own."""
        mean = sum(2.0**s for s in self.scales) / len(self.scales)
        return [mean / 2.0**s for s in self.scales]

    def head(self) -> str:
        return f"{len(self.steps)} of {STEPS} steps on {RANKS} ranks; looked for inf in: {self.where}"

    def verdict(self) -> str:
        if not self.steps:
            return "no step yet"
        if self.apart is None:
            skipped = self.skips(0)
            if not skipped:
                return "all ranks took every step"
            return f"all ranks skipped the same {skipped} of {len(self.steps)} steps, and have one scale"
        counts = ", ".join(str(len(self.steps) - self.skips(r)) for r in range(RANKS))
        line = f"since step {self.apart} the ranks have not taken the same steps: {counts} on ranks 0–{RANKS - 1}"
        factors = self.wrong()
        if len(set(self.scales)) == 1:
            return f"{line}; the scales are equal again, the numbers of steps are not"
        worst = max(factors)
        return f"{line}; rank {factors.index(worst)} unscales its gradients to {worst:,.1f} × their true size"

    def describe(self) -> str:
        lines = [self.head()]
        for rank in range(RANKS):
            numbers = [str(i + 1) for i, s in enumerate(self.steps) if s.skipped[rank]]
            own = [str(i + 1) for i, s in enumerate(self.steps) if s.overflowed[rank]]
            skipped = f"skipped {', '.join(numbers)}" if numbers else "skipped none"
            lines.append(f"rank {rank}: scale 2^{self.scales[rank]}; overflow in {', '.join(own) or 'none'}; {skipped}")
        return "\n".join([*lines, self.verdict()])


def scaled(where: str = AVERAGED, first: int = 16, interval: int = 4, step: int = STEPS) -> Scaled:
    """where: one of WHERE; first: the exponent of the first scale; interval: good steps before it doubles."""
    scales, good, taken = [first] * RANKS, [0] * RANKS, []
    for number in range(1, step + 1):
        overflowed = _overflowed(where, scales, number)
        skipped = overflowed if where == ALONE else (any(overflowed),) * RANKS
        taken.append(ScaledStep(tuple(scales), overflowed, skipped))
        for rank, skips in enumerate(skipped):
            good[rank] = 0 if skips else good[rank] + 1
            if skips:
                scales[rank] -= 1
            elif good[rank] == interval:
                scales[rank], good[rank] = scales[rank] + 1, 0
    return Scaled(where, interval, tuple(taken), tuple(scales))


def _overflowed(where: str, scales: list[int], number: int) -> tuple[bool, ...]:
    """Of a rank's own gradients, or of its shard of all ranks' mean."""
    mean = log2(sum(2.0**s for s in scales) / RANKS)
    return tuple((scales[rank] if where == AVERAGED else mean) + gradient(rank, number) >= TOP for rank in range(RANKS))
