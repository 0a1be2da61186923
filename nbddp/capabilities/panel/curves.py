"""A training loop's curves while it runs: step time and exposed communication, step by step over all ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbddp.analysis.quantities import duration
from nbddp.capabilities.panel.rows import Pace

POINTS = 240  # of a curve: as many as its width can show


@dataclass(frozen=True)
class Curve:
    """Steps `first` to `last`. For some of them, in order: number, seconds of the slowest rank, and the longest wait of
    a rank for buckets after its gradients."""

    first: int = 0
    last: int = 0
    points: tuple[tuple[int, float, float], ...] = ()

    @property
    def drawn(self) -> bool:
        """Whether there is a line to draw."""
        return len(self.points) > 1


def curve(paces: Mapping[int, Sequence[Pace]]) -> Curve:
    """Of the steps that all ranks have told of."""
    by_rank = [{p.number: p for p in some} for some in paces.values()]
    if not by_rank or not all(by_rank):
        return Curve()
    numbers = sorted(set(by_rank[0]).intersection(*by_rank[1:]))
    if not numbers:
        return Curve()
    stride = -(-len(numbers) // POINTS)
    rows = [(n, [steps[n] for steps in by_rank]) for n in numbers[::-1][::stride][::-1]]
    points = tuple((n, max(p.duration for p in of) / 1e9, max(p.exposed for p in of) / 1e9) for n, of in rows)
    return Curve(numbers[0], numbers[-1], points)


def cut(found: Curve, top: float) -> list[tuple[int, float]]:
    """Steps that take longer than `top` seconds, where the curve is cut: number, seconds."""
    return [(n, seconds) for n, seconds, _ in found.points if seconds > top]


def words(point: tuple[int, float, float]) -> str:
    """A step in words."""
    number, seconds, exposed = point
    return f"step {number}: {duration(seconds)}, {duration(exposed)} of it exposed communication"


def top(found: Curve) -> float:
    """Seconds at the upper edge, a round number above all but a few long steps."""
    times = sorted(p[1] for p in found.points)
    high = times[min(len(times) - 1, int(0.97 * len(times)))] * 1.15
    unit = 10.0 ** _exponent(high)
    return next(unit * k for k in (1, 2, 5, 10) if unit * k >= high)


def _exponent(value: float) -> int:
    exponent = -9
    while 10.0 ** (exponent + 1) <= value:
        exponent += 1
    return exponent
