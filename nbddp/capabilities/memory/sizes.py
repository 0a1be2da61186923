"""What named objects hold on the ranks, in words and rows: bytes, what is sharded, what is shared with other names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from nbddp.analysis.quantities import size
from nbddp.launch.topology import counted, rank_words
from nbddp.output.table import Table

MOST_NAMES = 3  # that share memory are named


@dataclass(frozen=True)
class NameSize:
    """What a name holds on one rank, in bytes.

    parts: by kind, each storage once. tied: tensors that lie in storages of others. spans: bytes of the elements, less
    than the parts if it is a view. whole: of all shards together. shared: other names → bytes in common. tensors:
    storages.
    """

    type: str
    parts: Mapping[str, int]
    tied: int
    spans: int
    whole: int
    sharded: Sequence[str]
    shared: Mapping[str, int]
    tensors: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, repr=False)
class Sizes(Table):
    """A row per name, or per group of ranks that differ, under a sentence per name. `held[name][rank]` is a
    NameSize."""

    held: Mapping[str, Mapping[int, NameSize]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "\n".join([self.title, "", repr(Table(self.columns, self.rows))])

    def _repr_html_(self) -> str:
        words = "<br>".join(escape(line) for line in self.title.splitlines())
        return f"<div>{words}</div>{Table(self.columns, self.rows)._repr_html_()}"


def report_of_sizes(held: Mapping[str, Mapping[int, NameSize]]) -> Sizes:
    """held: name → rank → what it holds there; each name is on one rank at least."""
    kinds = [k for k in ("parameters", "module buffers", "gradients", "optimizer state", "tensors")
             if any(h.parts.get(k) for of in held.values() for h in of.values())]  # fmt: skip
    rows: list[list[object]] = []
    for name, of in held.items():
        for ranks, one in _folded(of):
            parts = [size(one.parts[k]) if one.parts.get(k) else "" for k in kinds]
            rows.append([name, rank_words(ranks), *parts, size(one.total), size(one.whole)])
    columns = ["name", "ranks", *kinds, "each rank holds", "unsharded"]
    if not any(h.sharded for of in held.values() for h in of.values()):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Sizes(columns, rows, "\n".join(sentence(n, of) for n, of in held.items()), held=held)


def _folded(of: Mapping[int, NameSize]) -> list[tuple[list[int], NameSize]]:
    """Ranks that hold the same, in order of their first."""
    groups: dict[object, list[int]] = {}
    for rank in sorted(of):
        key = (tuple(sorted(of[rank].parts.items())), of[rank].whole)
        groups.setdefault(key, []).append(rank)
    return [(ranks, of[ranks[0]]) for ranks in groups.values()]


def sentence(name: str, of: Mapping[int, NameSize]) -> str:
    """`model (DDP): 98 KiB on each of 4 ranks; …`."""
    some = list(of.values())
    first = some[0]
    low, high = size(min(h.total for h in some)), size(max(h.total for h in some))
    where = f"on each of {counted(len(of), 'rank')}" if len(of) > 1 else f"on rank {next(iter(of))}"
    text = [f"{name} ({first.type}): {low if low == high else f'{low} to {high}'} {where}"]
    if first.sharded:
        text.append(f"a shard of {size(first.whole)}: {'; '.join(first.sharded)}")
    if first.spans < first.total:
        text.append(f"a view of {size(first.spans)} in a storage of {size(first.total)}, which it keeps alive")
    if first.tied:
        text.append(f"{counted(first.tied, 'tensor')} in storages of others, counted once")
    return "; ".join([*text, *_shared(first)])


def _shared(one: NameSize) -> list[str]:
    """Which other names hold the same memory, most first."""
    some = sorted(one.shared.items(), key=lambda item: (-item[1], item[0]))
    if not some:
        return []
    named = [f"{name} ({'all of it' if share == one.total else size(share)})" for name, share in some[:MOST_NAMES]]
    more = f" and {len(some) - MOST_NAMES} more names" if len(some) > MOST_NAMES else ""
    return [f"shared with {', '.join(named)}{more}"]
