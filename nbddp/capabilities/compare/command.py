"""`%ddp compare` and `Pool.compare`: the ranks are asked for digests, and those that differ are measured.

What travels: per leaf of a name a digest, norm, shape and dtype (a number travels itself). Then, for tensors that
differ, the reference rank's bytes in pieces of 16 MiB, through the pool's own connections, to one rank of each
class that differs; at most 256 MiB per comparison, what is beyond is told as not measured. No
collective is called: a process group that a cell has left stays as it is, sequence numbers included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from nbddp.capabilities.compare.exchange import ByteRange, Wanted, pieces, within
from nbddp.capabilities.compare.replicas import Compared, HeldValue, Leaf
from nbddp.capabilities.compare.report import Report, report
from nbddp.errors import BadInput
from nbddp.execution.protocols import IdleRanks
from nbddp.execution.values import check_ranks
from nbddp.launch.topology import rank_words
from nbddp.notebook.commands import Asked, CommandLine
from nbddp.protocol import pickling


class Ask(Protocol):
    """Asks some ranks for something about their names; rank → the buffers of its answer."""

    def __call__(
        self, some: Sequence[int], fields: dict[str, Any], buffers: Sequence[bytes] = ()
    ) -> Mapping[int, Sequence[Any]]: ...


def compare(pool: IdleRanks, *names: str, ranks: Sequence[int] | None = None) -> Report:
    """Compare the ranks' copies of names: tensors, modules, optimizers, numbers, or containers of them.

    Ranks send digests; for tensors that differ also the bytes of one rank, up to 256 MiB in all
    (`nbddp.capabilities.compare.command`). No process group is needed or used. Raises BadInput for a name that no
    rank has.
    """
    chosen = check_ranks(ranks, pool.placed().world_size, "--ranks")

    def ask(some: Sequence[int], fields: dict[str, Any], buffers: Sequence[bytes] = ()) -> dict[int, Any]:
        return pool.answers("compare", some, buffers, **fields)

    if not names or not chosen:
        raise BadInput(f"there are no {'ranks' if names else 'names'} to compare; write %ddp compare model --ranks 0-1")
    answers = ask(chosen, {"part": "look", "names": list(names)})
    found = [Compared(n, {r: _held(pickling.unpack(answers[r][i])) for r in chosen}) for i, n in enumerate(names)]
    for c in found:
        _check(c)
    largest = _measure(within(w for c in found for w in _wanted(c)), ask)
    return report([replace(c, largest=largest.get(c.name, {})) for c in found])


def show(asked: Asked, line: CommandLine) -> Report:
    return compare(asked.pool, *line.args["names"], ranks=line.args["ranks"])


def _held(data: Mapping[str, Any] | None) -> HeldValue | None:
    if data is None:
        return None
    return HeldValue(data["type"], {path: Leaf(**leaf) for path, leaf in data["leaves"].items()}, data["broadcasts"])


def _check(c: Compared) -> None:
    there = c.present()
    if not there:
        raise BadInput(f"{c.name!r} is not defined on {rank_words(c.ranks)}; assign it in a %%ddp cell")
    alone = [h.type for h in there.values() if set(h.leaves) == {""} and h.leaves[""].kind == "opaque"]
    if len(alone) == len(there):
        raise BadInput(
            f"{c.name!r} holds a value of type {alone[0]}, which cannot be compared; name a tensor, a module, an "
            "optimizer, a number, or a dict or list of them"
        )


def _wanted(c: Compared) -> list[Wanted]:
    """The tensors of a name whose largest differences are to be measured."""
    return [
        Wanted(c.name, d.path, d.reference, tuple(ranks[0] for ranks in d.classes[1:]), d.leaf.bytes)
        for d in c.differences()
        if not d.why and d.leaf.norm is not None
    ]


def _measure(wanted: Sequence[Wanted], ask: Ask) -> dict[str, dict[tuple[str, int], float]]:
    """Name → (path, reference) → the largest difference that any rank has from the reference."""
    found: dict[str, dict[tuple[str, int], float]] = {}
    for batch in pieces(wanted):
        reference, others = batch[0].wanted.reference, batch[0].wanted.others
        spans = [(s.wanted.name, s.wanted.path, s.start, s.stop) for s in batch]
        data = [bytes(b) for b in ask([reference], {"part": "read", "spans": spans})[reference]]
        answers = ask(others, {"part": "measure", "spans": spans}, data)
        for rank in others:
            for span, apart in zip(batch, pickling.unpack(answers[rank][0]), strict=True):
                _note(found.setdefault(span.wanted.name, {}), span, apart)
    return found


def _note(found: dict[tuple[str, int], float], span: ByteRange, apart: float) -> None:
    """Keep the larger one; NaN is larger than any number."""
    key = span.wanted.path, span.wanted.reference
    before = found.get(key, 0.0)
    found[key] = before if before != before else apart if apart != apart else max(before, apart)
