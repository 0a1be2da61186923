"""Losses that the ranks compute by other numbers: class weights, temperatures, smoothing, weights of terms. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nbddp.capabilities.sanitizer.kinds_drift import by_value
from nbddp.capabilities.sanitizer.recording import FURTHER, WHOLE, CalledFunction, Sample
from nbddp.capabilities.sanitizer.rules import Seen, alone, make
from nbddp.capabilities.sanitizer.view import RanksView, Replica, difference
from nbddp.launch.machine import counted

FEWEST = 4  # losses of a rank
APART = 1e-6  # of a number: equal programs have equal bits
Settings = tuple[int, tuple[tuple[str, float], ...]]  # the graph's form; its numbers, with names


def found(view: RanksView) -> Iterator[Seen]:
    for replica in view.replicas:
        yield from _class_weights(replica)
        yield from _settings(replica)


@alone
def _class_weights(replica: Replica) -> Iterator[Seen]:
    """Weights of classes that stay as they are on each rank, and are others on another."""
    for name in ("weight", "pos_weight"):
        calls = {rank: replica.calls(name, rank) for rank in replica.ranks}
        weights = {rank: [c.detail for c in some] for rank, some in calls.items()}
        if any(len(each) < FEWEST or each.count(each[0]) < len(each) for each in weights.values()):
            continue  # by batch, as a loss that balances each batch has them
        differs = difference({rank: _sample(each[0]) for rank, each in weights.items()}, [name])
        if differs is None:
            continue
        rank = min(calls)
        yield make(
            "loss-weights-differ", f"the ranks' losses have different weights of classes ({name})",
            [f"norms of {name}: {by_value(dict(differs.norms))}",
             f"they stayed the same in {counted(len(weights[rank]), 'loss')} of rank {rank}"],
            "the ranks average gradients of different losses", replica.place(rank, calls[rank][0].place),
            about=replica.group, ranks=replica.ranks,
        )  # fmt: skip
        return


@alone
def _settings(replica: Replica) -> Iterator[Seen]:
    """Graphs of one form, whose numbers stay as they are on each rank, and are others on another."""
    if replica.kind != "ddp" or len({f.size for some in replica.training.values() for f in some if f.size}) > 1:
        return  # numbers may be shares of the samples
    by = {rank: [_read(c) for c in replica.calls("loss settings", rank)] for rank in replica.ranks}
    forms = list(dict.fromkeys(form for some in by.values() for form, _ in some))
    for form in forms:
        own = {rank: [numbers for f, numbers in some if f == form] for rank, some in by.items()}
        if any(len(some) < FEWEST or len(set(some)) > 1 for some in own.values()):
            continue
        numbers = {rank: some[0] for rank, some in own.items()}
        at = _apart(list(numbers.values()))
        if at is None:
            continue
        rank = min(own)
        name = numbers[rank][at][0]
        calls = [c for c in replica.calls("loss settings", rank) if _read(c)[0] == form]
        yield make(
            "loss-settings-differ", f"the ranks compute one loss by different numbers: {name}",
            [f"{name}: {by_value({r: some[at][1] for r, some in numbers.items()})}",
             f"it stayed the same in {counted(len(calls), 'loss')} of rank {rank}; the rest of the graph has one form "
             "on all ranks"],
            "the ranks average gradients of different losses", replica.place(rank, calls[0].place),
            about=replica.group, ranks=replica.ranks,
        )  # fmt: skip
        return


def _read(call: CalledFunction) -> Settings:
    form, numbers = call.detail if isinstance(call.detail, (list, tuple)) else (0, ())
    return form, tuple((name, value) for name, value in numbers)


def _apart(numbers: Sequence[tuple[tuple[str, float], ...]]) -> int | None:
    """Which number differs, of those that all ranks have. A weight of the whole loss may be that of a rank's data, and
    then those of further terms tell nothing."""
    first = numbers[0]
    if any([name for name, _ in each] != [name for name, _ in first] for each in numbers):
        return None
    apart = [i for i in range(len(first)) if _differ([each[i][1] for each in numbers])]
    names = {first[i][0] for i in apart}
    left_out = (WHOLE, FURTHER) if WHOLE in names else ()
    return next((i for i in apart if first[i][0] not in left_out), None)


def _differ(values: Sequence[float]) -> bool:
    return max(values) - min(values) > APART * max(map(abs, values))


def _sample(detail: object) -> Sample:
    return list(detail) if isinstance(detail, list) else []
