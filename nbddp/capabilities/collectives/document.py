"""Where the time of a program goes, as live drawings: a bar per rank, and how often each rank was the last. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.analysis.quantities import duration, percent
from nbddp.analysis.steps import Place
from nbddp.capabilities.collectives.breakdown import Split
from nbddp.capabilities.collectives.instances import Kind
from nbddp.capabilities.collectives.program import MOST_KINDS, Breakdown, called
from nbddp.figures.document.page import Document
from nbddp.figures.document.sheet import Mark, Sheet, axis, fitted, head
from nbddp.figures.document.svg import swatch

HEAD, LANE, BETWEEN, CELL = 17, 22, 8, 22  # pixels: a rank's line, its bar, between ranks, a row of the lower table
PARTS = (  # name, kind, hatched
    ("compute", "green", False),
    ("waits for a later rank", "waits", False),
    ("other exposed communication", "moves", True),
    ("copies", "blue", False),
    ("idle", "lost", True),
)


def program_document(found: Breakdown) -> Document:
    """The bars, and under them the last to arrive."""
    sheets = [_bars(found)] if found.whole else []
    if found.kinds:
        sheets.append(_last(found, list(found.kinds)[:MOST_KINDS]))
    keys = [(swatch(kind), name) for name, kind, _ in PARTS]
    return Document(sheets, keys, found.unseen()) if found.whole else Document(sheets)


def _bars(found: Breakdown) -> Sheet:
    sheet, top = Sheet(f"Time of each rank: {found.sentences()[0]}", zoom=True), 4.0
    for i, rank in enumerate(found.shown):
        s = found.ranks[rank]
        hidden = f"{percent(s.overlap)} of communication hidden" if s.overlap is not None else ""
        words = f"rank {rank}: {duration(s.whole / 1e9)}" + (f"\n{hidden}" if hidden else "")
        head(sheet, f"rank {rank}", hidden, top, words, 2 * i)
        left = 0.0
        for (name, kind, hatched), part in zip(PARTS, _parts(s), strict=True):
            share = part / s.whole
            if share > 0:
                said = f"rank {rank} · {name}\n{percent(share)}, {duration(part / 1e9)} of {duration(s.whole / 1e9)}"
                lines = found.waits_at.get(rank, ()) if kind == "waits" else ()
                mark = Mark(left, left + share, top + HEAD, top + HEAD + LANE, said + _at(lines), 2 * i + 1, lines)
                sheet.bar(mark, kind, (f"{name} {percent(share)}", percent(share)), hatched)
            left += share
        top += HEAD + LANE + BETWEEN
    axis(sheet, top, 0.0, 100.0, f"% of the time {found.window}")
    return sheet


def _parts(s: Split) -> tuple[int, ...]:
    """As PARTS has them."""
    return s.compute, s.waiting, s.exposed - s.waiting, s.copies, s.idle


def _last(found: Breakdown, kinds: Sequence[Kind]) -> Sheet:
    """A row of cells for each kind of collective: how often each rank was the last."""
    sheet, top, ranks = Sheet("How often each rank was the last to arrive"), 4.0, found.shown
    for i, kind in enumerate(kinds):
        words = f"{kind.op}: {kind.count} calls\nlast to arrive: waited for {duration(kind.late / 1e9)}"
        head(sheet, f"{kind.op} × {kind.count}", "last to arrive, by rank", top, words + _at(kind.places), 2 * i)
        for column, rank in enumerate(ranks):
            if rank in kind.ranks:
                _cell(sheet, kind, rank, (column / len(ranks), (column + 1) / len(ranks)), top + HEAD, 2 * i + 1)
        top += HEAD + CELL + BETWEEN
    for column, rank in enumerate(ranks):
        at = (column + 0.5) / len(ranks)
        sheet.body.append(fitted(at, top + 8, 1 / len(ranks), (f"rank {rank}", str(rank)), "none"))
    sheet.height = top + 14
    return sheet


def _cell(sheet: Sheet, kind: Kind, rank: int, place: tuple[float, float], top: float, row: int) -> None:
    count = kind.last.get(rank, 0)
    fill = "brown" if count > kind.count / 2 else "tan" if count > kind.count / 4 else "none"
    words = f"rank {rank} was the last in {count} of {kind.count} calls of {kind.op}{_at(kind.places)}"
    sheet.bar(Mark(*place, top, top + CELL, words, row, kind.places), fill, (str(count),))


def _at(places: Sequence[Place]) -> str:
    return f"\nat {called(places)}" if places else ""
