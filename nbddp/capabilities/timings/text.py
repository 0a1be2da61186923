"""A step as text and rows: the same for a figure's text, a tooltip, a table and a test."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.analysis.answers import clocks_agree
from nbddp.analysis.quantities import duration, note, size, speed
from nbddp.analysis.steps import Bucket, recorded_from
from nbddp.analysis.wait_time import CurvePoint
from nbddp.capabilities.timings.analysis import BucketView, RankView, Slow, StepView
from nbddp.figures.table import Table
from nbddp.launch.topology import counted, rank_words

COLUMNS = ("bucket", "parameters", "size", "waits for the slowest", "moves", "algorithm", "bus")
MOST_NAMES = 4  # of a bucket's parameters, where the pointer rests


def parameters(names: Sequence[str]) -> str:
    """`10.weight … 7.bias (6)`, or the only name, or how many are unknown."""
    if len(names) > 2:
        return f"{names[0]} … {names[-1]} ({len(names)})"
    return ", ".join(names) or "?"


def table(view: StepView) -> Table:
    """One row per bucket."""
    return Table(COLUMNS, [
        (
            t.index, parameters(t.names), size(t.bytes), duration(max(t.wait.values()) / 1e9), duration(t.moving / 1e9),
            speed(t.algorithm_bandwidth()), speed(t.bus_bandwidth(view.count)),
        )
        for t in view.transfers
    ])  # fmt: skip


def heading(view: StepView) -> str:
    """Which step this is, and where it comes from if that is not the last cell."""
    return recorded_from(f"step {view.number} of {view.model}", view.origin)


def folded(view: StepView) -> str:
    """That not all ranks are drawn; empty if they are."""
    return note(view.count, len(view.ranks))


def sentences(view: StepView) -> list[str]:
    """What the step shows, the most important first."""
    lines = [_first(view), *_of_ranks(view)]
    if view.rebuilt:
        lines.append(
            "This is the first exchange: DDP rebuilds its buckets after it, in the order in which gradients arrived."
        )
    if view.rebuilds:
        lines.append("DDP rebuilt the buckets in this step's forward, where the ranks wait for each other.")
    if not view.synced:
        lines.append("The step was taken inside no_sync: no gradients were exchanged.")
    if view.missing:
        lines.append(f"This step was not recorded on {rank_words(view.missing)}.")
    if view.residual:
        lines.append(clocks_agree(view.residual))
    return [*lines, *filter(None, [folded(view)])]


def _first(view: StepView) -> str:
    if not view.transfers or view.hidden_share is None:
        return "no bucket was exchanged in this step"
    buckets = f"{counted(len(view.transfers), 'bucket')}, {size(sum(t.bytes for t in view.transfers))}"
    return f"{buckets}: {100 * view.hidden_share:.0f} % of all-reduce time is hidden behind backward"


def _of_ranks(view: StepView) -> list[str]:
    """One statement on all steps and on this one, and its cause. In each step some rank is the last: it is named only
    if the test over steps names it, and then no other rank is."""
    said = view.judged.describe() if view.judged is not None else []
    if view.slow is not None:
        return [said[0] + _of_slow(view, view.slow), *said[1:]]
    if view.late is None:
        return said
    here = f"in this step the ranks wait {duration(view.late.late / 1e9)} for the last one to start a bucket"
    return [f"{said[0]}; {here}", *said[1:]] if said else [here]


def _of_slow(view: StepView, slow: Slow) -> str:
    """How many of this step's buckets the slow rank starts last, as `Slow.describe` says it of all steps."""
    if not slow.of or not view.transfers:
        return ""
    last = sum(t.slowest == slow.rank for t in view.transfers)
    by = f", by {duration(view.late.late / 1e9)}" if view.late is not None and view.late.rank == slow.rank else ""
    return f", in this step {last} of {len(view.transfers)}{by}"


# -- where the pointer rests -----------------------------------------------------------------------


def when(start: int, end: int) -> str:
    """A bar's length and place; nanoseconds since the first rank began."""
    return f"{duration((end - start) / 1e9)}, from {start / 1e6:.2f} ms to {end / 1e6:.2f} ms"


def of_bucket(rank: int, of: BucketView) -> str:
    bucket = of.bucket
    waits = f"waits {duration((of.start - bucket.sent) / 1e9)}" + (f" for rank {of.slowest}" * (of.slowest != rank))
    moves = f"moves {duration((bucket.done - of.start) / 1e9)}"
    return f"rank {rank} · bucket {bucket.index} · {size(bucket.bytes)}{_named(bucket)}\n{waits}, {moves}"


def _named(bucket: Bucket) -> str:
    """` · 0.weight, 0.bias and 3 more`; empty where they are not known."""
    more = len(bucket.names) - MOST_NAMES
    named = ", ".join(bucket.names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    return f" · {named}" if named else ""


def of_rank(mine: RankView, buckets: int) -> str:
    """What all its bars together are. buckets: how many all ranks have."""
    took = f"{duration(mine.step.duration / 1e9)}, {duration(mine.exposed / 1e9)} of it exposed communication"
    last = f"\nlast to send {mine.last} of {buckets} buckets" if buckets else ""
    return f"rank {mine.rank} · step {mine.step.number}: {took}{last}"


def of_step(curve: CurvePoint) -> str:
    return (
        f"step {curve.number}: {duration(curve.duration / 1e9)}, exposed communication "
        f"{duration(curve.exposed / 1e9)}, spread between ranks {duration(curve.spread / 1e9)}\n"
        f"%ddp timings --step {curve.number} draws it"
    )
