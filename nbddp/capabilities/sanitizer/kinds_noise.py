"""Noise that is one on all ranks, though their inputs differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from nbddp.capabilities.sanitizer.recording import DrawnTensor
from nbddp.capabilities.sanitizer.rules import Seen, alone, make
from nbddp.capabilities.sanitizer.view import AlignedStep, RanksView, Replica
from nbddp.launch.machine import counted

LEAST = 4  # steps at which tensors are equal


def found(view: RanksView) -> Iterator[Seen]:
    for replica in view.replicas:
        if replica.kind == "ddp" and not view.same_input:
            yield from _noise(replica, "torch")
            yield from _noise(replica, "numpy")


@alone
def _noise(replica: Replica, by: str) -> Iterator[Seen]:
    """At each step all ranks draw the same tensors with an entry for each sample of the batch, before the backward."""
    rows: list[tuple[AlignedStep, dict[int, list[DrawnTensor]]]] = []
    for step in replica.steps:
        drawn = {rank: _drawn(replica, rank, step, by) for rank in step.steps}
        if not any(drawn.values()):
            continue
        values = [[(each.shape, each.value) for each in some] for some in drawn.values()]
        if any(each != values[0] for each in values) or not _inputs_differ(replica, step):
            return
        rows.append((step, drawn))
    sizes = {each.shape[0] for _, drawn in rows for some in drawn.values() for each in some}
    if len(rows) < LEAST:
        return
    step, drawn = rows[0]
    rank = min(drawn)
    telling = [each for each in drawn[rank] if len(sizes) > 1 or max(each.shape[1:], default=1) > 1]
    if not telling:
        return  # a column of as many numbers as there are samples may be no sample's
    one = telling[0]
    more = f", and {counted(len(drawn[rank]) - 1, 'more array')}" if len(drawn[rank]) > 1 else ""
    place = replica.place(rank, one.place)
    if place.through:
        return  # a library's line
    yield make(
        "same-noise", "the program draws the same random numbers on all ranks, for different inputs",
        [f"at each of {counted(len(rows), 'step')} from step {step.number} on, an array of shape {list(one.shape)} "
         f"drawn before the backward was equal on all ranks{more}; it has as many rows as the batch"],
        "noise, time steps or masks repeat over ranks, so the average over ranks removes less of their variance",
        place, about=replica.group, ranks=replica.ranks,
        cure="" if by == "torch" else "seed by rank once the model is made: np.random.seed(seed + rank)",
    )  # fmt: skip


def _drawn(replica: Replica, rank: int, step: AlignedStep, by: str) -> list[DrawnTensor]:
    """Those with as many rows as a forward before this step has samples."""
    if not step.backs[rank]:
        return []
    sizes = {f.size for f in step.between(rank, replica.training[rank]) if f.size > 1}
    some = step.between(rank, [each for each in replica.records[rank].drawn if each.by == by])
    return [each for each in some if each.at < step.backs[rank][-1].at and each.shape[0] in sizes]


def _inputs_differ(replica: Replica, step: AlignedStep) -> bool:
    batches = [tuple(f.batch for f in step.between(rank, replica.training[rank])) for rank in step.steps]
    return len(set(batches)) == len(batches)
