"""Measured collectives as plain data."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from nbddp.analysis.wait_time import bus_factor


@dataclass(frozen=True)
class Measured:
    """One collective at one size on `ranks` ranks, as nccl-tests measures it.

    bytes: the size that nccl-tests calls size: of the whole buffer, that is, of what is gathered or scattered.
    seconds: one time per repetition, of the rank that took longest. wrong: how many elements of the results
    were not what they must be, over all ranks.
    """

    collective: str
    bytes: int
    ranks: int
    seconds: tuple[float, ...]
    wrong: int = 0

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """Seconds: the first and the third quartile; both the only time if there is one."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second: size / median time."""
        return self.bytes / self.median if self.median > 0 else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second on each link: nccl-tests, doc/PERFORMANCE.md."""
        return self.algorithm_bandwidth * bus_factor(self.collective, self.ranks)
