"""Where each rank's memory is, as a live drawing: a stacked bar per rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.analysis.quantities import size
from nbddp.capabilities.memory.parts import RankMemory, kept_in_all, sentences, shown_parts, shown_ranks, span, unit
from nbddp.figures.document.page import Document
from nbddp.figures.document.sheet import Mark, Sheet, axis, head
from nbddp.figures.document.svg import swatch

HEAD, LANE, BETWEEN = 17, 22, 8  # pixels: a rank's line, its bar, between ranks
KINDS = {
    "parameters": "blue", "module buffers": "tint", "gradients": "green", "optimizer state": "purple",
    "DDP buckets": "brown",
}  # fmt: skip
OTHER = "moves"
APART = 0.1  # share of the whole below which the parts have a drawing of their own
Part = tuple[str, list[int]]


def memory_document(ranks: Sequence[RankMemory]) -> Document:
    """One drawing, or two beside each other where the parts are small against the rest."""
    places = shown_ranks(ranks)
    some = [ranks[i] for i in places]
    parts = [(name, [sizes[i] for i in places]) for name, sizes in shown_parts(ranks)]
    apart = max(r.kept for r in some) < APART * max(r.total for r in some)
    sheets = (
        [_bars("Memory kept between steps", some, parts[:-1], 360),
         _bars("Memory on top at the peak", some, parts[-1:], 360)]
        if apart else [_bars("Memory of each rank", some, parts, 0)]
    )  # fmt: skip
    keys = [(swatch(KINDS.get(name, OTHER)), f"{name} {span(sizes)}") for name, sizes in shown_parts(ranks)]
    return Document(sheets, keys, sentences(ranks)[1:], kept_in_all(ranks))


def _bars(name: str, ranks: Sequence[RankMemory], parts: Sequence[Part], beside: int) -> Sheet:
    sheet, top = Sheet(name, beside=beside), 4.0
    totals = [sum(sizes[i] for _, sizes in parts) for i in range(len(ranks))]
    scale_name, scale = unit(max(totals))
    most = max(*totals, 1)
    for i, rank in enumerate(ranks):
        head(sheet, f"rank {rank.rank}", size(totals[i]), top, f"rank {rank.rank}: {size(totals[i])}", 2 * i)
        left = 0.0
        for part, sizes in parts:
            share = sizes[i] / most
            if share > 0:
                words = f"rank {rank.rank} · {part}\n{size(sizes[i])} of {size(totals[i])}"
                mark = Mark(left, left + share, top + HEAD, top + HEAD + LANE, words, 2 * i + 1)
                kind = KINDS.get(part, OTHER)
                sheet.bar(mark, kind, (f"{part} {size(sizes[i])}", size(sizes[i])), kind == OTHER)
            left += share
        top += HEAD + LANE + BETWEEN
    axis(sheet, top, 0.0, most / scale, f"{scale_name}: {name[0].lower()}{name[1:]}")
    return sheet
