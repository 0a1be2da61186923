"""Digests of each rank's values → the differences, and their places. Digests of what each rank holds → what differs,
and where.

A worker walks what a name holds down to leaves (`nbddp.analysis.on_rank_walk`): tensors, numbers and
other small values, each under its path. Here the leaves of all ranks are laid side by side. Ranks
whose digests are equal hold the same bytes; those fall into classes, the class of the lowest rank
first. Of a tensor that is sharded only ranks that hold the same part are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbddp.errors import counted, listed
from nbddp.launch.topology import rank_words

MOST_NORMS = 4
TENSORS = ("parameter", "buffer", "state tensor", "tensor")


@dataclass(frozen=True)
class Leaf:
    """One value at the end of a path, on one rank.

    kind: `parameter`, `buffer`, `state tensor`, `tensor`, `number`, `setting`, `value`, or `opaque` (of which only the
    type is known). type: dtype or type name. shape: of the whole tensor, also where only `part` of it is held here
    (empty: all of it). digest: of bytes, dtype and shape. norm: L2 in float64. bytes: of what is held here.
    value: a number itself; text: how a small value reads.
    """

    path: str
    kind: str
    type: str
    shape: tuple[int, ...] | None = None
    digest: str = ""
    norm: float | None = None
    bytes: int = 0
    part: str = ""
    value: Any = None
    text: str = ""

    @property
    def words(self) -> str:
        """`float32 [3, 4]`, `int`."""
        return self.type if self.shape is None else f"{self.type} {list(self.shape)}"


@dataclass(frozen=True)
class HeldValue:
    """What a rank holds under a name: its type, and its leaves by path in the order they were met.

    broadcasts: a DistributedDataParallel that copies rank 0's buffers to all ranks before each forward.
    """

    type: str
    leaves: Mapping[str, Leaf]
    broadcasts: bool = False


@dataclass(frozen=True)
class Difference:
    """A path whose leaves differ.

    why: empty if the values differ, else what differs in kind (`missing on rank 2`). classes: ranks with equal
    values, the lowest rank's class first. largest: the largest absolute difference from the first class; NaN if a
    NaN meets a number; None if it was not measured. shown: per class its norm, or the value of what is no tensor.
    """

    path: str
    leaf: Leaf
    classes: tuple[tuple[int, ...], ...]
    why: str = ""
    shown: tuple[str, ...] = ()
    largest: float | None = None

    @property
    def reference(self) -> int:
        return self.classes[0][0]


@dataclass(frozen=True)
class Compared:
    """One name on `ranks`. `largest` has what was measured: (path, reference rank) → largest difference."""

    name: str
    held: Mapping[int, HeldValue | None]
    largest: Mapping[tuple[str, int], float] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        return sorted(self.held)

    @property
    def equal(self) -> bool:
        """True if every rank has the name and nothing that can be compared differs."""
        return not self._unlike() and not self.differences()

    def present(self) -> dict[int, HeldValue]:
        return {r: h for r, h in sorted(self.held.items()) if h is not None}

    def paths(self) -> list[str]:
        """All paths, in the lowest rank's order; those that it lacks behind."""
        return list(dict.fromkeys(p for h in self.present().values() for p in h.leaves))

    def differences(self) -> list[Difference]:
        """One per path (and part of a sharded tensor) that is not equal everywhere."""
        return [d for path in self.paths() for d in self._at(path)]

    def classes(self) -> list[tuple[int, ...]]:
        """Ranks that agree in all they can be compared in, lowest first."""
        marks: dict[int, list[tuple[str, int]]] = {r: [] for r in self.ranks}
        for d in self.differences():
            for i, some in enumerate(d.classes):
                for r in some:
                    marks[r].append((f"{d.path} {d.reference}", i))
        return _classes({r: f"{self._type(r)} {m}" for r, m in marks.items()})

    # -- what differs ----------------------------------------------------------------------

    def _type(self, rank: int) -> str:
        held = self.held[rank]
        return "" if held is None else held.type

    def _unlike(self) -> str:
        """How the ranks differ in what they hold at all; empty if they do not."""
        missing = [r for r, h in self.held.items() if h is None]
        if missing:
            return f"there is no {self.name} on {rank_words(missing)}"
        groups = _groups({r: h.type for r, h in self.present().items()})
        if len(groups) == 1:
            return ""
        return "; ".join(f"a {kind} on {rank_words(ranks)}" for kind, ranks in groups.items())

    def _at(self, path: str) -> list[Difference]:
        have = {r: h.leaves[path] for r, h in self.present().items() if path in h.leaves}
        first = have[min(have)]
        lacking = [r for r in self.present() if r not in have]
        if lacking:
            return [Difference(path, first, (tuple(have), tuple(lacking)), f"missing on {rank_words(lacking)}")]
        groups = _groups({r: leaf.words for r, leaf in have.items()})
        if len(groups) > 1:
            why = "; ".join(f"{words} on {rank_words(ranks)}" for words, ranks in groups.items())
            return [Difference(path, first, tuple(map(tuple, groups.values())), why)]
        parts = _groups({r: leaf.part for r, leaf in have.items()})
        found = [self._values(path, {r: have[r] for r in ranks}) for ranks in parts.values()]
        return [d for d in found if d is not None]

    def _values(self, path: str, have: Mapping[int, Leaf]) -> Difference | None:
        classes = _classes({r: leaf.digest for r, leaf in have.items()})
        if len(classes) == 1:
            return None
        firsts = [have[c[0]] for c in classes]
        leaf = firsts[0]
        largest = self.largest.get((path, classes[0][0]))
        if all(x.value is not None for x in firsts):
            largest = max(_apart(x.value, leaf.value) for x in firsts[1:])
        shown = _distinct([x.norm for x in firsts]) if leaf.norm is not None else tuple(x.text for x in firsts)
        return Difference(path, leaf, tuple(classes), "", tuple(shown), largest)

    # -- in words --------------------------------------------------------------------------

    def describe(self) -> str:
        """One or two sentences: equal, or what differs first, and which ranks agree with each other."""
        unlike = self._unlike()
        if unlike:
            return f"{self.name} differs: {unlike}" + self._agreeing()
        found = self.differences()
        if found:
            return f"{self.name} differs: {self._first(found)}" + self._agreeing() + self._only_buffers(found)
        return f"{self.name}: {self._equal()}"

    def _first(self, found: Sequence[Difference]) -> str:
        first, total = found[0], len(self.paths())
        tensors = all(leaf.kind in TENSORS for h in self.present().values() for leaf in h.leaves.values())
        if total == 1 and not first.path:
            return first.why or difference_words(first)
        noun = "tensor" if tensors else "value"
        paths = len({d.path for d in found})
        where = first.path or self.name
        return f"{paths} of {counted(total, noun)}; first: {where} ({first.why or difference_words(first)})"

    def _only_buffers(self, found: Sequence[Difference]) -> str:
        """Buffers that differ after a forward are DDP's ordinary state, which a reader has to know."""
        if any(d.leaf.kind != "buffer" or d.why for d in found) or not all(
            h.broadcasts for h in self.present().values()
        ):
            return ""
        return "\nonly buffers differ: DDP copies rank 0's to all ranks before the next forward"

    def _agreeing(self) -> str:
        """Which ranks agree among themselves, where that is not plain from the first sentence."""
        classes = self.classes()
        several = [rank_words(c) for c in classes if len(c) > 1]
        if len(self.held) < 3 or any(leaf.part for h in self.present().values() for leaf in h.leaves.values()):
            return ""
        if not several:
            return "\nno two ranks agree"
        return f"\n{' and '.join(several)} agree{' among themselves' * (len(several) > 1)}"

    def _equal(self) -> str:
        leaves = list(next(iter(self.present().values())).leaves.values())
        where = "on " + counted(len(self.held), "rank")
        alone = {x.path: x for x in leaves if self._sharded(x.path)}
        opaque = {x.path: x for x in leaves if x.kind == "opaque"}
        told = [x for x in leaves if x.path not in alone and x.path not in opaque]
        tail = self._not_compared(list(alone.values()), list(opaque.values()))
        if not told:
            return f"nothing to compare {where}: {tail or 'it is empty'}"
        size = sum(x.bytes for x in told)
        if len(leaves) == 1 and not told[0].path:
            only = f"{told[0].words}, {_bytes(size)} each" if told[0].shape is not None else told[0].text
            return f"equal {where} ({only})"
        kinds: dict[str, int] = {}
        for x in told:
            kinds[x.kind] = kinds.get(x.kind, 0) + 1
        each = f" ({_bytes(size)} each)" if size else ""
        said = f"{listed([counted(n, k) for k, n in kinds.items()])} equal {where}{each}"
        return f"{said}; {tail}" if tail else said

    def _sharded(self, path: str) -> bool:
        """No two ranks hold the same part of the tensor at `path`, so there is nothing to compare."""
        parts = [h.leaves[path].part for h in self.present().values() if path in h.leaves]
        return all(parts) and len(set(parts)) == len(parts)

    def _not_compared(self, alone: Sequence[Leaf], opaque: Sequence[Leaf]) -> str:
        said = []
        if alone:
            be = "is" if len(alone) == 1 else "are"
            said.append(f"{counted(len(alone), alone[0].kind)} {be} sharded; each rank holds its own part")
        if opaque:
            types = ", ".join(dict.fromkeys(x.type for x in opaque))
            said.append(f"{counted(len(opaque), 'object')} not compared ({types})")
        return "; ".join(said)


def difference_words(d: Difference) -> str:
    """`rank 2 differs from rank 0 by at most 3.1e-03; norms 1.2345 and 1.2346`."""
    others = [r for some in d.classes[1:] for r in some]
    verb = "differs" if len(others) == 1 else "differ"
    text = f"{rank_words(others)} {verb} from rank {d.reference}"
    if d.largest is not None:
        text += largest_words(d.largest, " by at most ")
    return f"{text}; {'norms' if d.leaf.norm is not None else 'values'} {shown_words(d.shown)}"


def largest_words(largest: float | None, before: str = "") -> str:
    """A largest difference as it is written: `3.1e-03`."""
    if largest is None:
        return "not measured"
    if largest != largest:
        return f"{': ' * bool(before)}NaN on one side"
    if largest == 0:
        return f"{': ' * bool(before)}only in bits (signs of zeros, or NaNs)"
    return f"{before}{largest:.1e}"


def shown_words(shown: Sequence[str]) -> str:
    """`1.2345 and 1.2346`, of many the first few."""
    return listed([*shown[:MOST_NORMS], *["…"] * (len(shown) > MOST_NORMS)])


def agreeing_words(d: Difference) -> str:
    """Which other ranks have the reference's value: `ranks 1, 3`, `none`."""
    return rank_words(d.classes[0][1:]) if len(d.classes[0]) > 1 else "none"


def _bytes(n: int) -> str:
    """`23,456 bytes`."""
    return f"{n:,}" + (" byte" if n == 1 else " bytes")


def _groups(of: Mapping[int, str]) -> dict[str, list[int]]:
    """Value → the ranks that have it, in the order of the lowest ranks."""
    found: dict[str, list[int]] = {}
    for rank in sorted(of):
        found.setdefault(of[rank], []).append(rank)
    return found


def _classes(of: Mapping[int, str]) -> list[tuple[int, ...]]:
    return [tuple(ranks) for ranks in _groups(of).values()]


def _apart(a: Any, b: Any) -> float:
    """|a - b| of two numbers; 0 if they are the same or both NaN."""
    if a == b or (a != a and b != b):
        return 0.0
    try:
        return float(abs(a - b))
    except OverflowError:  # whole numbers beyond a float
        return float("inf")


def _distinct(norms: Sequence[float | None]) -> list[str]:
    """Norms with as many digits as tell unequal ones apart: 5 at least, 17 at most."""
    known = [n for n in norms if n is not None]
    for digits in range(5, 18):
        texts = [f"{n:#.{digits}g}".rstrip(".") if n else "0" for n in known]
        if len(set(texts)) == len({repr(n) for n in known}):
            break
    return texts
