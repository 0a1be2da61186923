"""Data that ranks share, repeat or see in a fixed order. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from nbddp.capabilities.sanitizer.kinds_drift import by_value
from nbddp.capabilities.sanitizer.recording import Forward, ModelFacts, Pass, Sample
from nbddp.capabilities.sanitizer.rules import Seen, alone, make
from nbddp.capabilities.sanitizer.view import RanksView, Replica, difference, percent, place_of
from nbddp.launch.machine import counted
from nbddp.launch.topology import rank_words

LEAST = 2  # batches that must have been seen
SHIFTS = 4  # times the shift and the ranks, that the compared batches must be
LEAKED = 0.2  # of the evaluated samples, at least
RESTORED = 4  # forwards with equal states, after others
LATEST = 1 << 60  # after all that happened
BY_CHANCE = 0.02  # at most, that equal samples of a data set all fall to different ranks
SAME = "the ranks learn from the same samples, so the step costs as before and learns little more than one rank would"


def found(view: RanksView) -> Iterator[Seen]:
    if not view.trains:
        return
    yield from _alone(view)
    if not view.same_input:
        for replica in view.replicas:
            yield from _samplers(view, replica)
            yield from _same_batch(view, replica)
            yield from _overlap(view, replica)
            yield from _all_of_it(view, replica)
            yield from _by_workers(view, replica)
            yield from _shifted(view, replica)
            yield from _augmentation(view, replica)
            yield from _mask(replica)
        yield from _evaluated(view)
    for replica in view.replicas:
        yield from _order(view, replica)


@alone
def _samplers(view: RanksView, replica: Replica) -> Iterator[Seen]:
    """What the samplers of a training loader say of themselves."""
    for some in view.passes(replica):
        if any(each.replicas is None for each in some.values()):
            continue
        said = {"about": replica.group, "ranks": tuple(some)}
        place = place_of(view, some)
        worlds = {rank: each.replicas for rank, each in some.items()}
        own = {rank: each.rank for rank, each in some.items()}
        equal = _equal_batches(some)
        shared = f"{equal} of {min(len(p.batches) for p in some.values())} batches were equal"
        if any(each not in (len(replica.group), _over(view, replica)) for each in worlds.values()):
            made_for = by_value(worlds)
            yield make(
                "sampler-world", f"the sampler splits the data for {made_for} replicas, not for {len(replica.group)}",
                [f"num_replicas is {made_for}, but the model has {len(replica.group)} ranks", shared],
                "ranks train on the same samples, or no rank trains on some", place, **said,  # type: ignore[arg-type]
            )  # fmt: skip
        elif len(set(own.values())) < len(own):
            yield make(
                "sampler-rank", "the samplers of several ranks take the same part of the data",
                [f"the sampler's rank: {by_value(own)}", shared], SAME, place, **said,  # type: ignore[arg-type]
            )  # fmt: skip
        seeds = {rank: each.seed for rank, each in some.items()}
        if len(set(seeds.values())) > 1 and all(each.shuffles for each in some.values()):
            yield make(
                "sampler-seed", "the ranks' samplers shuffle by different seeds, so their parts overlap",
                [f"the sampler's seed: {by_value(seeds)}"],
                "in an epoch some samples are seen by several ranks, and others by none", place, **said,  # type: ignore[arg-type]
            )  # fmt: skip
        lengths = {rank: each.length for rank, each in some.items()}
        if len(set(lengths.values())) > 1:
            yield make(
                "dataset-differs", "the ranks' data sets differ in length", [f"len(dataset): {by_value(lengths)}"],
                "each rank's sampler takes its part of another data set, so parts overlap or are missing", place,
                **said,  # type: ignore[arg-type]
            )  # fmt: skip
        return


@alone
def _alone(view: RanksView) -> Iterator[Seen]:
    """DDP models of groups of one rank, whose samplers split the data for all ranks."""
    found_on: dict[int, tuple[ModelFacts, Pass]] = {}
    for rank, record in view.records.items():
        own = {f.number: f for f in record.models if f.kind == "ddp" and f.group == (rank,)}
        of_it = [(own[m], p) for p in record.passes for m in p.models if m in own and p.replicas]
        if of_it:
            found_on[rank] = of_it[-1]
    world = len(view.records)
    if len(found_on) < world or world < 2 or any(p.replicas != world for _, p in found_on.values()):
        return
    facts = {rank: f for rank, (f, _) in found_on.items()}
    start = difference({rank: f.start for rank, f in facts.items()}, next(iter(facts.values())).start_names)
    end = difference({rank: f.ends or _last(view, rank, f) for rank, f in facts.items()}, ())
    exchanged = any(
        c.numel > LEAST and len(c.group) > 1 for record in view.records.values() for c in record.collectives
    )
    if start is not None or end is None or exchanged:
        return  # models of their own, or averaged by the program
    rank = min(facts)
    yield make(
        "sampler-world", f"the sampler splits the data for {world} ranks, and each rank's DDP has a group of its own",
        [f"num_replicas is {world}, but DDP's group on rank {rank} is {list(facts[rank].group)}",
         "the ranks' copies were equal when DDP was made, and differ after training; no gradient was exchanged"],
        f"each rank trains a model of its own, on 1/{world} of the data",
        view.records[rank].at(facts[rank].place), ranks=tuple(facts),
        cure="DDP(model) without process_group, or with the group of all ranks",
    )  # fmt: skip


def _last(view: RanksView, rank: int, facts: ModelFacts) -> Sample:
    """Of a model that is gone, its parameters after the last step."""
    parts = [part for step in view.records[rank].steps for part in step.parts if part.model == facts.number]
    return parts[-1].after if parts else []


def _over(view: RanksView, replica: Replica) -> int:
    """Ranks that share the data: more than the model's if the program averages over others by hand."""
    own = set(replica.group)
    wider = [c for r in own for c in view.records[r].collectives if c.name == "all_reduce" and not set(c.group) <= own]
    return len(view.records) if wider else len(own)


def _equal_batches(some: dict[int, Pass]) -> int:
    return sum(1 for each in zip(*(p.batches for p in some.values()), strict=False) if len(set(each)) == 1)


@alone
def _same_batch(view: RanksView, replica: Replica) -> Iterator[Seen]:
    """Equal batches at all forwards of all ranks, or of some."""
    inputs = {r: [f for f in fs if f.batch] for r, fs in replica.training.items()}
    some = {r: [f.batch for f in fs] for r, fs in inputs.items()}
    if any(len(set(each)) < LEAST for each in some.values()):
        return  # a constant batch is a benchmark
    classes: dict[tuple[int, ...], list[int]] = {}
    length = min(map(len, some.values()))
    for rank, batches in some.items():
        classes.setdefault(tuple(batches[:length]), []).append(rank)
    for ranks in classes.values():
        if len(ranks) > 1:
            passes = next(iter(view.passes(replica)), None)
            if _differ_within(replica, [inputs[rank] for rank in ranks], passes is not None):
                continue
            first = inputs[ranks[0]][0]
            place = place_of(view, passes) if passes else replica.place(ranks[0], first.place)
            loader = _loader_words(passes[ranks[0]]) if passes else "no data loader was seen"
            yield make(
                "same-batch", f"{rank_words(ranks)} train on the same batches",
                [f"inputs of {replica.title} were equal at all {counted(length, 'training forward')}", loader],
                f"{SAME}: each sample counts {len(ranks)} times", place, about=replica.group, ranks=tuple(ranks),
            )  # fmt: skip
            return


def _differ_within(replica: Replica, forwards: list[list[Forward]], loaded: bool) -> bool:
    """Whether ranks make different things of equal inputs: each takes its part of them within the model, or draws its
    samples there. Dropout makes no other samples, nor does noise on a loader's."""
    rows = [row for row in zip(*forwards, strict=False) if all(f.out for f in row)]
    if not rows or any(len({f.out for f in row}) == 1 for row in rows):
        return False
    drew = any(f.drew for row in rows for f in row)
    return not drew or not (loaded or any(facts.drops for facts in replica.facts.values()))


def _loader_words(one: Pass) -> str:
    if one.iterable:
        return "the data set is an IterableDataset, which nobody split"
    return f"the loader's sampler is {one.sampler}"


@alone
def _overlap(view: RanksView, replica: Replica) -> Iterator[Seen]:
    """Samples that several ranks got in one epoch."""
    for some in view.passes(replica):
        rows = {rank: Counter(each.rows) for rank, each in some.items()}
        if any(not each or max(each.values()) > 1 for each in rows.values()) or any(map(_is_drawn, some.values())):
            continue  # unknown, or a data set whose samples repeat, or a draw from it
        if _equal_batches(some) == min(len(each.batches) for each in some.values()):
            continue  # of which the model may take parts
        total = sum((each for each in rows.values()), Counter[int]())
        twice = sum(count - 1 for count in total.values() if count > 1)
        padding = sum(max(0, (each.total or 0) - (each.length or 0)) for each in some.values())
        if twice <= max(padding, len(some) - 1) or (1 - 1 / len(some)) ** twice > BY_CHANCE:
            continue  # few equal samples may be in the data, none of them twice in one rank's part
        number = total.total()
        missing = any(each.length is None or each.length > len(total) for each in some.values())
        yield make(
            "overlap", "in one epoch samples are given to several ranks",
            [f"{twice} of {number} samples of the epoch were given more than once ({percent(twice / number)})",
             f"no rank got a sample twice; {_loader_words(next(iter(some.values())))}"],
            f"{twice} samples count twice or more{', and others are missing' * missing}", place_of(view, some),
            about=replica.group, ranks=tuple(some),
        )  # fmt: skip
        return


@alone
def _all_of_it(view: RanksView, replica: Replica) -> Iterator[Seen]:
    """Random orders of one data set, each of which has all of it, with random numbers that make no two rows equal."""
    for some in view.passes(replica):
        first = next(iter(some.values()))
        if len({each.content for each in some.values()}) > 1 or not first.content or not first.length:
            continue
        if not all(p.sampler == "RandomSampler" and p.whole and not _is_drawn(p) for p in some.values()):
            continue
        if any(not p.rows for p in some.values()) or len({row for p in some.values() for row in p.rows}) < first.length:
            continue  # rows are unknown, or repeat, which another rule sees
        if _equal_batches(some):
            continue
        yield make(
            "overlap", "in one epoch each rank goes through all of the data set",
            [f"each rank's pass had {sum(first.sizes)} of the {first.length} samples, in an order of its own "
             f"({_loader_words(first)})",
             "lists or arrays in the data set, with an entry for each sample, are equal on all ranks"],
            f"an epoch has each sample {len(some)} times, and takes {len(some)} times as many steps",
            place_of(view, some), about=replica.group, ranks=tuple(some),
            cure="split the data: DataLoader(data, sampler=DistributedSampler(data))",
        )  # fmt: skip
        return


@alone
def _by_workers(view: RanksView, replica: Replica) -> Iterator[Seen]:
    """A stream that each worker of a loader gives in full: batches come in groups of equal ones."""
    for some in view.passes(replica):
        groups = {rank: _groups(each) for rank, each in some.items()}
        if not all(len(set(each)) >= LEAST and all(len(set(group)) == 1 for group in each) for each in groups.values()):
            continue
        rank = min(some)
        workers = some[rank].workers
        yield make(
            "worker-repeats", f"each of a loader's {workers} workers gives all samples of the rank",
            [f"on all ranks the first {workers} batches of a pass were equal, and so were the next; "
             f"{counted(len(groups[rank]), 'group')} of rank {rank}",
             "the data set is an IterableDataset, of which each worker has a copy"],
            f"an epoch has each sample {workers} times, and takes {workers} times as many steps", place_of(view, some),
            about=replica.group, ranks=tuple(some),
        )  # fmt: skip
        return


@alone
def _shifted(view: RanksView, replica: Replica) -> Iterator[Seen]:
    """Each batch of a rank is that of another, a few forwards later."""
    seen = {rank: [f for f in some if f.batch] for rank, some in replica.training.items()}
    rank, *others = sorted(seen)
    row = [f.batch for f in seen[rank]]
    world = len(seen)
    for other in others:
        two = [f.batch for f in seen[other]]
        length = min(len(row), len(two))
        for shift in range(1, length // (SHIFTS * world) + 1):
            pairs = [(row, two), (two, row)]
            if len({*row[:length]}) < length or len({*two[:length]}) < length:
                return
            if any(a[shift:length] == b[: length - shift] for a, b in pairs):
                passes = next(iter(view.passes(replica)), None)
                yield make(
                    "overlap", "ranks train on the same batches, one after the other",
                    [f"each batch of rank {other} was one of rank {rank}, {counted(shift, 'training forward')} "
                     f"{'earlier' if row[shift:length] == two[: length - shift] else 'later'}, at all of {length}"],
                    f"nearly all samples are seen {world} times: a rank's position moves by its own share, and not by "
                    "that of all ranks", place_of(view, passes) if passes else replica.place(rank, seen[rank][0].place),
                    about=replica.group, ranks=replica.ranks,
                    cure="move each rank's position by the samples of all ranks: position += batch * world",
                )  # fmt: skip
                return


def _groups(one: Pass) -> list[tuple[int, ...]]:
    """Batches of one turn of the workers, who take turns."""
    if not one.iterable or one.workers < LEAST:
        return []
    return [tuple(one.batches[i : i + one.workers]) for i in range(0, len(one.batches) - one.workers + 1, one.workers)]


def _is_drawn(one: Pass) -> bool:
    """Whether the sampler draws some of the data at random, and not each sample once in an epoch."""
    given = sum(one.sizes) + max(one.sizes, default=0)
    if one.sampler == "WeightedRandomSampler":
        return True
    return one.sampler == "RandomSampler" and one.whole and one.length is not None and given < one.length


@alone
def _order(view: RanksView, replica: Replica) -> Iterator[Seen]:
    """Two epochs of one loader in the same order."""
    passes = view.passes(replica)
    for i, one in enumerate(passes):
        for two in passes[i + 1 :]:
            pairs = [(one[r], two[r]) for r in one]
            if all(a.loader == b.loader and a.iterable and b.keeps_workers for a, b in pairs):
                yield from _kept_by_workers(view, replica, pairs, two)
                continue
            if any(a.loader != b.loader or not a.shuffles or a.epoch is None for a, b in pairs):
                continue
            if any(a.epoch != b.epoch or len(set(a.batches)) < LEAST for a, b in pairs):
                continue
            if any(_restored(replica, rank, one[rank], two[rank]) for rank in one):
                continue  # training begins anew, as after a search for a learning rate
            if not (same := _same_again(pairs)):
                continue
            first = pairs[0][0]
            yield make(
                "same-order", "each epoch has the same order, though the sampler shuffles",
                [f"epochs {first.number} and {pairs[0][1].number} gave every rank the same {same} in the same order",
                 f"the sampler's epoch stayed {first.epoch}: set_epoch was not called"],
                "each rank sees the same part in the same batches again, so shuffling has no effect",
                place_of(view, two), about=replica.group, ranks=replica.ranks,
            )  # fmt: skip
            return


def _restored(replica: Replica, rank: int, one: Pass, two: Pass) -> bool:
    return any(one.ended < call.at < two.at for call in replica.calls("load_state_dict", rank))


@alone
def _kept_by_workers(
    view: RanksView, replica: Replica, pairs: list[tuple[Pass, Pass]], two: dict[int, Pass]
) -> Iterator[Seen]:
    """A data set's epoch that was set here, and whose copies in kept workers go on with the old one."""
    if any(a.epoch is None or a.epoch == b.epoch or a.batches != b.batches or len(set(a.batches)) < LEAST
           for a, b in pairs):  # fmt: skip
        return
    first, second = pairs[0]
    yield make(
        "same-order", "each epoch has the same order, though the data set's epoch is set",
        [f"epochs {first.number} and {second.number} gave every rank the same {len(first.batches)} batches in the same "
         f"order, and dataset.epoch went from {first.epoch} to {second.epoch} in the program's process",
         "the loader keeps its workers (persistent_workers=True), and each has a copy of the data set"],
        "each rank sees the same samples in the same order again", place_of(view, two),
        about=replica.group, ranks=replica.ranks,
        cure="persistent_workers=False, or an epoch in shared memory: torch.tensor(0).share_memory_()",
    )  # fmt: skip


def _same_again(pairs: list[tuple[Pass, Pass]]) -> str:
    """What every rank's second epoch repeats of its first, or nothing. Batches; or indices, where fetches drew random
    numbers."""
    if all(a.batches == b.batches for a, b in pairs):
        return f"{len(pairs[0][0].batches)} batches"
    if all(a.order is not None and a.order == b.order and len(b.batches) >= LEAST and a.length == b.length
           and (a.random_before or (a.content and a.content == b.content)) for a, b in pairs):  # fmt: skip
        return "indices (samples differ only by random numbers drawn for them, as by an augmentation)"
    return ""


@alone
def _augmentation(view: RanksView, replica: Replica) -> Iterator[Seen]:
    for some in view.passes(replica):
        drawn = {rank: {f[:3]: f[3] for f in each.random_before} for rank, each in some.items()}
        common = set.intersection(*(set(each) for each in drawn.values()))
        if place_of(view, some).through:
            continue
        if len(common) < LEAST or _equal_batches(some) or _shapes_agree(some):
            continue
        if all(len({each[key] for each in drawn.values()}) == 1 for key in common):
            generator = sorted({key[2] for key in common})[0]
            workers = next(iter(some.values())).workers
            yield make(
                "same-augmentation", "all ranks draw the same random numbers for their different samples",
                [f"{len(common)} fetches drew from {_GENERATORS[generator]}, whose state was equal on all ranks",
                 f"in {'workers of the loader' if workers else 'the main process'}; the batches differed"],
                "augmentations repeat over ranks, so there are fewer different ones than batches", place_of(view, some),
                about=replica.group, ranks=tuple(some),
            )  # fmt: skip
            return


def _shapes_agree(some: dict[int, Pass]) -> bool:
    """Whether batches' shapes change, alike on all ranks: then the ranks draw alike to choose them."""
    shapes = [each.shapes for each in some.values()]
    return len(set(shapes[0])) > 1 and all(len(set(row)) == 1 for row in zip(*shapes, strict=False))


_GENERATORS = {"torch": "torch's generator", "random": "Python's random", "numpy": "numpy's generator"}


@alone
def _mask(replica: Replica) -> Iterator[Seen]:
    rows = [[*row.values()] for row in replica.side_by_side() if all(f.random and f.drew for f in row.values())]
    rows = [row for row in rows if len({f.batch for f in row}) == len(row)]
    looked, rows = len(rows), _equal_to_the_end(rows)
    if len(rows) < (LEAST if len(rows) == looked else RESTORED):
        return
    rank = min(replica.ranks)
    if replica.place(rank, rows[0][0].place).through:
        return  # a library's loop, whose seeds are no line of the program
    drops = replica.facts[rank].drops
    if not drops:
        return  # ranks that choose layers or sizes by a draw must draw alike
    names = f"dropout in {', '.join(drops[:4])}"
    of = f", the last of {looked}," if looked > len(rows) else ""
    number = counted(len(rows), "training forward")
    yield make(
        "same-mask", "the model draws the same random numbers on all ranks, for different inputs",
        [f"at {number}{of} the generator's state was equal on all ranks, and the forward used it: {names}"],
        "masks or noise repeat over ranks, so the average over ranks removes less of their noise",
        replica.place(rank, rows[0][0].place), about=replica.group, ranks=replica.ranks,
    )  # fmt: skip


def _equal_to_the_end(rows: list[list[Forward]]) -> list[list[Forward]]:
    """The last rows in which all ranks' generators have one state: they may be equal since a checkpoint was loaded."""
    apart = [i for i, row in enumerate(rows) if len({f.random for f in row}) > 1]
    return rows[apart[-1] + 1 :] if apart else rows


# -- evaluations -----------------------------------------------------------------------------------


@alone
def _evaluated(view: RanksView) -> Iterator[Seen]:
    trained = any(replica.training for replica in view.replicas)
    for some in view.evaluations() if trained and len(view.records) > 1 else ():
        yield from _in_part(view, some)
        if all(each.rows for each in some.values()):
            yield from _leaked(view, some)
        seen = _padded(some) or _repeated(some)
        if seen and not _gathers_samples(view, some):
            twice, number, how = seen
            be = "is" if twice == 1 else "are"
            yield make(
                "evaluated-twice", f"{counted(twice, 'sample')} of an evaluation {be} counted more than once",
                [f"{twice} of {number} evaluated samples were repeated{how}"],
                f"a metric over all ranks weighs {percent(twice / number)} of the samples twice",
                place_of(view, some), ranks=tuple(some),
            )  # fmt: skip
            return


@alone
def _in_part(view: RanksView, some: dict[int, Pass]) -> Iterator[Seen]:
    """By what the sampler says of itself: it gives all ranks as many samples, and leaves out the rest."""
    first = next(iter(some.values()))
    if first.total is None or first.length is None or first.total >= first.length or first.replicas != len(some):
        return
    if first.shuffles or any((each.total, each.length) != (first.total, first.length) for each in some.values()):
        return
    left = first.length - first.total
    yield make(
        "evaluated-in-part", f"{counted(left, 'sample')} of an evaluation {'is' if left == 1 else 'are'} omitted",
        [f"DistributedSampler(drop_last=True) gives {len(some)} ranks {first.total} of {first.length} samples"],
        f"a metric over all ranks is that of {percent(first.total / first.length)} of the samples, and of others with "
        "another number of ranks", place_of(view, some), ranks=tuple(some),
    )  # fmt: skip


def _gathers_samples(view: RanksView, some: dict[int, Pass]) -> bool:
    """Whether results of samples are gathered, during the evaluation or after it: what is repeated may be dropped."""
    for rank, one in some.items():
        record = view.records[rank]
        until = min((f.at for f in record.forwards if f.training and f.at > one.ended), default=LATEST)
        batch = max(one.sizes, default=LEAST)
        gathers = [c for c in record.collectives if "gather" in c.name and one.at < c.at <= until]
        if any(c.numel >= max(batch, LEAST) for c in gathers):
            return True
    return False


def _padded(some: dict[int, Pass]) -> tuple[int, int, str] | None:
    """By what the sampler says of itself."""
    first = next(iter(some.values()))
    if first.total is None or first.length is None or first.total <= first.length:
        return None
    if any(each.total != first.total or not each.whole for each in some.values()) or first.replicas != len(some):
        return None
    return first.total - first.length, first.total, ": DistributedSampler pads the data set to a multiple of the ranks"


def _repeated(some: dict[int, Pass]) -> tuple[int, int, str] | None:
    """By the samples. Ranks that all evaluate everything repeat them on purpose."""
    rows = [each.rows for each in some.values()]
    if any(not each for each in rows) or any(each.total is not None for each in some.values()):
        return None
    total = Counter(row for each in rows for row in each)
    twice = sum(count - 1 for count in total.values())
    number = total.total()
    if not 0 < twice < len(some) or any(len(set(each)) < len(each) for each in rows) or len(total) < 4:
        return None
    firsts = {row for each in rows for row in each[:2]}
    lasts = {row for each in rows for row in each[-2:]}
    repeated = {row for row, count in total.items() if count > 1}
    return (twice, number, " at the end of a rank's part") if repeated <= firsts & lasts else None


@alone
def _leaked(view: RanksView, some: dict[int, Pass]) -> Iterator[Seen]:
    """Samples that one rank evaluates and another trains on."""
    trained = {
        rank: {row for each in record.passes if each.models for row in each.rows}
        for rank, record in view.records.items()
    }
    if any(not each for each in trained.values()):
        return
    for rank, each in some.items():
        rows = set(each.rows)
        others = [r for r in trained if r != rank and rows & trained[r]]
        if others and not rows & trained[rank]:
            number = len(set.union(*(rows & trained[r] for r in others)))
            if number < max(LEAST, LEAKED * len(rows)):
                continue  # equal samples may be in the data
            yield make(
                "split-differs", "ranks split the data differently, so one validates on what another trains on",
                [f"{number} of {len(rows)} samples that rank {rank} evaluated were trained on by {rank_words(others)}, "
                 f"and none by rank {rank}"],
                f"{percent(number / len(rows))} of the evaluation is on training data", place_of(view, some),
                ranks=tuple(some),
            )  # fmt: skip
            return
