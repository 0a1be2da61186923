"""`%ddp compare` and `Pool.compare`: the ranks are asked for digests, and those that differ are measured.

What travels: per leaf of a name a digest, norm, shape and dtype (a number travels itself). Then one rank of each class
that differs gets the reference rank's bytes of the differing tensors. They come in pieces of 16 MiB, through the pool's
own connections; at most 256 MiB per comparison, the rest is reported as not measured. No collective is called: a
process group that a cell has left stays as it is, sequence numbers included.

Only tensors that are known to differ take part, and of equal ranks only the lowest. The reference rank's bytes are read
in pieces of at most PIECE bytes, and each is given to the ranks that differ; they answer with one number per tensor. In
all at most LIMIT bytes are read. A tensor beyond that is left out whole, so no difference is reported that was measured
on a part only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, Protocol

from nbddp.analysis.answers import IdleRanks
from nbddp.analysis.quantities import drawn, note
from nbddp.capabilities.compare.replicas import (
    Compared,
    Difference,
    agreeing_words,
    difference_words,
    largest_words,
    shown_words,
)
from nbddp.errors import BadInput
from nbddp.figures.document.page import Document, page
from nbddp.figures.document.sheet import Mark, Sheet, fitted, head
from nbddp.figures.document.svg import swatch
from nbddp.figures.table import Table
from nbddp.launch.topology import rank_words
from nbddp.notebook.commands import Asked, CommandLine
from nbddp.pool.worker_group import check_ranks
from nbddp.protocol import pickling

PIECE = 1 << 24  # bytes; a multiple of every dtype's size
LIMIT = 1 << 28  # bytes per comparison
MOST_ROWS = 20


class Ask(Protocol):
    """Asks some ranks for something about their names; rank → the buffers of its answer."""

    def __call__(
        self, some: Sequence[int], fields: Mapping[str, object], buffers: Sequence[bytes] = ()
    ) -> Mapping[int, Sequence[Any]]: ...


def compare(pool: IdleRanks, *names: str, ranks: Sequence[int] | None = None) -> Report:
    """Compare the ranks' copies of names: tensors, modules, optimizers, numbers, or containers of them.

    Ranks send digests; for tensors that differ also the bytes of one rank, up to 256 MiB in all
    (`nbddp.capabilities.compare.command`). No process group is needed or used. Raises BadInput for a name that no
    rank has.
    """
    chosen = check_ranks(ranks, pool.placed().world_size, "--ranks")

    def ask(
        some: Sequence[int], fields: Mapping[str, object], buffers: Sequence[bytes] = ()
    ) -> Mapping[int, Sequence[Any]]:
        return pool.answers("compare", some, buffers, meets=False, **fields)

    if not names or not chosen:
        raise BadInput(f"there are no {'ranks' if names else 'names'} to compare; write %ddp compare model --ranks 0-1")
    answers = ask(chosen, {"part": "look", "names": list(names)})
    found = [Compared(n, {r: pickling.unpack(answers[r][i]) for r in chosen}) for i, n in enumerate(names)]
    for c in found:
        _check(c)
    largest = _measure(within(w for c in found for w in _wanted(c)), ask)
    return report([replace(c, largest=largest.get(c.name, {})) for c in found])


def show(asked: Asked, line: CommandLine) -> Report:
    return compare(asked.pool, *line.args["names"], ranks=line.args["ranks"])


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


# -- a plan of what travels ------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """A tensor to be measured: `bytes` of `reference` are to be seen by the ranks `others`."""

    name: str
    path: str
    reference: int
    others: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class ByteRange:
    """Bytes `start` to `stop` of one tensor."""

    wanted: Wanted
    start: int
    stop: int


def within(wanted: Iterable[Wanted], limit: int = LIMIT) -> list[Wanted]:
    """Those that fit into `limit` bytes one after the other; one that does not is passed over."""
    found, left = [], limit
    for w in wanted:
        if 0 < w.bytes <= left:
            found.append(w)
            left -= w.bytes
    return found


def pieces(wanted: Sequence[Wanted], piece: int = PIECE) -> Iterator[list[ByteRange]]:
    """Batches of spans of at most `piece` bytes, in each the same reference and others: every byte of each tensor
    once."""
    batch: list[ByteRange] = []
    room = piece
    for w in sorted(wanted, key=_meeting):  # stable: the given order within those that meet
        if batch and _meeting(batch[0].wanted) != _meeting(w):
            yield batch
            batch, room = [], piece
        for span in _spans(w, piece):
            if span.stop - span.start > room:
                yield batch
                batch, room = [], piece
            batch.append(span)
            room -= span.stop - span.start
    if batch:
        yield batch


def _meeting(w: Wanted) -> tuple[int, tuple[int, ...]]:
    return w.reference, w.others


def _spans(w: Wanted, piece: int) -> Iterator[ByteRange]:
    for start in range(0, w.bytes, piece):
        yield ByteRange(w, start, min(start + piece, w.bytes))


# -- the answer ------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Report(Table):
    """`equal`: True if all names are equal on all ranks. `compared` has each name's details.

    `rows` are those of the first 20 differences; `title` is the words above them, `more` those below. drawing: of these
    differences.
    """

    compared: Sequence[Compared] = field(default_factory=tuple)
    more: str = ""
    drawing: Document | None = None

    @property
    def equal(self) -> bool:
        return all(c.equal for c in self.compared)

    def __repr__(self) -> str:
        if not self.rows:
            return self.title
        return "\n".join([self.title, "", repr(Table(self.columns, self.rows)), *([self.more] if self.more else [])])

    def _repr_html_(self) -> str:
        if self.drawing is None:
            return f"<div>{'<br>'.join(escape(line) for line in self.title.splitlines())}</div>"
        text = "\n".join(filter(None, [self.title, self.more]))
        return page(self.drawing, text, [Table(self.columns, self.rows)])


def report(compared: Sequence[Compared]) -> Report:
    """The report on some names."""
    found = [(c, d) for c in compared for d in c.differences()]
    references = {d.reference for _, d in found}
    columns, rows = _columns(found, references), [_row(c, d, len(compared), references) for c, d in found[:MOST_ROWS]]
    left = len(found) - len(rows)
    words = "\n".join(c.describe() for c in compared)
    named = [(row[0], d) for row, (_, d) in zip(rows, found, strict=False)]
    drawing = replicas_document(named) if named else None
    more = f"and {left} more" if left else ""
    return Report(columns, rows, words, compared=tuple(compared), more=more, drawing=drawing)


def _columns(found: Sequence[tuple[Compared, Difference]], references: set[int]) -> list[str]:
    agree = f"agree with rank {min(references)}" if len(references) == 1 else "agree"
    tensors = all(d.leaf.norm is not None for _, d in found)
    return ["name", "shape", agree, "largest difference", "norms" if tensors else "norms or values"]


def _row(compared: Compared, d: Difference, names: int, references: set[int]) -> list[str]:
    """One difference under `_columns`. Parts of sharded tensors have references of their own, which are shown."""
    name = f"{compared.name}{'.' * (not d.path.startswith('['))}{d.path}" if d.path and names > 1 else d.path
    agree = agreeing_words(d) if len(references) == 1 else f"with rank {d.reference}: {agreeing_words(d)}"
    if d.why:
        return [name or compared.name, d.why, agree, "", ""]
    measured = d.leaf.norm is not None or d.largest is not None
    apart = largest_words(d.largest) if measured else ""
    return [name or compared.name, d.leaf.words, agree, apart, shown_words(d.shown)]


# -- the document ------------------------------------------------------------------------------------

HEAD, CELL, BETWEEN = 17, 22, 8  # pixels: a value's line, its cells, between values
KINDS = ("paper", "brown", "purple", "green", "tan", "mint", "tint", "blue")  # of classes; the first: as the reference
KEYS = (("paper", "as the lowest rank"), ("brown", "differs from it; ranks of one colour agree"))


def replicas_document(found: Sequence[tuple[str, Difference]]) -> Document:
    """found: the differences, each with its name."""
    ranks = sorted({r for _, d in found for some in d.classes for r in some})
    shown = drawn(ranks, [some[0] for _, d in found for some in d.classes[1:]])
    sheet, top = Sheet("Which ranks differ in which values"), 4.0
    for i, (name, difference) in enumerate(found):
        words = difference.why or difference_words(difference)
        head(sheet, name, difference.leaf.words, top, f"{name}: {words}", 2 * i)
        _cells(sheet, name, difference, shown, top + HEAD, 2 * i + 1)
        top += HEAD + CELL + BETWEEN
    for column, rank in enumerate(shown):
        at = (column + 0.5) / len(shown)
        sheet.body.append(fitted(at, top + 8, 1 / len(shown), (f"rank {rank}", str(rank)), "none"))
    few = note(len(ranks), len(shown))
    if few:
        sheet.text(0, top + 26, few, "s muted")
    sheet.height = top + (32 if few else 14)
    return Document([sheet], [(swatch(kind), name) for kind, name in KEYS])


def _cells(sheet: Sheet, name: str, difference: Difference, shown: Sequence[int], top: float, row: int) -> None:
    """What each rank has; of ranks that agree the cells are alike."""
    for number, ranks in enumerate(difference.classes):
        value = difference.shown[number] if number < len(difference.shown) else ""
        said = f"norm {value}" if value and difference.leaf.norm is not None else value
        alike = f"{rank_words(ranks)} agree" if len(ranks) > 1 else "like no other rank"
        kind = KINDS[1 + (number - 1) % (len(KINDS) - 1)] if number else KINDS[0]
        for rank in ranks:
            if rank in shown:
                at = shown.index(rank)
                place = at / len(shown), (at + 1) / len(shown), top, top + CELL
                words = f"{name} on rank {rank}" + (f": {said}" if said else "") + f"\n{alike}"
                sheet.bar(Mark(*place, words, row), kind, tuple(filter(None, (value, chr(97 + number % 26)))))
