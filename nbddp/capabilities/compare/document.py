"""Which ranks differ in which values, as a live drawing: a row per value, a cell per rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.analysis.quantities import drawn, note
from nbddp.capabilities.compare.replicas import Difference, difference_words
from nbddp.figures.document.page import Document
from nbddp.figures.document.sheet import Mark, Sheet, fitted, head
from nbddp.figures.document.svg import swatch
from nbddp.launch.topology import rank_words

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
