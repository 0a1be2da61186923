"""Lesson 01's explorer: a program of two prints on several ranks, and the orders in which a terminal may show them.

Every rank prints `before`, works, and prints `after`; with a barrier in between nobody prints `after` until all have
worked. Time is in units of one rank's work. Pure: imports only the standard library and `nbddp.errors`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import factorial

from nbddp.errors import BadInput

BEFORE, AFTER = "before", "after"
NOBODY = -1
APART, WORK, SLOW = 0.12, 1.0, 2.4  # how much later each next rank starts; the work of a rank; that of the slow one


@dataclass(frozen=True)
class PrintedLine:
    """`text` printed by `rank` at time `at`."""

    rank: int
    text: str
    at: float


@dataclass(frozen=True)
class Printing:
    """What the ranks print: `lines` has two for each rank, in order of time. `worked[rank]` is when its work ended."""

    ranks: int
    barrier: bool
    lines: tuple[PrintedLine, ...]
    worked: tuple[float, ...]

    def orders(self) -> int:
        """In how many orders a terminal could show the lines, if each rank may take any time."""
        if self.barrier:
            return factorial(self.ranks) ** 2  # all `before`, then all `after`
        return factorial(2 * self.ranks) // (1 << self.ranks)  # all orders in which each rank's own two are in order

    def of(self, rank: int) -> list[PrintedLine]:
        return [line for line in self.lines if line.rank == rank]

    def certain(self) -> str:
        """What holds in every one of these orders."""
        if self.barrier:
            return f"certain: every {BEFORE} comes before every {AFTER}"
        return f"certain: each rank's {BEFORE} comes before its own {AFTER}, nothing else"

    def describe(self) -> str:
        shown = ", ".join(f"{line.text} ({line.rank})" for line in self.lines)
        return f"{self.heading()}: {shown}\n{self.certain()}"

    def heading(self) -> str:
        return f"one of {self.orders():,} orders that a terminal may show".replace(",", " ")


def printing(ranks: int = 4, slow: int = NOBODY, barrier: bool = False) -> Printing:
    """The two lines of each of `ranks`, of which `slow` takes longer. Raises BadInput for a rank that is not there."""
    if slow >= ranks:
        raise BadInput(f"there is no rank {slow} among {ranks}; choose a slow rank below {ranks}, or more ranks")
    starts = [APART * r for r in range(ranks)]
    worked = [start + (SLOW if r == slow else WORK) for r, start in enumerate(starts)]
    ends = [max(worked) + APART * (r + 1) for r in range(ranks)] if barrier else [w + APART / 2 for w in worked]
    lines = [PrintedLine(r, BEFORE, starts[r]) for r in range(ranks)] + [
        PrintedLine(r, AFTER, ends[r]) for r in range(ranks)
    ]
    return Printing(ranks, barrier, tuple(sorted(lines, key=lambda line: (line.at, line.rank))), tuple(worked))
