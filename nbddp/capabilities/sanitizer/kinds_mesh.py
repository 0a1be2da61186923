"""DTensors: inputs of a mesh that differ between its ranks, and files that have one rank's shards. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nbddp.capabilities.sanitizer.recording import CalledFunction
from nbddp.capabilities.sanitizer.rules import Seen, alone, make
from nbddp.capabilities.sanitizer.view import RanksView, percent
from nbddp.launch.machine import counted
from nbddp.launch.topology import rank_words

LEAST = 4  # steps
FIELDS = 4  # of a call: ranks, shape, number of steps before it, sample
APART = 1e-2  # of a norm: ranks may round in another way


def found(view: RanksView) -> Iterator[Seen]:
    yield from _inputs(view)
    yield from _shards(view)


@alone
def _inputs(view: RanksView) -> Iterator[Seen]:
    """Tensors that a mesh takes for the same on all its ranks, and that are not, where it shares out parameters."""
    calls = {
        r: [c for c in rec.calls if c.what == "replicated" and len(_list(c)) == FIELDS]
        for r, rec in view.records.items()
    }
    for group in dict.fromkeys(_group(c) for some in calls.values() for c in some):
        of = {r: [c for c in calls[r] if _group(c) == group] for r in group if r in calls}
        if len(of) < len(group) or len({len(some) for some in of.values()}) > 1 or not _is_split(view, group):
            continue
        places: dict[int, dict[object, dict[int, CalledFunction]]] = {}
        for row in zip(*of.values(), strict=True):
            if len({tuple(map(str, _list(c)[1:3])) for c in row}) == 1:
                places.setdefault(row[0].place, {}).setdefault(_list(row[0])[2], dict(zip(of, row, strict=True)))
        rows = list(next(iter(places.values()), {}).values())  # one for each step
        shares = [_apart([_list(c)[3] for c in row.values()]) for row in rows]
        if len(rows) < LEAST or min(shares) < APART:
            continue
        rank = min(of)
        yield make(
            "split-input", f"{rank_words(list(group))} hold parts of one model, and get different inputs",
            [f"at all of {counted(len(rows), 'step')} a tensor of shape {_list(rows[0][rank])[1]} that torch takes for "
             f"the same on these ranks (Replicate) differed; at least {percent(min(shares))} apart"],
            "each rank computes its part of the layer for its own samples, and the parts are added up",
            view.records[rank].at(rows[0][rank].place), ranks=group,
            cure="give the ranks of a tensor-parallel group the same batch: DistributedSampler(data, "
            "num_replicas=dp_size, rank=dp_rank)",
        )  # fmt: skip
        return


def _is_split(view: RanksView, group: tuple[int, ...]) -> bool:
    """Whether optimizers on these ranks move parameters that are sharded over them, and not for FSDP2."""
    for rank in group:
        record = view.records[rank]
        groups = [tuple(g) for c in record.calls if c.what == "sharded parameters" for g in _groups(c)]
        if group not in groups or any(set(group) <= set(m.group) for m in record.models if m.kind == "fsdp2"):
            return False
    return True


def _groups(call: CalledFunction) -> list[tuple[int, ...]]:
    return call.detail if isinstance(call.detail, list) else []


def _group(call: CalledFunction) -> tuple[int, ...]:
    ranks = _list(call)[0]
    return tuple(ranks) if isinstance(ranks, list) else ()


def _list(call: CalledFunction) -> list[object]:
    return list(call.detail) if isinstance(call.detail, (list, tuple)) else []


def _apart(samples: Sequence[object]) -> float:
    pairs = [each for each in samples if isinstance(each, list) and len(each) == 2]
    if len(pairs) < len(samples):
        return 0.0
    rows = list(zip(*pairs, strict=True))
    return float(max(max(row) - min(row) for row in rows) / max(*rows[1], 1e-30))


@alone
def _shards(view: RanksView) -> Iterator[Seen]:
    """One rank alone saves what is sharded over several."""
    calls = {r: [c for c in rec.calls if c.what == "shards saved"] for r, rec in view.records.items()}
    some = {r: each for r, each in calls.items() if each}
    if len(some) != 1 or not view.ended_well or any(r.dropped.get("CalledFunction") for r in view.records.values()):
        return
    rank, own = next(iter(some.items()))
    number, ranks = _saved(own[0])
    if rank not in ranks or any(each not in view.records for each in ranks):
        return
    yield make(
        "saved-in-part", f"rank {rank} alone saves tensors that are sharded over {rank_words(ranks)}",
        [f"torch.save had {counted(number, 'DTensor')} with this rank's shards, {counted(len(own), 'time')}; no other "
         "rank saved its own"],
        f"the file has about 1/{len(ranks)} of each of these tensors", view.records[rank].at(own[0].place),
        ranks=(rank,),
    )  # fmt: skip


def _saved(call: CalledFunction) -> tuple[int, list[int]]:
    """How many sharded tensors a file got, and the ranks of their mesh."""
    detail = call.detail
    return detail if isinstance(detail, tuple) else (0, [])
