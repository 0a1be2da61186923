"""What a benchmark of collectives measured, in words and rows."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.analysis.quantities import duration, size, speed
from nbddp.capabilities.bench.result import Measured
from nbddp.launch.topology import counted
from nbddp.output.table import Table

COLUMNS = ("collective", "size", "median", "first quartile", "third quartile", "algorithm", "bus", "wrong")
FORMATS = {
    "size": size, "median": duration, "first quartile": duration, "third quartile": duration, "algorithm": speed,
    "bus": speed,
}  # fmt: skip


def table(measured: Sequence[Measured]) -> Table:
    """One row per collective and size."""
    rows = [
        (m.collective, m.bytes, m.median, *m.spread, m.algorithm_bandwidth, m.bus_bandwidth, m.wrong) for m in measured
    ]
    return Table(COLUMNS, rows, formats=FORMATS)


def sentences(measured: Sequence[Measured]) -> list[str]:
    """How fast the smallest and the largest were, and whether all results were right."""
    lines = [title(measured)]
    for name in dict.fromkeys(m.collective for m in measured):
        own = [m for m in measured if m.collective == name]
        least, most = min(own, key=lambda m: m.bytes), max(own, key=lambda m: m.bus_bandwidth)
        lines.append(
            f"{name}: {duration(least.median)} for {size(least.bytes)}; bus bandwidth reaches "
            f"{speed(most.bus_bandwidth)} at {size(most.bytes)}"
        )
    wrong = [m for m in measured if m.wrong]
    if wrong:
        told = ", ".join(f"{m.collective} of {size(m.bytes)} ({counted(m.wrong, 'element')})" for m in wrong)
        lines.append(f"WRONG results: {told}")
    else:
        lines.append("every element of every result was correct")
    return lines


def title(measured: Sequence[Measured]) -> str:
    """Which collectives, on how many ranks."""
    names = ", ".join(dict.fromkeys(m.collective for m in measured))
    return f"{names} on {counted(measured[0].ranks, 'rank')}"
