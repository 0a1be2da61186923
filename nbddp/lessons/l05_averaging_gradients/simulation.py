"""Lesson 05's explorer: a line fitted by several ranks, with and without a common start and an exchange of gradients.

Every rank has its own shard of points and descends the mean squared error of `w * x + b` on it by full-batch
gradient steps; beside them goes one process that has all points. Plain arithmetic in float64. Pure: imports only
`nbddp.launch.topology` and what that may.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nbddp.launch.topology import counted, rank_words

SAME, OWN = "rank 0's, broadcast", "each rank its own"
MEAN, SUM, NOTHING = "averaged", "summed, not divided", "not exchanged"
POINTS = 6  # in each shard
RATE = 0.2  # the learning rate
EQUAL = 1e-9  # parameters that are closer than this are equal

Line = tuple[float, float]  # w, b
Points = Sequence[tuple[float, float]]
STARTS: tuple[Line, ...] = ((-1.5, -1.0), (1.0, -2.0), (0.5, 2.5), (-0.5, 0.5))  # as if each rank had a seed of its own


def shards(ranks: int) -> list[list[tuple[float, float]]]:
    """A shard for each rank, from left to right: points about y = 2x + 1, bent so that no two shards fit one line."""
    count = ranks * POINTS
    xs = [2 * i / (count - 1) - 1 for i in range(count)]
    points = [(x, 2 * x + 1 + 0.5 * math.sin(4 * x)) for x in xs]
    return [points[r * POINTS : (r + 1) * POINTS] for r in range(ranks)]


def loss(line: Line, points: Points) -> float:
    """Mean squared error."""
    return sum((line[0] * x + line[1] - y) ** 2 for x, y in points) / len(points)


def gradient(line: Line, points: Points) -> Line:
    """Of `loss` by w and b."""
    errors = [(line[0] * x + line[1] - y, x) for x, y in points]
    return 2 * sum(e * x for e, x in errors) / len(points), 2 * sum(e for e, _ in errors) / len(points)


def combined(gradients: Sequence[Line], exchange: str) -> list[Line]:
    """What each rank steps by, from all ranks' own gradients."""
    if exchange == NOTHING:
        return list(gradients)
    share = len(gradients) if exchange == MEAN else 1
    total = (sum(g[0] for g in gradients) / share, sum(g[1] for g in gradients) / share)
    return [total] * len(gradients)


@dataclass(frozen=True)
class Fit:
    """Trajectories: `lines[rank][step]`, and `alone[step]` of one process with all points, from step 0 on."""

    start: str
    exchange: str
    lines: tuple[tuple[Line, ...], ...]
    alone: tuple[Line, ...]

    @property
    def ranks(self) -> int:
        return len(self.lines)

    @property
    def steps(self) -> int:
        return len(self.alone) - 1

    def losses(self, lines: Sequence[Line]) -> list[float]:
        """The loss on all points, step by step."""
        points = [p for shard in shards(self.ranks) for p in shard]
        return [loss(line, points) for line in lines]

    def distances(self) -> list[float]:
        """The largest distance of any rank's (w, b) from rank 0's, step by step."""
        return [max(math.dist(line, here[0]) for line in here) for here in zip(*self.lines, strict=True)]

    def groups(self) -> list[tuple[int, ...]]:
        """Ranks that go the same way, lowest first."""
        found: list[list[int]] = []
        for rank, line in enumerate(self.lines):
            same = next((g for g in found if _apart(self.lines[g[0]], line) < EQUAL), None)
            if same is None:
                found.append([rank])
            else:
                same.append(rank)
        return [tuple(g) for g in found]

    def verdict(self) -> str:
        """What the trajectories show, in a sentence."""
        apart = self.distances()
        if max(apart) < EQUAL:
            if _apart(self.lines[0], self.alone) < EQUAL:
                return "all ranks are equal, and in every step equal to one process with all the data"
            return (
                f"all ranks are equal, but not equal to one process: each step is {self.ranks} times as long, as with "
                f"{self.ranks} times the learning rate"
            )
        if max(apart) - min(apart) < EQUAL:
            return "the distance stays as it was at the start: equal steps from different starts"
        if apart[0] < EQUAL:
            return "the ranks start equal and drift apart: each moves to the line that fits its own shard"
        return "the ranks start apart and end apart: each moves to the line that fits its own shard"

    def describe(self) -> str:
        rows = [f"{rank_words(g)}: {_change(self.losses(self.lines[g[0]]))}" for g in self.groups()]
        lines = [f"{rank_words(g)}: {_line(self.lines[g[0]][-1])}" for g in self.groups()]
        lines.append(f"one process: {_line(self.alone[-1])}")
        apart = self.distances()
        return "\n".join(
            [
                f"{counted(self.ranks, 'rank')}, start: {self.start}; gradients {self.exchange}; "
                f"{counted(self.steps, 'step')}",
                "lines after the last step:",
                *(f"  {line}" for line in lines),
                "loss on all the data:",
                *(f"  {row}" for row in rows),
                f"  one process: {_change(self.losses(self.alone))}",
                f"largest distance of parameters from rank 0's: {apart[0]:.3f} → {apart[-1]:.3f}",
                self.verdict(),
            ]
        )


def _apart(one: Sequence[Line], other: Sequence[Line]) -> float:
    """The largest distance of two trajectories at the same step."""
    return max(math.dist(a, b) for a, b in zip(one, other, strict=True))


def _line(line: Line) -> str:
    w, b = (round(v, 2) + 0.0 for v in line)
    return f"y = {w:.2f}x {'-' if b < 0 else '+'} {abs(b):.2f}"


def _change(losses: Sequence[float]) -> str:
    return f"{losses[0]:.3f} → {losses[-1]:.3f}"


def simulate_averaging(ranks: int = 4, steps: int = 30, begin: str = SAME, exchange: str = MEAN) -> Fit:
    """`ranks` ranks take `steps` steps; the explorer's picture."""
    data = shards(ranks)
    lines = [[STARTS[r if begin == OWN else 0]] for r in range(ranks)]
    for _ in range(steps):
        own = [gradient(line[-1], shard) for line, shard in zip(lines, data, strict=True)]
        for line, taken in zip(lines, combined(own, exchange), strict=True):
            line.append(_step(line[-1], taken))
    alone = [STARTS[0]]
    everything = [p for shard in data for p in shard]
    for _ in range(steps):
        alone.append(_step(alone[-1], gradient(alone[-1], everything)))
    return Fit(begin, exchange, tuple(map(tuple, lines)), tuple(alone))


def _step(line: Line, taken: Line) -> Line:
    return line[0] - RATE * taken[0], line[1] - RATE * taken[1]
