"""Modes, settings and files that differ by rank, or should; and avoidable slowness. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median, quantiles

from nbddp.capabilities.sanitizer.kinds_drift import by_value
from nbddp.capabilities.sanitizer.recording import Backward, Forward, HostRead
from nbddp.capabilities.sanitizer.rules import Seen, alone, make
from nbddp.capabilities.sanitizer.view import RanksView, Replica, percent
from nbddp.launch.machine import counted
from nbddp.launch.topology import rank_words

BATCHES = 8
FEWEST, TWICE = 4, 2  # calls of a frozen module; forwards without gradients
STEPS, MOST = 30, 0.9  # optimizer steps that must have been made; share of them at which a line waited
OWN = ("threads", "cores", "on CPU")  # which each rank may have otherwise


def found(view: RanksView) -> Iterator[Seen]:
    for replica in view.replicas:
        yield from _modes(replica)
        yield from _beside(replica)
        yield from _statistics(replica)
        yield from _in_no_sync(replica)
        yield from _starved(view, replica)
    yield from _settings(view)
    yield from _files(view)
    yield from _threads(view)
    yield from _reads(view)


def _mode(forward: Forward) -> str:
    said = "train" if forward.mode else "eval"
    return f"{said}, but not {', '.join(forward.others)}" if forward.others else said


def _autocast(forward: Forward) -> str:
    return forward.autocast or "off"


@alone
def _modes(replica: Replica) -> Iterator[Seen]:
    rows = replica.side_by_side()
    length = len(rows)
    rows = [row for row in rows if len({f.others is None for f in row.values()}) == 1]
    for kind, of, what, matters in (
        ("mode-differs", _mode, "train and eval mode",
         "dropout and batch norm act on some ranks alone, so the ranks average gradients of different models"),
        ("autocast-differs", _autocast, "autocast",
         "ranks compute in different precision, and average what differs by more than rounding"),
    ):  # fmt: skip
        bad = [i for i, row in enumerate(rows) if len({of(f) for f in row.values()}) > 1]
        if bad:
            row: dict[int, Forward] = rows[bad[0]]
            rank = min(row)
            yield make(
                kind, f"{what} of {replica.title} differ between ranks at the same training forward",
                [f"at {len(bad)} of {counted(length, 'training forward')}, first at {bad[0]}: "
                 f"{by_value({r: of(f) for r, f in row.items()})}"],
                matters, replica.place(rank, row[rank].place), about=replica.group, ranks=replica.ranks,
            )  # fmt: skip


@alone
def _beside(replica: Replica) -> Iterator[Seen]:
    """Frozen modules that are called beside the model, in train mode on some ranks and in eval mode on others."""
    found = {rank: record.beside for rank, record in replica.records.items()}
    for row in zip(*found.values(), strict=False):
        if len({(m.title, *m.names) for m in row}) > 1:
            return  # the ranks call other modules
        modes = {rank: m.modes for rank, m in zip(found, row, strict=True)}
        whole = min(map(len, modes.values()))
        if (
            whole < FEWEST
            or any(len(set(some)) > 1 for some in modes.values())
            or len({m[0] for m in modes.values()}) < 2
        ):
            continue
        rank = min(modes)
        yield make(
            "mode-differs", f"{row[0].title}, which is called beside {replica.title}, is in train mode on some ranks",
            [f"at all of the first {whole} calls: "
             f"{by_value({r: 'train' if some[0] else 'eval' for r, some in modes.items()})}"],
            "its dropout and batch norm act on some ranks alone, so the ranks' losses differ by it",
            replica.place(rank, row[0].place), about=replica.group, ranks=replica.ranks,
            cure="call eval() on it on all ranks",
        )  # fmt: skip
        return


@alone
def _statistics(replica: Replica) -> Iterator[Seen]:
    """Forwards without gradients, in train mode, on some ranks alone, with training after them."""
    calls = {
        rank: [c for c in replica.calls("train forward", rank) if c.detail == replica.facts[rank].number
               and any(step.at > c.at for step in replica.records[rank].steps)]
        for rank in replica.ranks
    }  # fmt: skip
    some = {rank: each for rank, each in calls.items() if each}
    if not some or len(some) == len(calls) or min(map(len, some.values())) < TWICE:
        return
    rank = min(some)
    yield make(
        "mode-differs",
        f"{rank_words(list(some))} alone {'runs' if len(some) == 1 else 'run'} {replica.title} in train mode without "
        "gradients, beside its training",
        [f"{counted(len(some[rank]), 'such forward')} of rank {rank}, past DDP, each with training after it",
         "they move BatchNorm's running statistics there, which no other rank's forward does"],
        "running statistics have samples that the model is not trained on", replica.place(rank, some[rank][0].place),
        about=replica.group, ranks=tuple(some), cure="model.eval() before it, and model.train() after it",
    )  # fmt: skip


@alone
def _settings(view: RanksView) -> Iterator[Seen]:
    of = {rank: record.settings for rank, record in view.records.items() if record.settings}
    names = dict.fromkeys(name for each in of.values() for name in each if name not in OWN)
    by = {n: {r: e[n] for r, e in of.items() if n in e} for n in names}  # a rank without steps has none
    bad = {n: values for n, values in by.items() if len({repr(value) for value in values.values()}) > 1}
    if bad and any(replica.counts for replica in view.replicas):
        yield make(
            "settings-differ", f"{', '.join(bad)} {'differs' if len(bad) == 1 else 'differ'} between ranks",
            [f"{name}: {by_value(values)}" for name, values in bad.items()],
            "ranks compute in different precision, so runs are not repeatable from another number of ranks",
            ranks=tuple(of),
        )  # fmt: skip


@alone
def _files(view: RanksView) -> Iterator[Seen]:
    by: dict[tuple[object, ...], dict[int, int]] = defaultdict(dict)
    for rank, record in view.records.items():
        for call in record.calls:
            if call.what == "save" and isinstance(call.detail, (tuple, list)):
                key = (record.host, *call.detail, sum(1 for step in record.steps if step.at < call.at))
                by[key].setdefault(rank, call.place)
    for key, ranks in by.items():
        if len(ranks) > 1:
            path = key[1]
            rank, who = min(ranks), rank_words(list(ranks))
            yield make(
                "same-file", f"{who} write one file", [f"{path} was written by {key[4]} on {who}"],
                "the file may be torn, or hold the state of whichever rank came last",
                view.records[rank].at(ranks[rank]), ranks=tuple(ranks),
            )  # fmt: skip
            return


# -- speed -----------------------------------------------------------------------------------------


@alone
def _in_no_sync(replica: Replica) -> Iterator[Seen]:
    if replica.kind != "ddp":
        return
    bad: dict[int, list[Backward]] = {
        r: [b for b in rec.backwards if b.model == replica.facts[r].number and b.armed and not b.flag]
        for r, rec in replica.records.items()
    }
    if all(bad.values()):
        rank = min(bad)
        total = sum(1 for b in replica.records[rank].backwards if b.model == replica.facts[rank].number)
        yield make(
            "exchange-in-no-sync", "backwards inside no_sync exchange gradients all the same",
            [f"{len(bad[rank])} of {counted(total, 'backward')} ran inside no_sync, with a forward outside of it"],
            f"{len(bad[rank])} exchanges are made for nothing; gradients are right",
            replica.place(rank, bad[rank][0].place), about=replica.group, ranks=replica.ranks,
        )  # fmt: skip


@alone
def _starved(view: RanksView, replica: Replica) -> Iterator[Seen]:
    for some in view.passes(replica):
        waits = {r: p.waits[1:] for r, p in some.items() if len(p.waits) > BATCHES}
        if len(waits) != len(some):
            continue
        quarters = {r: quantiles(each) for r, each in waits.items()}
        typical = {r: median(each) for r, each in waits.items()}
        worst = max(typical, key=lambda r: typical[r])
        others = [typical[r] for r in typical if r != worst]
        usual = max(quarters[r][2] for r in quarters if r != worst)  # on a busy machine a rank occasionally waits
        if quarters[worst][0] > max(0.005, 5 * usual):
            yield make(
                "starved-rank", f"rank {worst} waits for its data loader, and the others wait for rank {worst}",
                [f"median wait for a batch: {', '.join(f'{1000 * t:.3g} ms on rank {r}' for r, t in typical.items())}"],
                f"each step is {1000 * (typical[worst] - max(others)):.3g} ms longer on all ranks",
                view.records[worst].at(some[worst].place), about=replica.group, ranks=(worst,),
            )  # fmt: skip
            return


@alone
def _threads(view: RanksView) -> Iterator[Seen]:
    by: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
    for rank, record in view.records.items():
        if record.settings.get("on CPU") and record.forwards:
            by[record.host][rank] = (int(str(record.settings["threads"])), int(str(record.settings["cores"])))
    for host, ranks in by.items():
        threads, cores = sum(t for t, _ in ranks.values()), max(c for _, c in ranks.values())
        if threads > max(1.5 * cores, len(ranks)) and len(ranks) > 1 and min(t for t, _ in ranks.values()) > 1:
            yield make(
                "too-many-threads", f"{len(ranks)} ranks compute with {threads} threads on {cores} cores",
                [f"on {host}: torch.get_num_threads() is {by_value({r: t for r, (t, _) in ranks.items()})}"],
                f"threads wait for each other: {percent(1 - cores / threads)} of them have no core", ranks=tuple(ranks),
            )  # fmt: skip


@alone
def _reads(view: RanksView) -> Iterator[Seen]:
    """A line that waits for the GPU at nearly every step."""
    steps = {rank: max(record.step_counts.values(), default=0) for rank, record in view.records.items()}
    some = {
        rank: each for rank, record in view.records.items()
        if steps[rank] >= STEPS and (each := [one for one in record.reads if one.steps >= MOST * steps[rank]])
    }  # fmt: skip
    if not some:
        return
    rank = min(some)
    first = max(some[rank], key=lambda one: sum(one.waits))
    place = view.records[rank].at(first.place)
    others = [str(view.records[rank].at(one.place)) for one in some[rank] if one is not first]
    seen = [f"{first.name} waited for the GPU at {first.steps} of {counted(steps[rank], 'optimizer step')} of rank "
            f"{rank}, {counted(first.count, 'time')}"]  # fmt: skip
    seen += [f"{rank_words([r for r in some if r != rank])} did so too"] if len(some) > 1 else []
    seen += [f"so did {', '.join(others[:3])}"] if others else []
    yield make(
        "host-sync", f"{rank_words(list(some))} {'waits' if len(some) == 1 else 'wait'} for the GPU in each step",
        [*seen, *_waited(first)],
        "until the GPU is done, the rank gives it no further work",
        place, ranks=tuple(some),
    )  # fmt: skip


def _waited(read: HostRead) -> list[str]:
    if read.simulated or len(read.waits) < 2 or read.count < 2:
        return ["what it costs was not measured: the GPU is simulated"] if read.simulated else []
    wait, step = median(read.waits), read.seconds / (read.count - 1)
    return [
        f"it waited {1000 * wait:.3g} ms (median of {len(read.waits)}), and came once in {1000 * step:.3g} ms; how "
        "long the GPU then stood idle was not measured"
    ]
