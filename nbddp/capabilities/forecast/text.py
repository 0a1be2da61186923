"""What a forecast says, in words and rows: the same for a figure's text and a test."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.analysis.quantities import duration, percent, speed
from nbddp.capabilities.forecast.cost import Link, LinkFit
from nbddp.capabilities.forecast.scale import Forecast
from nbddp.launch.topology import counted
from nbddp.output.table import Table

COLUMNS = (
    "nodes", "ranks", "weak: step", "exposed", "efficiency", "strong: step", "exposed", "efficiency", "known by",
)  # fmt: skip


def link(some: Link) -> str:
    """`latency 52.0 µs, bandwidth 1.20 GB/s`."""
    return f"latency {duration(some.latency)}, bandwidth {speed(some.bandwidth)}"


def table(some: Forecast) -> Table:
    """One row per number of nodes."""
    pairs = zip(some.whole_nodes(some.weak), some.whole_nodes(some.strong), strict=True)
    return Table(COLUMNS, [
        (
            weak.nodes, weak.ranks, duration(weak.step), duration(weak.exposed), percent(weak.efficiency),
            duration(strong.step), duration(strong.exposed), percent(strong.efficiency),
            "extrapolated" if weak.ranks > some.extrapolated_from else "fitted",
        )
        for weak, strong in pairs
    ])  # fmt: skip


def sentences(some: Forecast) -> list[str]:
    """What the forecast rests on and what it finds; the assumptions last."""
    return [
        f"forecast from step {some.number} of {some.model}",
        _recorded(some),
        _fitted(some),
        *(f"  {_fit(f)}" for f in some.fits),
        _choice(some),
        f"within a node: {link(some.intra)}; between nodes: {link(some.inter)}",
        knee(some),
        _beyond(some),
        "",
        "Assumed:",
        *some.assumed,
    ]


def _recorded(some: Forecast) -> str:
    what = some.profile
    off = round(100 * (some.here.step / what.measured - 1))
    error = f"{abs(off)} % {'more' if off > 0 else 'less'}" if off else "the same"
    return (
        f"recorded on {counted(what.ranks, 'rank')}: {duration(what.measured)}; the model gives "
        f"{duration(some.here.step)} for it, {error}"
    )


def _fitted(some: Forecast) -> str:
    said = f"fitted to {counted(some.chosen.points, 'measured all-reduce')} on {_worlds(some.chosen.ranks)} ranks"
    if some.left_out:
        said += f"; those on {_worlds(some.left_out)} ranks do not fit them and are left out"
    return f"{said}:"


def _worlds(ranks: Sequence[int]) -> str:
    """`2, 4 and 8`."""
    *first, last = map(str, ranks)
    return f"{', '.join(first)} and {last}" if first else last


def _fit(fit: LinkFit) -> str:
    return f"{fit.algorithm}: {link(fit.link)} (error {percent(fit.error)}, at most {percent(fit.worst)})"


def _choice(some: Forecast) -> str:
    if some.decided:
        return f"forecast with {some.algorithm}, {some.why}"
    return (
        f"forecast with {some.algorithm}; the measurements fit several algorithms: measure on another number of ranks "
        "too, or choose one with --algorithm"
    )


def knee(some: Forecast) -> str:
    """From how many nodes on waiting for the network is most of the step."""
    found, nodes = some.knee(), some.whole_nodes(some.told)
    most = "more than half of the step is exposed communication"
    if found is None:
        end = f"up to {counted(nodes[-1].nodes, 'node')}"
        return f"{end} no more than half of the step is exposed communication ({some.about} scaling)"
    if found is nodes[0]:
        return f"already on 1 node {most} ({some.about} scaling)"
    before = nodes[nodes.index(found) - 1].nodes
    return f"beyond {counted(before, 'node')} {most} ({some.about} scaling)"


def _beyond(some: Forecast) -> str:
    return f"everything beyond {counted(some.extrapolated_from, 'rank')} is extrapolated"
