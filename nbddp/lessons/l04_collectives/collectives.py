"""Lesson 04's collectives on symbols: the values of each rank before and after each of them.

A rank's tensor is its letter, A on rank 0; where a collective divides it into pieces, A0 is piece 0. A sum is the
letters that are in it. Pure: imports only `nbddp.launch.topology` and what that may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbddp.launch.topology import counted
from nbddp.lessons.l04_collectives.simulation import LETTERS

BROADCAST, SCATTER, GATHER, ALL_GATHER = "broadcast", "scatter", "gather", "all-gather"
REDUCE, ALL_REDUCE, REDUCE_SCATTER, ALL_TO_ALL = "reduce", "all-reduce", "reduce-scatter", "all-to-all"
LEAVES = {
    BROADCAST: "every rank has rank 0's tensor",
    SCATTER: "rank r has piece r of rank 0's tensor",
    GATHER: "rank 0 has every rank's tensor",
    ALL_GATHER: "every rank has every rank's tensor",
    REDUCE: "rank 0 has the sum of all tensors",
    ALL_REDUCE: "every rank has the sum of all tensors",
    REDUCE_SCATTER: "rank r has the sum of all ranks' pieces r",
    ALL_TO_ALL: "rank r has piece r of every rank's tensor",
}
COLLECTIVES = tuple(LEAVES)


@dataclass(frozen=True)
class TensorPiece:
    """A tensor or a piece of one: the sum of those of `ranks`; `piece` is None for a whole tensor."""

    ranks: tuple[int, ...]
    piece: int | None = None

    def symbols(self) -> list[str]:
        """`["A"]`, `["A2", "B2"]`."""
        return [f"{LETTERS[r]}{'' if self.piece is None else self.piece}" for r in self.ranks]


Row = tuple[TensorPiece, ...]  # what one rank has; empty where the collective takes or leaves nothing


@dataclass(frozen=True)
class BeforeAfter:
    """A collective, and what each rank has before and after it."""

    name: str
    before: tuple[Row, ...]
    after: tuple[Row, ...]

    @property
    def ranks(self) -> int:
        return len(self.before)

    def heading(self) -> str:
        """`reduce-scatter on 4 ranks: rank r has …`."""
        return f"{self.name} on {counted(self.ranks, 'rank')}: {LEAVES[self.name]}"

    def describe(self) -> str:
        rows = [
            (f"rank {r}", shown(a), "→", shown(b)) for r, (a, b) in enumerate(zip(self.before, self.after, strict=True))
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.heading(), *lines])


def shown(row: Row) -> str:
    """`A0 A1`, `A0+B0`; `–` for nothing."""
    return " ".join("+".join(cell.symbols()) for cell in row) or "–"


def collective(name: str = BROADCAST, ranks: int = 4) -> BeforeAfter:
    """One of COLLECTIVES on `ranks` ranks; the root is rank 0."""
    everyone = range(ranks)
    whole = tuple((TensorPiece((r,)),) for r in everyone)
    pieces = tuple(tuple(TensorPiece((r,), p) for p in everyone) for r in everyone)
    total, tensors = (TensorPiece(tuple(everyone)),), tuple(TensorPiece((r,)) for r in everyone)
    before, after = {
        BROADCAST: (_on_root(whole[0], ranks), [whole[0]] * ranks),
        SCATTER: (_on_root(pieces[0], ranks), [(TensorPiece((0,), r),) for r in everyone]),
        GATHER: (whole, _on_root(tensors, ranks)),
        ALL_GATHER: (whole, [tensors] * ranks),
        REDUCE: (whole, _on_root(total, ranks)),
        ALL_REDUCE: (whole, [total] * ranks),
        REDUCE_SCATTER: (pieces, [(TensorPiece(tuple(everyone), r),) for r in everyone]),
        ALL_TO_ALL: (pieces, [tuple(TensorPiece((s,), r) for s in everyone) for r in everyone]),
    }[name]
    return BeforeAfter(name, tuple(before), tuple(after))


def _on_root(row: Row, ranks: int) -> Sequence[Row]:
    return [row, *[()] * (ranks - 1)]
