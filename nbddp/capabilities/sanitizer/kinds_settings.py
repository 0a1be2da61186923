"""Numbers that a program sets, and that differ by rank: of modules, of a data set's classes and scales; and optimizers
that hold what a model's parameters were. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nbddp.capabilities.sanitizer.kinds_drift import by_value
from nbddp.capabilities.sanitizer.recording import Pass
from nbddp.capabilities.sanitizer.rules import Seen, alone, make
from nbddp.capabilities.sanitizer.view import RanksView, Replica, difference, percent, place_of
from nbddp.launch.machine import counted
from nbddp.launch.topology import rank_words

APART = 1e-6  # of a statistic
STEPS = 2  # before which gradients were averaged by hand


def found(view: RanksView) -> Iterator[Seen]:
    yield from _by_hand(view)
    for replica in view.replicas:
        yield from _modules(replica)
        yield from _outdated(replica)
        if not view.same_input:
            yield from _data(view, replica)


@alone
def _by_hand(view: RanksView) -> Iterator[Seen]:
    """Parameters whose gradients the program averages itself, and that were never equal."""
    first = next(iter(view.records.values()))
    for group in dict.fromkeys(each.group for each in first.averaged):
        of = {r: [a for a in view.records[r].averaged if a.group == group] for r in group if r in view.records}
        least = min(map(len, of.values()))
        if len(group) < 2 or len(of) < len(group) or least < STEPS:
            continue
        rows = [{rank: some[i] for rank, some in of.items()} for i in range(least)]
        if any(len({(a.optimizer, a.shapes, a.number) for a in row.values()}) > 1 for row in rows):
            continue
        apart = [difference({rank: a.values for rank, a in row.items()}, ()) for row in rows]
        if any(each is None for each in apart):
            continue
        rank, differs = min(of), apart[0]
        yield make(
            "replicas-differ", "the ranks' copies of a model differ, whose gradients the program averages",
            [f"before each of the first {least} steps the gradients of all {rows[0][rank].number} parameters of an "
             f"optimizer were all-reduced over {rank_words(list(group))}",
             f"the parameters differed at each of these steps, {differs.words}"],  # type: ignore[union-attr]
            "equal gradients of unequal models keep them apart, and the model that is saved is rank 0's",
            view.records[rank].at(rows[0][rank].place), ranks=tuple(of),
            cure="give all ranks the same start: for p in model.parameters(): dist.broadcast(p.data, 0)",
        )  # fmt: skip
        return


@alone
def _modules(replica: Replica) -> Iterator[Seen]:
    looks = {rank: dict(facts.numbers) for rank, facts in replica.facts.items()}
    for at in sorted(set.intersection(*(set(each) for each in looks.values()))):
        of = {rank: each[at] for rank, each in looks.items()}
        first = next(iter(of.values()))
        if any(each.keys() != first.keys() for each in of.values()):
            return
        bad = [name for name in first if len({each[name] for each in of.values()}) > 1]
        if not bad or not all(len(some) > at for some in replica.training.values()):
            continue
        rank = min(of)
        yield make(
            "modules-differ", f"modules of {replica.title} have other numbers on each rank: {bad[0]}",
            [f"{name}: {by_value({r: each[name] for r, each in of.items()})}" for name in bad[:4]]
            + [f"at training forward {at}; of {counted(len(first), 'number')} of modules {len(bad)} differed"],
            "the ranks average gradients of different models",
            replica.place(rank, replica.training[rank][at].place), about=replica.group, ranks=replica.ranks,
        )  # fmt: skip
        return


@alone
def _outdated(replica: Replica) -> Iterator[Seen]:
    """An optimizer whose parameters have the shapes of the model's, and never a gradient."""
    calls = {rank: replica.calls("idle optimizer", rank) for rank in replica.ranks}
    own = {rank: [c for c in some if c.detail == replica.facts[rank].number] for rank, some in calls.items()}
    trained = all(
        any(b.model == replica.facts[rank].number for b in record.backwards) for rank, record in replica.records.items()
    )
    if any(replica.optimizers.values()) or not all(own.values()) or not trained:
        return
    rank = min(own)
    yield make(
        "optimizer-outdated", f"the optimizer holds what the parameters of {replica.title} were before fully_shard",
        [f"its parameters have the shapes of {replica.title}'s, and are none of them",
         "none of them had a gradient at the optimizer's first steps; the model's own had a backward",
         f"no optimizer holds the parameters of {replica.title}"],
        "no step moves the model", replica.place(rank, own[rank][0].place), about=replica.group, ranks=replica.ranks,
    )  # fmt: skip


@alone
def _data(view: RanksView, replica: Replica) -> Iterator[Seen]:
    for some in view.passes(replica):
        if len({each.length for each in some.values()}) > 1:
            continue
        yield from _classes(view, replica, some)
        if all(each.replicas for each in some.values()):
            yield from _scales(view, replica, some)
            yield from _lists(view, replica, some)
        return


@alone
def _classes(view: RanksView, replica: Replica, some: dict[int, Pass]) -> Iterator[Seen]:
    """The same classes with other numbers."""
    maps = [each.classes for each in some.values()]
    common = [name for name in maps[0] if all(name in each for each in maps)]
    bad = [n for n in common if len({each[n][0] for each in maps}) == 1 and len({each[n][1] for each in maps}) > 1]
    if bad:
        yield make(
            "dataset-differs", f"the ranks' data sets number the same classes in another order ({bad[0]})",
            [f"dataset.{bad[0]} has the same keys on all ranks, and the same numbers, but not at the same keys"],
            "what is class 0 on one rank is another on the next, so the ranks train on contradicting labels",
            place_of(view, some), about=replica.group, ranks=tuple(some),
            cure="sort the names before they are numbered: {name: i for i, name in enumerate(sorted(names))}",
        )  # fmt: skip


@alone
def _lists(view: RanksView, replica: Replica, some: dict[int, Pass]) -> Iterator[Seen]:
    """The same files in another order, or other choices of a data set, behind samplers that share it out."""
    maps = [each.lists for each in some.values()]
    for name in maps[0]:
        if any(name not in each for each in maps) or len({each[name][1] for each in maps}) == 1:
            continue
        same = len({each[name][0] for each in maps}) == 1
        if not same and name != "indices":
            continue  # texts may be drawn for a sample
        if name != "indices" and (not maps[0][name][0] or _has_equal(maps)):
            continue  # what is equal on all ranks may be the samples, and this one drawn for them
        length, world = next(iter(some.values())).length, len(some)
        yield make(
            "dataset-differs", f"the ranks' data sets list their samples in another order (dataset.{name})" if same
            else "the ranks' data sets are different choices of samples (Subset.indices)",
            [f"dataset.{name} has the same {length} entries on all ranks, in another order" if same
             else f"each rank's Subset has {length} indices, and not the same ones",
             f"the DistributedSamplers split it for {world} ranks, by position"],
            "the ranks' parts overlap, and other samples are missing" if same else
            f"each rank trains on 1/{world} of its own choice, and the rest of it is never used", place_of(view, some),
            about=replica.group, ranks=tuple(some),
            cure="sort the files on all ranks" if same else "split once: give the sampler the whole data set",
        )  # fmt: skip
        return


def _has_equal(maps: Sequence[dict[str, tuple[int, int]]]) -> bool:
    """Whether something else with an entry for each sample is in one order on all ranks."""
    return any(all(each.get(name) == numbers for each in maps) for name, numbers in maps[0].items())


@alone
def _scales(view: RanksView, replica: Replica, some: dict[int, Pass]) -> Iterator[Seen]:
    """Other statistics of the parts that samplers take of one data set."""
    of = {rank: each.statistics for rank, each in some.items()}
    first = next(iter(of.values()))
    for name, numbers in first.items():
        others = [each.get(name, []) for each in of.values()]
        if any(len(each) != len(numbers) for each in others):
            continue
        apart = [max(row) - min(row) for row in zip(*others, strict=True)]
        sizes = [max(map(abs, row)) for row in zip(*others, strict=True)]
        if max(apart, default=0.0) <= APART * max(sizes, default=0.0):
            continue
        i = apart.index(max(apart))
        yield make(
            "dataset-differs", f"the ranks' data sets are scaled by other numbers ({name})",
            [f"number {i} of dataset.{name}: {by_value({r: each[name][i] for r, each in of.items()})}; up to "
             f"{percent(apart[i] / max(sizes))} of the largest apart",
             "each rank's sampler takes its part of one data set"],
            "the ranks feed the model the same sample as different inputs", place_of(view, some),
            about=replica.group, ranks=tuple(some), cure="compute the statistics of all samples, on all ranks alike",
        )  # fmt: skip
        return
