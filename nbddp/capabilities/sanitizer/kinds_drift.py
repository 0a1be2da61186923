"""Replicas that drift apart although gradients were exchanged. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from nbddp.capabilities.sanitizer.recording import NOWHERE, BesideModule, CalledFunction, Place, Sample
from nbddp.capabilities.sanitizer.rules import Seen, alone, make
from nbddp.capabilities.sanitizer.view import (
    AlignedStep,
    RanksView,
    Replica,
    difference,
    exempt,
    norms,
    picked,
    shown_steps,
)
from nbddp.launch.machine import counted, listed
from nbddp.launch.topology import rank_words

APART = "from then on the ranks train different models, and the one that is saved is rank 0's"
LEAST = 4  # forwards beside which a module is compared
CAUSES = ("the optimizer's numbers", "the number of steps", "gradients", "edits between steps")


def found(view: RanksView) -> Iterator[Seen]:
    for replica in view.replicas:
        if replica.kind == "ddp":
            yield from _order(replica)
            yield from _counts(replica, view)
            yield from _turns(replica)
            yield from _held(replica)
            yield from _started(replica)
            yield from _beside(replica)
            yield from _scales(replica)
            yield from _edited(replica)
            yield from _lost(replica)
            yield from _hyper(replica)
            yield from _changed(replica)
            yield from _state(replica)
            yield from _buffers(replica)
            yield from _ends(replica)
        elif replica.kind == "fsdp2":
            yield from _sharded_hyper(replica)
            yield from _clipped_shards(replica)


def by_value(values: Mapping[int, object]) -> str:
    """`0.1 on rank 0, 0.05 on ranks 1, 2`."""
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(f"{value:.6g}" if isinstance(value, float) else str(value), []).append(rank)
    return ", ".join(f"{value} on {rank_words(ranks)}" for value, ranks in groups.items())


@alone
def _order(replica: Replica) -> Iterator[Seen]:
    if len({facts.order for facts in replica.facts.values()}) > 1:
        rows = [facts.names for facts in replica.facts.values()]
        at = next((i for i, names in enumerate(zip(*rows, strict=False)) if len(set(names)) > 1), None)
        names = {} if at is None else {rank: facts.names[at] for rank, facts in replica.facts.items()}
        yield make(
            "parameter-order",
            f"the ranks' {replica.title} have parameters with different names or in a different order",
            [f"parameter {at}: {by_value(names)}" if at is not None else "the names differ"],
            "DDP exchanges parameters by their position, so gradients of different parameters are averaged",
            replica.any_place({r: f.place for r, f in replica.facts.items()}), about=replica.group, ranks=replica.ranks,
        )  # fmt: skip


@alone
def _counts(replica: Replica, view: RanksView) -> Iterator[Seen]:
    counts = replica.counts
    if not view.ended_well or len(set(counts.values())) < 2 or any(f.joins for f in replica.facts.values()):
        return
    most = max(counts.values())
    rank = max(counts, key=lambda r: counts[r])
    own = [s for s in replica.records[rank].steps if s.optimizer in replica.optimizers[rank]]
    least = min(counts.values())
    extra = own[least:] or own
    place = replica.place(rank, extra[0].place) if extra else NOWHERE
    yield make(
        "steps-differ", "ranks made different numbers of optimizer steps",
        [f"steps that moved {replica.title}: {by_value(counts)}"],
        f"up to {most - least} of {most} steps are missing on some ranks; {APART}", place,
        about=replica.group, ranks=replica.ranks,
    )  # fmt: skip


@alone
def _turns(replica: Replica) -> Iterator[Seen]:
    """Steps that the ranks make after other numbers of exchanges: each skips steps of its own."""
    if len(set(replica.counts.values())) > 1:
        return  # which the kind says anyhow
    bad = [s for s in replica.steps if s.grads is not None and len(set(_exchanges(s).values())) > 1]
    if not bad:
        return
    step = bad[0]
    rank = min(step.steps)
    yield make(
        "steps-differ", "ranks make their optimizer steps at different times",
        [f"exchanges before step {step.number} since the one before: {by_value(_exchanges(step))}",
         shown_steps(bad, replica)],
        f"what one rank skips, another steps by; {APART}", replica.place(rank, step.steps[rank].place),
        about=replica.group, ranks=replica.ranks,
    )  # fmt: skip


def _exchanges(step: AlignedStep) -> dict[int, object]:
    return {rank: sum(1 for back in backs if back.armed) for rank, backs in step.backs.items()}


# -- optimizers that hold other parameters, models that begin apart --------------------------------


@alone
def _held(replica: Replica) -> Iterator[Seen]:
    """Optimizers of one model that have other parameters, or have them in groups with other numbers."""
    for i in range(max(map(len, replica.optimizers.values()), default=0)):
        of = {rank: _groups(replica, rank, some[i]) for rank, some in replica.optimizers.items() if i < len(some)}
        if len(of) < len(replica.ranks) or not all(of.values()):
            continue
        names = list(dict.fromkeys(name for each in of.values() for name in each))
        bad = [name for name in names if len({each.get(name) for each in of.values()}) > 1]
        if (seen := _moved_apart(replica, of, bad)) is None:
            continue
        first = {rank: f"group {each[bad[0]]}" if bad[0] in each else "none" for rank, each in of.items()}
        rank = min(replica.ranks)
        place = next(s.place for s in replica.records[rank].steps if s.optimizer == replica.optimizers[rank][i])
        yield make(
            "optimizer-differs", f"the ranks' optimizers of {replica.title} hold other parameters, or hold them in "
            "groups with other numbers",
            [f"of {counted(len(names), 'parameter')} {len(bad)} {'is' if len(bad) == 1 else 'are'} held in another "
             f"way; {bad[0]}: {by_value(first)}", seen],
            APART, replica.place(rank, place), about=replica.group, ranks=replica.ranks,
        )  # fmt: skip
        return


def _groups(replica: Replica, rank: int, optimizer: int) -> dict[str, int]:
    number = replica.facts[rank].number
    held = (h for h in replica.records[rank].held if (h.optimizer, h.model) == (optimizer, number))
    return next((h.groups for h in held), {})


def _moved_apart(replica: Replica, of: Mapping[int, Mapping[str, int]], bad: Sequence[str]) -> str | None:
    """That such a parameter became unequal by it: at a step, or as it never moved where no optimizer has it."""
    for step in replica.steps:
        if step.after is not None and step.before is None and step.grads is None and step.after.name in bad:
            return f"parameters were equal before step {step.number}, and differed after it, {step.after.words}"
    for name in bad:
        lack = [rank for rank, each in of.items() if name not in each]
        moved = {rank: _has_moved(replica, rank, name) for rank in of}
        if lack and all(moved[rank] is (rank not in lack) for rank in of) and len(lack) < len(of):
            return f"{name} never changed on {rank_words(lack)}, and did on the others"
    return None


def _has_moved(replica: Replica, rank: int, name: str) -> bool | None:
    """Whether a parameter has another value in the end than when DDP was made; None if unknown."""
    facts = replica.facts[rank]
    start, end = norms(facts.start, facts.start_names, [name]), norms(facts.ends, facts.end_names, [name])
    return _differs(start, end) if start and end and not facts.made_before else None


@alone
def _started(replica: Replica) -> Iterator[Seen]:
    """Copies that DDP did not make equal."""
    if any(facts.made_before for facts in replica.facts.values()) or not replica.steps or exempt(replica):
        return
    step, first = replica.steps[0], next(iter(replica.facts.values()))
    start = {r: picked(f.start, f.start_names, first.start_names) for r, f in replica.facts.items()}
    if step.before is None or (differs := difference(start, first.start_names)) is None:
        return
    yield make(
        "replicas-differ", f"the ranks' copies of {replica.title} differ from the start",
        [f"when DDP was made, {differs.number} of {counted(differs.of, 'parameter')} differed, {differs.words}",
         f"they still differed before step {step.number}; DDP(model) copies rank 0's values unless init_sync=False"],
        "equal gradients of unequal models keep them apart, and the model that is saved is rank 0's",
        replica.any_place({r: f.place for r, f in replica.facts.items()}), about=replica.group, ranks=replica.ranks,
        cure="remove init_sync=False, or give all ranks' models the same values first",
    )  # fmt: skip


@alone
def _beside(replica: Replica) -> Iterator[Seen]:
    """A module without gradients that the ranks call beside the model, with values of their own."""
    found = {rank: record.beside for rank, record in replica.records.items()}
    for row in zip(*found.values(), strict=False):
        some = dict(zip(found, row, strict=True))
        first = row[0]
        if any((m.title, m.names) != (first.title, first.names) for m in row):
            return  # the ranks call other modules
        if (left := _average_left(replica, some)) is not None:
            yield left
            return
        if not all(_is_used(replica, rank, m) for rank, m in some.items()):
            continue
        differs = difference({rank: m.values[0] for rank, m in some.items()}, first.names)
        if exempt(replica):
            continue
        if differs is None:
            yield from _left_behind(replica, some)
            yield from _drifted(replica, some)
            continue
        if not all(_stays(m) for m in some.values()):
            continue
        rank = min(some)
        yield make(
            "frozen-differs", f"{first.title}, which is called beside {replica.title}, has other values on each rank",
            [f"{differs.number} of {counted(differs.of, 'tensor')} that need no gradient, {differs.words}",
             f"called {counted(first.calls, 'time')} on rank {rank}; its values did not change"],
            f"if the loss depends on it, the ranks average gradients of different losses of {replica.title}",
            replica.place(rank, first.place), about=replica.group, ranks=replica.ranks,
        )  # fmt: skip
        return


def _average_left(replica: Replica, some: Mapping[int, BesideModule]) -> Seen | None:
    """An average of the model that moves on some ranks, and on others is what the model was when DDP was made."""
    first = next(iter(some.values()))
    moved = [rank for rank, m in some.items() if not _stays(m)]
    stay = [rank for rank in some if rank not in moved]
    lines = {replica.place(rank, m.place) for rank, m in some.items()}
    if not moved or not stay or len(lines) > 1 or min(m.calls for m in some.values()) < 2 or not first.names:
        return None
    for rank in stay:
        start = norms(replica.facts[rank].start, replica.facts[rank].start_names, first.names)
        if not start or _differs(start, norms(some[rank].values[-1], first.names, first.names)):
            return None
    rank = min(some)
    return make(
        "frozen-differs",
        f"{first.title}, which is called beside {replica.title}, follows it on {rank_words(moved)} alone",
        [f"on {rank_words(stay)} its values were those that {replica.title} had when DDP was made, at all of its first "
         f"{some[stay[0]].calls} calls",
         f"on {rank_words(moved)} they changed between calls"],
        f"what it gives is that of a model that was never trained, on {rank_words(stay)}",
        replica.place(rank, some[rank].place), about=replica.group, ranks=replica.ranks,
        cure="update it on all ranks alike, or call it on the ranks that update it",
    )  # fmt: skip


@alone
def _left_behind(replica: Replica, some: Mapping[int, BesideModule]) -> Iterator[Seen]:
    """One that was equal on all ranks, and then moved on some of them alone, as an average that rank 0 keeps."""
    moved = [rank for rank, m in some.items() if not _stays(m)]
    last = min(len(m.values) for m in some.values()) - 1
    first = next(iter(some.values()))
    differs = difference({rank: m.values[last] for rank, m in some.items()}, first.names)
    if differs is None or len(moved) == len(some):
        return
    yield make(
        "frozen-differs",
        f"{first.title}, which is called beside {replica.title}, changes on {rank_words(moved)} alone",
        [f"its values were equal at its first call; at call {2**last} {differs.number} of "
         f"{counted(differs.of, 'tensor')} differed, {differs.words}"],
        f"if the loss depends on it, the ranks average gradients of different losses of {replica.title}",
        replica.place(min(some), first.place), about=replica.group, ranks=replica.ranks,
        cure="update it on all ranks alike, or broadcast it: for t in module.state_dict().values(): "
        "dist.broadcast(t, 0)",
    )  # fmt: skip


@alone
def _drifted(replica: Replica, some: Mapping[int, BesideModule]) -> Iterator[Seen]:
    """A copy of the model that was equal on all ranks, and moves on each in another way; the model stays equal."""
    first = next(iter(some.values()))
    if any(_stays(m) or m.loaded or not _is_copy(replica, rank, m) for rank, m in some.items()):
        return
    if not replica.steps or any(s.before is not None or s.after is not None for s in replica.steps):
        return
    looks = range(min(len(m.values) for m in some.values()))
    apart = [(i, d) for i in looks if (d := difference({r: m.values[i] for r, m in some.items()}, first.names))]
    if not apart or apart[-1][0] != looks[-1]:
        return
    look, differs = apart[0]
    yield make(
        "frozen-differs",
        f"{first.title}, which is called beside {replica.title}, follows it in another way on each rank",
        [f"it had the values of {replica.title} at its first call; at call {2**look} {differs.number} of "
         f"{counted(differs.of, 'tensor')} differed between ranks, {differs.words}",
         f"{replica.title} was equal on all ranks at all {counted(len(replica.steps), 'compared step')}"],
        f"if the loss depends on it, the ranks average gradients of different losses of {replica.title}",
        replica.place(min(some), first.place), about=replica.group, ranks=replica.ranks,
        cure="update it on all ranks at the same point of a step, by the same numbers",
    )  # fmt: skip


def _is_copy(replica: Replica, rank: int, module: BesideModule) -> bool:
    """Whether a module had the model's first values at its first call."""
    facts = replica.facts[rank]
    start = norms(facts.start, facts.start_names, module.names)
    return bool(start) and not _differs(start, norms(module.values[0], module.names, module.names))


def _stays(module: BesideModule) -> bool:
    return all(not _differs(module.values[0], each) for each in module.values[1:])


def _is_used(replica: Replica, rank: int, module: BesideModule) -> bool:
    """Whether it is called about as often as the model trains."""
    return len(module.values) > 1 and 2 * module.calls >= len(replica.training[rank]) >= LEAST


@alone
def _scales(replica: Replica) -> Iterator[Seen]:
    scales = {rank: replica.calls("scale", rank) for rank in replica.ranks}
    for i, some in enumerate(zip(*scales.values(), strict=False)):
        values = {rank: _number(call.detail) for rank, call in zip(scales, some, strict=True)}
        if len(set(values.values())) > 1:
            yield make(
                "scales-differ", "GradScaler has different scales on the ranks",
                [f"scale at update {i}: {by_value(values)}"],
                "each rank divides the same gradients by another number, or skips a step alone",
                replica.any_place({rank: call.place for rank, call in zip(scales, some, strict=True)}),
                about=replica.group, ranks=replica.ranks,
            )  # fmt: skip
            return


def _number(value: object) -> object:
    return value[0] if isinstance(value, list) and value else value


@alone
def _edited(replica: Replica) -> Iterator[Seen]:
    """Gradients that were equal when backward had ended."""
    some = [
        step for step in replica.steps
        if step.grads is not None and step.armed_last() and step.is_known_after_backward() and step.exchanged is None
        and step.arrived() and not (all(step.again.values()) and step.again)
    ]  # fmt: skip
    if not some or exempt(replica):
        return
    rank = min(some[0].steps)
    calls = _between(replica, some[0], rank)
    names = listed(list(dict.fromkeys(call.what for call in calls)))
    back, step = some[0].backs[rank][-1], some[0].steps[rank]
    where = f"between backward ({replica.place(rank, back.place)}) and step ({replica.place(rank, step.place)})"
    yield make(
        "edited-gradients",
        f"gradients are changed by numbers that differ between ranks, {'by ' + names if calls else where}",
        [
            f"gradients were equal on all ranks when backward ended at these {counted(len(some), 'step')}",
            shown_steps(some, replica),
            f"{names} ran {where}" if calls else "no call that edits gradients was seen there, so the program's own "
            "lines did",
        ],
        APART, replica.place(rank, calls[0].place if calls else step.place), about=replica.group, ranks=replica.ranks,
    )  # fmt: skip


EDITS = ("clip_grad_norm_", "clip_grad_value_", "GradScaler.unscale_", "gradient reduced")


def _between(replica: Replica, step: AlignedStep, rank: int) -> list[CalledFunction]:
    ended = step.backs[rank][-1].ended
    return [c for c in replica.records[rank].calls if c.what in EDITS and ended < c.at < step.steps[rank].at]


@alone
def _lost(replica: Replica) -> Iterator[Seen]:
    """An exchange that all ranks had made, after which gradients differ."""
    some = [
        step for step in replica.steps
        if step.grads is not None and step.armed_last() and step.exchanged is not None
        and not any(step.pasts.values())
    ]  # fmt: skip
    if not some or exempt(replica):
        return
    first = some[0]
    rank = min(first.steps)
    hooks = {facts.hook for facts in replica.facts.values() if facts.hook}
    hook = next((f for f in replica.facts.values() if f.hook), None)
    place = replica.place(rank, hook.hook_place if hook else first.backs[rank][-1].place)
    yield make(
        "lost-result", f"gradients of {replica.title} differ after DDP has exchanged them",
        [
            f"all ranks exchanged before {len(some)} of {counted(len(replica.steps), 'step')}",
            shown_steps(some, replica),
            *([f"a communication hook is registered: {listed(sorted(hooks))}"] if hooks else []),
        ],
        APART, place, about=replica.group, ranks=replica.ranks, known=False,
        ruled_out=["forwards past DDP", "no_sync", "edits between backward and step"],
    )  # fmt: skip


@alone
def _hyper(replica: Replica) -> Iterator[Seen]:
    for step in replica.steps:
        differs = step.hyper()
        if differs:
            drift = next((s for s in replica.steps if s.number >= step.number and s.after is not None), None)
            if drift is None and difference(*_ends_of(replica, True)) is None:
                return  # a number that moves nothing, as the rank that an optimizer keeps
            name, values = differs[0]
            more = [f"{n}: {by_value(v)}" for n, v in differs[1:4]]
            seen = [f"{name} at step {step.number}: {by_value(values)}", *more]
            if drift is not None:
                seen.append(f"parameters differed after step {drift.number}, {drift.after.words}")  # type: ignore[union-attr]
            yield make(
                "hyperparameters-differ", f"{name} differs between ranks from step {step.number} on", seen, APART,
                _of_schedulers(replica, step), about=replica.group, ranks=replica.ranks,
            )  # fmt: skip
            return


MOVES = ("lr", "momentum", "weight_decay", "betas", "eps", "dampening", "alpha")  # numbers by which a step moves


@alone
def _sharded_hyper(replica: Replica) -> Iterator[Seen]:
    """Numbers by which torch's optimizers move shards."""
    for step in replica.steps:
        differs = [(name, values) for name, values in step.hyper() if name.partition(" ")[0] in MOVES]
        if differs:
            name, values = differs[0]
            more = [f"{n}: {by_value(v)}" for n, v in differs[1:4]]
            yield make(
                "hyperparameters-differ", f"{name} differs between ranks from step {step.number} on",
                [f"{name} at step {step.number}: {by_value(values)}", *more],
                "each rank moves its shard of a parameter by another rule", _of_schedulers(replica, step),
                about=replica.group, ranks=replica.ranks,
            )  # fmt: skip
            return


CLIPS = 2  # steps at which shards were clipped


@alone
def _clipped_shards(replica: Replica) -> Iterator[Seen]:
    """Each rank clips its parts of the gradients by the norm of these parts alone."""
    own = {rank: [c for c in replica.calls("shards clipped", rank)
                  if len(_detail(c)) > 1 and _detail(c)[0] == replica.facts[rank].number]
           for rank in replica.ranks}  # fmt: skip
    rows = [{rank: 1 / max(1.0, float(str(_detail(c)[1]))) for rank, c in zip(own, row, strict=True)}
            for row in zip(*own.values(), strict=False)]  # fmt: skip
    bad = [row for row in rows if max(row.values()) > 1.001 * min(row.values())]
    if len(bad) < CLIPS:
        return
    rank = min(own)
    factors: dict[int, object] = {r: round(factor, 4) for r, factor in bad[0].items()}
    yield make(
        "edited-gradients", f"each rank clips its shards of {replica.title}'s gradients by their own norm",
        [f"clip_grad_norm_ had plain tensors, which are this rank's shards of gradients, {counted(len(rows), 'time')}",
         f"it multiplied them by {by_value(factors)}; so at {len(bad)} of these"],
        "the gradient of the whole model gets another direction, and its norm is not limited",
        replica.place(rank, own[rank][0].place), about=replica.group, ranks=replica.ranks,
        cure="clip_grad_norm_(model.parameters(), limit), whose norm is that of all shards",
    )  # fmt: skip


def _detail(call: CalledFunction) -> list[object]:
    return list(call.detail) if isinstance(call.detail, (list, tuple)) else [call.detail]


def _of_schedulers(replica: Replica, step: AlignedStep) -> Place:
    """The last scheduler's step before, else the optimizer's."""
    rank = min(step.steps)
    before = [c for c in replica.calls("scheduler", rank) if c.at < step.steps[rank].at]
    return replica.place(rank, before[-1].place if before else step.steps[rank].place)


@alone
def _changed(replica: Replica) -> Iterator[Seen]:
    """Parameters that differ before a step, and did not after the one before."""
    previous: AlignedStep | None = None
    for step in replica.steps:
        if step.before is not None:
            if previous is None:
                yield from _since_start(replica, step)
            elif previous.after is None and previous.names == step.earlier:
                last = {rank: part.after for rank, part in previous.parts.items()}
                yield _change(replica, step, last, f"after step {previous.number}", previous.steps)
            return
        previous = step


@alone
def _since_start(replica: Replica, step: AlignedStep) -> Iterator[Seen]:
    facts = replica.facts
    start = {rank: picked(each.start, each.start_names, step.earlier) for rank, each in facts.items()}
    if any(each.made_before for each in facts.values()) or not all(start.values()):
        return
    if difference(start, step.earlier) is not None:
        return
    yield _change(replica, step, start, "when DDP was made", {})


def _change(
    replica: Replica, step: AlignedStep, last: Mapping[int, Sample], when: str, since: Mapping[int, object]
) -> Seen:
    moved = [rank for rank, part in step.parts.items() if _differs(last[rank], part.before)]
    rank = min(moved or step.steps)
    begin = step.since[rank] if since else 0
    loads = [c for c in replica.calls("load_state_dict", rank) if begin < c.at < step.steps[rank].at
             and c.detail == replica.facts[rank].number]  # fmt: skip
    begun = getattr(since.get(rank), "place", 0) or replica.facts[rank].place
    a, b = replica.place(rank, begun), replica.place(rank, step.steps[rank].place)
    what = "load_state_dict" if loads else "the program"
    return make(
        "changed-parameters",
        f"{what} changed the parameters of {replica.title} on {rank_words(moved) if moved else 'the ranks'}"
        f"{' alone' if len(moved) < len(step.parts) else ' to different values'}, before step {step.number}",
        [
            f"equal on all ranks {when}; before step {step.number} they differed, {step.before.words}",  # type: ignore[union-attr]
            f"load_state_dict ran there on {rank_words([rank])}" if loads else f"changed between {a} and {b}",
        ],
        APART, replica.place(rank, loads[0].place) if loads else b, about=replica.group, ranks=tuple(moved),
    )  # fmt: skip


def _differs(one: Sample, two: Sample) -> bool:
    return difference({0: one, 1: two}, ()) is not None


@alone
def _state(replica: Replica) -> Iterator[Seen]:
    for step in replica.steps:
        if step.after is None:
            continue
        if step.before is None and step.grads is None and not step.hyper() and step.names == step.earlier:
            rank = min(step.steps)
            yield make(
                "optimizer-state-differs", f"step {step.number} moved equal parameters apart, by equal gradients",
                [f"after it parameters differed, {step.after.words}"],
                APART, replica.place(rank, step.steps[rank].place), about=replica.group, ranks=replica.ranks,
            )  # fmt: skip
        return


def _ends_of(replica: Replica, first: bool) -> tuple[dict[int, Sample], list[str]]:
    """Samples of parameters (first) or buffers when the program ended, and their names."""
    split = {rank: 2 * min(facts.parameters, len(facts.end_names)) for rank, facts in replica.facts.items()}
    samples = {
        rank: facts.ends[: split[rank]] if first else facts.ends[split[rank] :] for rank, facts in replica.facts.items()
    }
    facts = next(iter(replica.facts.values()))
    at = min(facts.parameters, len(facts.end_names))
    return samples, facts.end_names[:at] if first else facts.end_names[at:]


@alone
def _added_buffers(replica: Replica) -> Iterator[Seen]:
    """Buffers that DDP has not met, and broadcasts as little as parameters."""
    first = next(iter(replica.facts.values()))
    added = [name for name in first.buffer_names if name not in first.held_buffers]
    last = {rank: f.buffers[-1] if f.buffers else [] for rank, f in replica.facts.items()}
    own = {rank: picked(last[rank], f.buffer_names, added) for rank, f in replica.facts.items()}
    differs = None if first.made_before or not added else difference(own, added)
    if differs is not None:
        yield make(
            "buffers-differ", f"buffers that {replica.title} got after DDP was made differ between ranks",
            [f"{differs.number} of {counted(len(added), 'added buffer')} before step {first.buffer_steps[-1] - 1}, "
             f"{differs.words}",
             "DDP broadcasts the buffers that it has met when it was made"],
            "the ranks compute by other masks or statistics, and average gradients of different models",
            replica.any_place({r: f.place for r, f in replica.facts.items()}), about=replica.group, ranks=replica.ranks,
            cure="change the model first, then wrap it: ddp = DDP(model)",
        )  # fmt: skip


CLOSE = 0.5  # part of its size by which a buffer moves at a typical forward, at most, if it sums or averages


@alone
def _overwritten(replica: Replica) -> Iterator[Seen]:
    """Buffers of the program's own modules that each rank moves on from rank 0's values, which DDP then copies."""
    first = next(iter(replica.facts.values()))
    rows = list(zip(*(facts.own_buffers for facts in replica.facts.values()), strict=False))
    if not all(f.armed for some in replica.training.values() for f in some[: len(rows)]):
        return  # the forward after one within no_sync copies nothing
    if len(rows) < LEAST or any(facts.own_names != first.own_names for facts in replica.facts.values()):
        return
    for i, name in enumerate(first.own_names):
        if name not in first.read_buffers:
            continue
        cut = [[sample[2 * i : 2 * i + 2] for sample in row] for row in rows[1:]]
        rank0 = [sample[0] for sample in cut]
        moves = [max(_gap(value, before) for value in row) for row, before in zip(cut[1:], rank0, strict=False)]
        apart = [row for row in cut if max(_gap(value, row[0]) for value in row) > 1e-6]
        if len(apart) < len(cut) or not moves or median(moves) > CLOSE:
            continue  # equal at times, or written anew at each forward
        differs = difference(dict(zip(replica.ranks, cut[-1], strict=True)), [name])
        if differs is None:
            continue
        yield make(
            "buffers-differ",
            f"{name} of {replica.title} gathers statistics of each rank, and DDP keeps rank 0's alone",
            [f"at each of {counted(len(cut), 'training forward')} the ranks had moved it to different values, "
             f"{differs.words}",
             "then DDP's forward copied rank 0's to all ranks; the loss depends on it"],
            "what the other ranks add to it is lost: it describes rank 0's samples alone",
            replica.any_place({r: f.place for r, f in replica.facts.items()}), about=replica.group,
            ranks=replica.ranks, cure="all_reduce what is added to the buffer, in the module's forward",
        )  # fmt: skip
        return


def _gap(one: Sample, two: Sample) -> float:
    """How far two samples of a tensor are apart, as a part of the larger norm."""
    return max(abs(a - b) for a, b in zip(one, two, strict=True)) / max(abs(one[1]), abs(two[1]), 1e-30)


@alone
def _buffers(replica: Replica) -> Iterator[Seen]:
    if all(facts.broadcasts for facts in replica.facts.values()):
        yield from _added_buffers(replica)
        yield from _overwritten(replica)
        return
    differs, when = difference(*_ends_of(replica, False)), "when the program ended"
    first = next(iter(replica.facts.values()))
    if differs is None and not any(facts.ends for facts in replica.facts.values()):  # the model is gone
        for i, step in enumerate(first.buffer_steps):
            some = {r: f.buffers[i] for r, f in replica.facts.items() if i < len(f.buffers)}
            if len(some) == len(replica.facts) and (found := difference(some, first.buffer_names)) is not None:
                differs, when = found, f"before step {step - 1}"
    if differs is None:
        return
    yield make(
        "buffers-differ", f"buffers of {replica.title} differ between ranks, and DDP does not broadcast them",
        [f"{differs.number} of {counted(differs.of, 'buffer')} {when}, {differs.words}",
         "DDP was made with broadcast_buffers=False"],
        "each rank evaluates by its own statistics, and the saved ones are those of the rank that saves",
        replica.any_place({r: f.place for r, f in replica.facts.items()}), about=replica.group, ranks=replica.ranks,
    )  # fmt: skip


def _is_after_training(replica: Replica) -> bool:
    """Whether the copies were equal at every step: a rank that evaluates or exports may change its own afterwards."""
    whole = all(count == len(replica.steps) for count in replica.counts.values())
    return whole and all(step.after is None and step.before is None for step in replica.steps)


@alone
def _ends(replica: Replica) -> Iterator[Seen]:
    differs = difference(*_ends_of(replica, True))
    if differs is None or exempt(replica) or not any(replica.counts.values()):
        return
    names = set(next(iter(replica.facts.values())).ignored)
    if names and differs.name.removeprefix("module.") in names:
        return
    if any(record.ended for record in replica.records.values()) or _is_after_training(replica):
        return
    last = replica.steps[-1] if replica.steps else None
    place = replica.place(min(last.steps), last.steps[min(last.steps)].place) if last else NOWHERE
    yield make(
        "replicas-differ", f"the ranks' copies of {replica.title} differ when the program ends",
        [f"{differs.number} of {counted(differs.of, 'parameter')}, {differs.words}",
         f"they were equal at all {counted(len(replica.steps), 'compared step')}" if replica.steps
         and all(s.after is None for s in replica.steps) else "they differed at steps, too"],
        APART, place, about=replica.group, ranks=replica.ranks, known=False, ruled_out=CAUSES,
    )  # fmt: skip
