"""A training loop's curves while it runs: step time and exposed communication, step by step over all ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbddp.capabilities.panel.rows import Pace

POINTS = 240  # of a curve: as many as its width can show
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 160, 56, 20  # CSS pixels of the drawing, and of its margins


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


def line(found: Curve, which: int, top: float) -> str:
    """The points of an SVG line. which: 1 for step time, 2 for exposed communication; top: seconds at the upper
    edge."""
    first, last = found.first, found.last
    width, height = WIDTH - LEFT, HEIGHT - BOTTOM
    places = (
        (LEFT + width * (p[0] - first) / max(1, last - first), height * (1 - min(1.0, p[which] / top)))
        for p in found.points
    )
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def cut(found: Curve, top: float) -> list[tuple[float, int, float]]:
    """Steps that take longer than `top` seconds, where the curve is cut: x, number, seconds."""
    first, last = found.first, found.last
    width = (WIDTH - LEFT) / max(1, last - first)
    return [(LEFT + width * (n - first), n, seconds) for n, seconds, _ in found.points if seconds > top]


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
