"""Micro-steps of an accumulation that differ by rank, or are edited before they are exchanged. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from nbddp.capabilities.sanitizer.kinds_drift import by_value
from nbddp.capabilities.sanitizer.recording import CalledFunction, CountedLoss
from nbddp.capabilities.sanitizer.rules import Seen, alone, make
from nbddp.capabilities.sanitizer.view import AlignedStep, RanksView, Replica
from nbddp.launch.machine import counted

LEAST, FEWEST = 2, 4  # steps at which gradients were clipped; at which ranks had other numbers of samples
APART = 1e-3  # of factors


def found(view: RanksView) -> Iterator[Seen]:
    for replica in view.replicas:
        if replica.kind == "ddp":
            yield from _clipped(replica)
            yield from _numbers(replica)


@alone
def _clipped(replica: Replica) -> Iterator[Seen]:
    """Clipping of gradients that each rank still has to itself, by factors that differ."""
    found_at = [(step, calls) for step in replica.steps if (calls := _clips_before(replica, step))]
    bad = [(step, calls) for step, calls in found_at if _differ([_factor(call) for call in calls.values()])]
    if len(bad) < LEAST:
        return
    step, calls = bad[0]
    rank = min(calls)
    factors: dict[int, object] = {r: round(_factor(call), 4) for r, call in calls.items()}
    yield make(
        "edited-gradients", "gradients are clipped before they are exchanged, by another factor on each rank",
        [f"clip_grad_norm_ ran between micro-steps of an accumulation, before DDP's exchange, at {len(bad)} of "
         f"{counted(len(replica.steps), 'optimizer step')}",
         f"it multiplied the gradients of step {step.number} by {by_value(factors)}"],
        "each rank's share of the mean is scaled by its own norm, so the mean is not that of the batch",
        replica.place(rank, calls[rank].place), about=replica.group, ranks=replica.ranks,
        cure="clip once before optimizer.step(), after the backward that exchanges gradients",
    )  # fmt: skip


def _clips_before(replica: Replica, step: AlignedStep) -> dict[int, CalledFunction]:
    """Rank → the first clipping between a backward that exchanges nothing and the last one; none unless on all."""
    found_on = {}
    for rank, backs in step.backs.items():
        silent = [b.ended for b in backs[:-1] if not b.armed and b.ended]
        calls = replica.calls("clip_grad_norm_", rank) if silent else []
        between = [c for c in calls if silent[0] < c.at < backs[-1].at and c.detail]
        if between:
            found_on[rank] = between[0]
    return found_on if len(found_on) == len(step.steps) else {}


def _factor(call: CalledFunction) -> float:
    """What clipping multiplied by: 1 where the norm was within its limit."""
    ratio = call.detail[0] if isinstance(call.detail, list) and call.detail else 0.0
    return 1.0 / max(1.0, float(ratio))


def _differ(factors: list[float]) -> bool:
    return max(factors) - min(factors) > APART * max(factors)


@alone
def _numbers(replica: Replica) -> Iterator[Seen]:
    """Ranks that accumulate over other numbers of micro-batches, while each rank's samples weigh the same in all."""
    bad = []
    for step in replica.steps:
        sizes = {rank: _sizes(replica, rank, step) for rank in step.steps}
        if len({len(each) for each in sizes.values()}) > 1 and _weigh_the_same(replica, step):
            bad.append((step, {rank: sum(each) for rank, each in sizes.items()}))
    if len(bad) < max(FEWEST, len(replica.steps) / 2):
        return
    step, samples = bad[0]
    rank = min(samples)
    number: dict[int, object] = {
        r: f"{n} samples in {counted(len(step.backs[r]), 'micro-batch')}" for r, n in samples.items()
    }
    yield make(
        "unequal-batches", "ranks accumulate over different numbers of micro-batches",
        [f"before step {step.number}: {by_value(number)}; so at {len(bad)} of "
         f"{counted(len(replica.steps), 'optimizer step')}",
         "the factors in the graph make each rank's samples weigh the same in all, whatever their number"],
        f"a sample of the rank with the fewest weighs {max(samples.values()) / min(samples.values()):.3g} times as "
        "much as one of the rank with the most",
        replica.place(rank, step.backs[rank][0].place), about=replica.group, ranks=replica.ranks,
    )  # fmt: skip


def _sizes(replica: Replica, rank: int, step: AlignedStep) -> list[int]:
    return [f.size for f in step.between(rank, replica.training[rank]) if f.size]


def _weigh_the_same(replica: Replica, step: AlignedStep) -> bool:
    """Whether the sum of all weights of samples is known of each rank, and the same on all."""
    sums = []
    for rank, own in replica.records.items():
        losses = step.between(rank, own.losses)
        if len(losses) != len(step.backs[rank]) or not all(map(_is_known, losses)):
            return False
        sums.append(sum(abs(loss.weight) * loss.count for loss in losses))
    return bool(sums) and 0 < max(sums) <= 1.001 * min(sums)


def _is_known(loss: CountedLoss) -> bool:
    return bool(loss.weight) and loss.count > 0 and not loss.odd
