"""Means over ranks that are not the mean over samples. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log

from nbddp.capabilities.sanitizer.kinds_drift import EDITS, by_value
from nbddp.capabilities.sanitizer.recording import CalledFunction, CountedLoss, GroupCall, Place
from nbddp.capabilities.sanitizer.rules import Seen, alone, make
from nbddp.capabilities.sanitizer.view import AlignedStep, RanksView, Replica
from nbddp.launch.machine import counted
from nbddp.launch.topology import rank_words

LEAST, MOST = 2, 0.5  # forwards that differ; share of a rank's that have its usual size
LEAST_SHARE = 0.1  # of the forwards at which sizes must differ
APART, FEWEST = 1.2, 4  # largest count over the smallest; steps at which they are so
LATEST = 1 << 60  # after all that happened
APART_BY = 1e-3  # of a factor
COUNTS = 4  # elements of a tensor that may carry a count


def found(view: RanksView) -> Iterator[Seen]:
    for replica in view.replicas:
        yield from _hook(replica)
        yield from _by_hand(replica)
        yield from _divided(replica)
        if view.trains:
            yield from _unequal(replica)
        yield from _scheduler(replica)
        yield from _tokens(replica)
    yield from _graph(view)
    yield from _gather(view)
    yield from _crossed(view)


# -- hooks, and averages by hand -------------------------------------------------------------------


@alone
def _hook(replica: Replica) -> Iterator[Seen]:
    """The hook's result is a multiple of the mean."""
    hooks = {r: [h for h in rec.hooks if h.model == replica.facts[r].number] for r, rec in replica.records.items()}
    factors = []
    for some in zip(*hooks.values(), strict=False):
        befores, afters = [h.before for h in some], [h.after for h in some]
        if len({len(each) for each in (*befores, *afters)}) != 1 or not befores[0]:
            continue
        mean = [sum(each) / len(some) for each in zip(*befores, strict=True)]
        factor = _factor(mean, afters[0])
        if factor is not None:
            factors.append(factor)
    if not factors or abs(factors[0] - 1) < 0.05 or max(factors) - min(factors) > 0.05 * abs(factors[0]):
        return
    rank = min(hooks)
    place = replica.place(rank, replica.facts[rank].hook_place)
    yield make(
        "hook-scale", f"the communication hook returns {factors[0]:.2f} x the mean of the ranks' gradients",
        [f"at {counted(len(factors), 'bucket')}: result over the mean of what went in was {factors[0]:.2f}"
         + (f", the world size {len(replica.group)}" if abs(factors[0] - len(replica.group)) < 0.05 else "")],
        f"each gradient is {factors[0]:.2f} times the mean; the learning rate is, in effect, {factors[0]:.2f} times as "
        "large", place, about=replica.group, ranks=replica.ranks,
    )  # fmt: skip


def _factor(mean: Sequence[float], got: Sequence[float]) -> float | None:
    """got = factor * mean, if that holds but for 2 %."""
    square = sum(each * each for each in mean)
    size = sum(each * each for each in got)
    if not square or not size:
        return None
    factor = sum(a * b for a, b in zip(mean, got, strict=True)) / square
    rest = sum((b - factor * a) ** 2 for a, b in zip(mean, got, strict=True))
    return factor if rest <= 4e-4 * size else None


@alone
def _by_hand(replica: Replica) -> Iterator[Seen]:
    """Gradients that were exchanged and are reduced again."""
    again = [(step, _reduced(replica, step)) for step in replica.steps if step.armed_last()]
    some = [(step, calls) for step, calls in again if calls]
    if not some:
        return
    step, calls = some[0]
    rank = min(step.steps)
    factor = _changed_by(step, rank)
    name = "exchanged-again" if factor is not None and abs(factor - 1) < 1e-3 else "averaged-twice"
    if factor is None and step.grads is not None:
        return
    said = "an unknown factor" if factor is None else f"{factor:.2f}"
    detail = calls[0].detail
    first = detail[0] if isinstance(detail, (tuple, list)) else detail
    seen = [
        f"{counted(len(calls), 'gradient')}, first of {first}, {'was' if len(calls) == 1 else 'were'} all-reduced "
        f"between backward and step {step.number}, and at {len(some)} of {len(replica.steps)} steps",
        f"from backward to step they changed by a factor of {said}",
    ]
    slow = "the exchange costs its time twice and changes nothing"
    yield make(
        name, "gradients are all-reduced by hand, and DDP has exchanged them already", seen,
        slow if name == "exchanged-again" else f"each gradient is {said} times the mean over ranks",
        replica.place(rank, calls[0].place), about=replica.group, ranks=replica.ranks,
    )  # fmt: skip


@alone
def _divided(replica: Replica) -> Iterator[Seen]:
    """Gradients of a mean that the program divides by the number of ranks, after DDP has averaged them."""
    world = len(replica.group)
    if replica.kind != "ddp" or len(replica.steps) < FEWEST or any(f.hook for f in replica.facts.values()):
        return
    rank = min(replica.ranks)
    for step in replica.steps:
        if not step.armed_last() or any(len(backs) != 1 for backs in step.backs.values()) or step.grads is not None:
            return
        if not all(_is_mean(step.between(r, replica.records[r].losses)) for r in step.steps):
            return
        ended = step.backs[rank][-1].ended
        edits = [c for c in replica.records[rank].calls if c.what in EDITS and ended < c.at < step.steps[rank].at]
        factor = _changed_by(step, rank)
        if edits or factor is None or abs(factor * world - 1) > APART_BY:
            return
    yield make(
        "averaged-twice", f"gradients are multiplied by 1/{world}, which is 1/world, after DDP has averaged them",
        [f"at all {counted(len(replica.steps), 'step')} they were 1/{world} of what DDP's exchange had left, and no "
         "clipping or scaling was seen",
         "the factors in each rank's loss make it the mean over the rank's own samples"],
        f"each gradient is 1/{world} of the mean over ranks",
        replica.place(rank, replica.steps[0].steps[rank].place), about=replica.group, ranks=replica.ranks,
        cure="if this is a division by the number of ranks, remove it: DDP has averaged when backward returns",
    )  # fmt: skip


def _is_mean(losses: Sequence[CountedLoss]) -> bool:
    """Whether the weights of all that losses sum up are known, and are 1 in all."""
    known = [loss for loss in losses if loss.weight and loss.count > 0 and not loss.odd]
    return bool(known) and len(known) == len(losses) and abs(sum(e.weight * e.count for e in known) - 1) < APART_BY


def _reduced(replica: Replica, step: AlignedStep) -> list[CalledFunction]:
    rank = min(step.steps)
    ended = step.backs[rank][-1].ended
    calls = [c for c in replica.calls("gradient reduced", rank) if ended < c.at < step.steps[rank].at]
    return [c for c in calls if _within(_detail(c)[2], replica.group)]  # over other ranks it is another mean


def _within(ranks: object, group: Sequence[int]) -> bool:
    return isinstance(ranks, (tuple, list)) and set(ranks) <= set(group)


def _changed_by(step: AlignedStep, rank: int) -> float | None:
    """By which factor the gradients of a rank changed between backward and step; None if not by one."""
    before, after = step.backs[rank][-1].grads, step.parts[rank].grads
    if not before or len(before) != len(after):
        return None
    return _factor(before, after)


# -- sizes, schedules ------------------------------------------------------------------------------


@alone
def _unequal(replica: Replica) -> Iterator[Seen]:
    forwards = replica.side_by_side()
    length = len(forwards)
    rows = [{r: f.size for r, f in row.items()} for row in forwards]
    bad = [i for i, row in enumerate(rows) if len(set(row.values())) > 1 and not _weighs_alike(replica, i)]
    if len(bad) < max(LEAST, LEAST_SHARE * length) or _varies(rows) or _exchanges_counts(replica, length):
        return
    row = rows[bad[0]]
    rank = min(row)
    least, most = min(row.values()), max(row.values())
    yield make(
        "unequal-batches", "ranks train on batches of different sizes, and no count was exchanged",
        [f"at {len(bad)} of {counted(length, 'training forward')}, first: {by_value(row)} samples",
         "no small tensor was reduced or gathered about as often, so no counts were"],
        f"if each rank's loss is a mean over its batch, a sample of the smallest weighs {most / least:.3g} times as "
        "much as one of the largest",
        replica.place(rank, forwards[bad[0]][rank].place), about=replica.group, ranks=replica.ranks,
    )  # fmt: skip


def _weighs_alike(replica: Replica, number: int) -> bool:
    """Whether an element of the loss of the n-th forward has the same weight on all ranks. Their numbers of elements
    differ, so then the program knows the sizes."""
    by: dict[tuple[bool, int], list[CountedLoss]] = {}
    for rank, forwards in replica.training.items():
        begin = forwards[number].at
        end = forwards[number + 1].at if number + 1 < len(forwards) else LATEST
        for loss in replica.records[rank].losses:
            if begin < loss.at < end:
                by.setdefault((bool(loss.form), loss.index), []).append(loss)
    unequal = [some for some in by.values() if len({loss.whole for loss in some}) > 1]
    return bool(unequal) and all(
        len(some) == len(replica.ranks) and _close([abs(loss.weight) for loss in some]) for some in unequal
    )


def _close(values: Sequence[float]) -> bool:
    return 0 < max(values) <= 1.001 * min(values)


def _varies(rows: Sequence[Mapping[int, int]]) -> bool:
    """Whether sizes differ from step to step, as lengths of sequences and numbers of nodes do; or are unknown. A rank's
    usual size has most of its steps; the others are ends of epochs."""
    usual = []
    for rank in rows[0]:
        own = [row[rank] for row in rows]
        size, times = Counter(own).most_common(1)[0]
        if 0 in own or times < MOST * len(own):
            return True
        usual.append(size)
    return len(set(usual)) == 1


def _exchanges_counts(replica: Replica, forwards: int) -> bool:
    """Whether the program reduces or gathers small tensors about as often as it trains: they may be counts."""
    rank = min(replica.records)
    small = [c for c in replica.records[rank].collectives if c.name != "barrier" and c.numel <= COUNTS]
    return len(small) >= forwards // 2 and bool(small)


def _detail(call: CalledFunction) -> tuple[object, ...]:
    return tuple(call.detail) if isinstance(call.detail, (tuple, list)) else (call.detail,)


@alone
def _scheduler(replica: Replica) -> Iterator[Seen]:
    world = len(replica.group)
    rank = min(replica.records)
    for optimizer in replica.optimizers[rank]:
        of_it = [c for c in replica.calls("scheduler", rank) if _detail(c)[0] == optimizer]
        own = [c for c in of_it if c.detail == of_it[0].detail]
        steps = [s.at for s in replica.records[rank].steps if s.optimizer == optimizer]
        between = [sum(1 for c in own if a < c.at < b) for a, b in zip(steps, [*steps[1:], 1 << 60], strict=True)]
        if len(between) >= 3 and set(between) == {world} and world > 1:
            yield make(
                "scheduler-steps", f"the scheduler makes {world} steps for each step of its optimizer",
                [f"{world} scheduler steps after each of {counted(len(between), 'optimizer step')}, which is the world "
                 "size"],
                f"the schedule ends after 1/{world} of the training", replica.place(rank, own[0].place),
                about=replica.group, ranks=replica.ranks,
            )  # fmt: skip
            return


# -- counted targets -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """The counted targets of one step. number: of the step; counts: rank → how many; loss: of the first rank."""

    number: int
    counts: dict[int, float]
    loss: CountedLoss

    @property
    def apart(self) -> float:
        return max(self.counts.values()) / min(self.counts.values())

    def factor(self, rank: int) -> float:
        """What a target of a rank weighs in DDP's mean, over what it weighs in a mean over all targets."""
        return sum(self.counts.values()) / (len(self.counts) * self.counts[rank])


@alone
def _tokens(replica: Replica) -> Iterator[Seen]:
    """Each rank's loss is a mean over its own count, and the counts differ."""
    if replica.kind != "ddp" or any(f.joins or _has_own_hook(f.hook) for f in replica.facts.values()):
        return
    if all(f.size <= 1 for some in replica.training.values() for f in some):
        return  # one sequence on each rank: a mean over each may be meant
    index = {rank: _of_model(replica, rank) for rank in replica.records}
    for number in range(max((loss.index for some in index.values() for loss in some), default=-1) + 1):
        rows = [_losses_before(step, index, number) for step in replica.steps]
        known = [row for row in rows if all(row[1].values())]
        bad = [one for row in known if (one := _counts(*row)) is not None and one.apart >= APART]
        if len(bad) >= max(FEWEST, len(known) / 2):
            yield _say_tokens(replica, len(known), bad)
            return


def _has_own_hook(hook: str) -> bool:
    return bool(hook) and not hook.startswith("torch.")


def _of_model(replica: Replica, rank: int) -> list[CountedLoss]:
    """Losses whose backward came through the model."""
    record, own = replica.records[rank], replica.facts[rank].number
    backs = [b.at for b in record.backwards if b.model == own]
    return [loss for loss in record.losses if loss.form and any(loss.at < at < loss.ended for at in backs)]


def _losses_before(
    step: AlignedStep, losses: Mapping[int, Sequence[CountedLoss]], index: int
) -> tuple[int, dict[int, list[CountedLoss]]]:
    return step.number, {
        rank: [e for e in step.between(rank, some) if e.index == index] for rank, some in losses.items()
    }


def _counts(number: int, of: Mapping[int, Sequence[CountedLoss]]) -> Counted | None:
    """The counts before a step, if each rank's targets weigh the same in all: then its loss is a mean over its own."""
    every = [each for some in of.values() for each in some]
    if any(each.odd or not each.count > 0 or not each.weight for each in every):
        return None
    if all(each.count >= each.whole for each in every) or len({each.form for each in every}) > 1:
        return None
    sums = [sum(abs(each.weight) * each.count for each in some) for some in of.values()]
    if max(sums) > 1.001 * min(sums):
        return None
    first = of[min(of)][0]
    return Counted(number, {rank: sum(each.count for each in some) for rank, some in of.items()}, first)


def _say_tokens(replica: Replica, steps: int, bad: Sequence[Counted]) -> Seen:
    worst = max(bad, key=lambda row: row.apart)
    rank = max(worst.counts, key=lambda r: abs(log(worst.factor(r))))
    first = bad[0]
    return make(
        "unequal-tokens", "each rank's loss is a mean over its own count of targets, and the counts differ",
        [f"counted targets ({first.loss.form}) at step {first.number}: {by_value(first.counts)}",
         f"at {len(bad)} of {counted(steps, 'optimizer step')} the largest count is at least {APART:g} times the "
         f"smallest; {worst.apart:.3g} times at step {worst.number}",
         "the factors in the graph make each rank's targets weigh the same in all, whatever their number"],
        f"at step {worst.number} a target of rank {rank} weighs {worst.factor(rank):.3g} times as much as in a mean "
        "over the targets of all ranks",
        replica.place(min(worst.counts), first.loss.place), about=replica.group, ranks=replica.ranks,
    )  # fmt: skip


# -- collectives in the graph, and crossed ---------------------------------------------------------


@alone
def _graph(view: RanksView) -> Iterator[Seen]:
    """A loss that was reduced, and that backward reaches with another factor than 1: as 1 changes nothing."""
    calls = {
        r: [c for c in rec.calls if c.what == "graph reduced" and _detail(c)[1:] != (1.0,)]
        for r, rec in view.records.items() if rec.step_counts
    }  # fmt: skip
    some = {r: each for r, each in calls.items() if each}
    if not some:
        return
    rank = min(some)
    first = some[rank][0]
    groups = [c for c in view.records[rank].collectives if c.place == first.place]
    world = len(groups[0].group) if groups else len(view.records)
    yield make(
        "reduced-in-graph", "a tensor of the loss's graph is reduced over ranks, in place, before backward",
        [f"backward ran through a tensor that {_detail(first)[0]} had reduced, {counted(len(some[rank]), 'time')} on "
         f"rank {rank}; autograd does not know of the reduction"],
        f"the gradient is that of the rank's own loss, and what divides the sum by {world} divides the gradient too "
        f"(1/{world} of the mean)", view.records[rank].at(first.place), ranks=tuple(some),
    )  # fmt: skip


@alone
def _gather(view: RanksView) -> Iterator[Seen]:
    calls = {r: [c for c in rec.calls if c.what == "gather cuts"] for r, rec in view.records.items()}
    some = {r: each for r, each in calls.items() if each}
    if not some:
        return
    rank = min(some)
    first = some[rank][0]
    yield make(
        "gather-cuts-gradient", "gathered values take part in the loss, and no gradient leads through the gather",
        [f"a tensor of shape {first.detail} that requires a gradient was gathered, and backward used the other ranks' "
         f"values, {counted(len(some[rank]), 'time')} on rank {rank}"],
        "what the other ranks' samples should add to the gradient is missing", view.records[rank].at(first.place),
        ranks=tuple(some),
    )  # fmt: skip


@alone
def _crossed(view: RanksView) -> Iterator[Seen]:
    by: dict[tuple[int, ...], dict[int, list[GroupCall]]] = {}
    for rank, record in view.records.items():
        for each in record.collectives:
            by.setdefault(each.group, {}).setdefault(rank, []).append(each)
    for group, found_on in by.items():
        if len(group) < 2 or set(found_on) != set(group):
            continue
        lines = {r: [view.records[r].at(c.place) for c in some] for r, some in found_on.items()}
        for i, row in enumerate(zip(*lines.values(), strict=False)):
            if len(set(row)) == 1:
                continue
            rows = dict(zip(lines, row, strict=True))
            calls = {r: some[i] for r, some in found_on.items()}
            one_function = len({(p.file, p.function) for p in row}) == 1  # there they may be branches that take turns
            if not one_function and _are_crossed(lines, rows) and len({(c.op, c.shape) for c in calls.values()}) == 1:
                yield _say_crossed(i, rows, calls)
            break


def _are_crossed(lines: Mapping[int, Sequence[object]], row: Mapping[int, object]) -> bool:
    """Whether each rank calls the other's line as well, at another time: then it is no branch for one rank."""
    ranks = list(row)
    counts = {r: Counter(lines[r]) for r in ranks}
    return all(counts[a][row[b]] for a in ranks for b in ranks)


def _say_crossed(i: int, rows: dict[int, Place], calls: dict[int, GroupCall]) -> Seen:
    first = next(iter(calls.values()))
    shown = by_value(rows)
    return make(
        "collectives-crossed", f"ranks meet in one {first.name} from different lines",
        [f"collective {i} of the group, {first.name} of {first.shape}: {shown}",
         "each of these ranks calls the other's line as well, in another order"],
        f"{rank_words(list(rows))} reduce values that do not belong together", next(iter(rows.values())),
        ranks=tuple(rows),
    )  # fmt: skip
