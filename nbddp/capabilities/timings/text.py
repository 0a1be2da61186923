"""What a recording says, in words and rows: the same for a figure's text, a table and a test."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbddp.analysis.origin import none_since, whence
from nbddp.analysis.overlap import hidden_share
from nbddp.analysis.quantities import duration, size, speed
from nbddp.analysis.steps import Recording, Step
from nbddp.analysis.wait_time import Straggler, Transfer, straggler, transfers
from nbddp.capabilities.timings.rank_time import verdict
from nbddp.launch.topology import counted, rank_words

LATE = 0.02  # of the step: a rank that is later than this is worth a sentence
COLUMNS = ("bucket", "parameters", "size", "waits for the slowest", "moves", "algorithm", "bus")


def clocks_agree(residual: int) -> str:
    """What is said of an alignment's error in nanoseconds."""
    return f"The ranks' clocks agree within {duration(residual / 1e9)}."


def parameters(names: Sequence[str]) -> str:
    """`10.weight … 7.bias (6)`, or the only name, or how many are unknown."""
    if len(names) > 2:
        return f"{names[0]} … {names[-1]} ({len(names)})"
    return ", ".join(names) or "?"


def rows(found: Sequence[Transfer], ranks: int) -> list[tuple[object, ...]]:
    """One row per bucket, under COLUMNS."""
    return [
        (
            t.index, parameters(t.names), size(t.bytes), duration(max(t.wait.values()) / 1e9), duration(t.moving / 1e9),
            speed(t.algorithm_bandwidth()), speed(t.bus_bandwidth(ranks)),
        )
        for t in found
    ]  # fmt: skip


def heading(recording: Recording, number: int) -> str:
    """Which step this is, and where it comes from if that is not the last cell."""
    named = f"step {number} of {recording.model}{whence(recording.origin)}"
    since = none_since(recording.origin)
    return f"{named}; {since}" if since else named


@dataclass(frozen=True)
class StepSummary:
    """What a step of a recording shows, in sentences; `ranks`: the last in this step, and one that is slow."""

    lines: list[str]
    ranks: list[int]


def told(recording: Recording, number: int) -> StepSummary:
    """What step `number` shows. Raises KeyError if a rank does not have it."""
    step = recording.step(number)
    found = transfers(step)
    lines = [_first(step, found)]
    late, judged = _late(step, found), verdict(recording)
    behind = judged.slow if judged is not None else None
    if late is not None:
        lines.append(_straggler(late, behind is not None and behind.rank == late.rank))
    lines += judged.words() if judged is not None else []
    if any(s.rebuilt for s in step.values()):
        lines.append(
            "This is the first exchange: DDP rebuilds its buckets after it, in the order in which gradients arrived."
        )
    if any(s.rebuilds for s in step.values()):
        lines.append("DDP rebuilt the buckets in this step's forward, where the ranks wait for each other.")
    if not all(s.synced for s in step.values()):
        lines.append("The step was taken inside no_sync: no gradients were exchanged.")
    if recording.missing:
        lines.append(f"This step was not recorded on {rank_words(recording.missing)}.")
    if recording.residual:
        lines.append(clocks_agree(recording.residual))
    return StepSummary(lines, [found.rank for found in (late, behind) if found is not None])


def _late(step: Mapping[int, Step], found: Sequence[Transfer]) -> Straggler | None:
    """The rank that the others wait for in this step; None if they do not wait long."""
    late = straggler(found)
    longest = max(s.duration for s in step.values())
    return late if late is not None and late.late > LATE * longest else None


def _first(step: Mapping[int, Step], found: Sequence[Transfer]) -> str:
    shares = [h for h in (hidden_share(s) for s in step.values()) if h is not None]
    if not found or not shares:
        return "no bucket was exchanged in this step"
    share = 100 * statistics.mean(shares)
    total = size(sum(t.bytes for t in found))
    return f"{counted(len(found), 'bucket')}, {total}: {share:.0f} % of all-reduce time is hidden behind backward"


def _straggler(late: Straggler, slow: bool) -> str:
    """Some rank is the last in each step: it is named if it is slow in others too."""
    if not slow:
        return f"in this step the ranks wait {duration(late.late / 1e9)} for the last one to start a bucket"
    buckets = "all buckets" if late.last == late.of else f"{late.last} of {late.of} buckets"
    return f"rank {late.rank} starts {buckets} last, by {duration(late.late / 1e9)}, and the others wait for it"
