"""Where each rank's memory is: a stacked bar per rank, as a picture with sizes on it and as a live drawing."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.patches import Rectangle

from nbddp.analysis.quantities import size
from nbddp.capabilities.memory.parts import (
    RankMemory,
    kept_in_all,
    sentences,
    shown_parts,
    shown_ranks,
    span,
    table,
    unit,
)
from nbddp.figures.axes import EDGE, LINE, WIDTH, key, legend_above, place, rows, titled
from nbddp.figures.document.page import Document
from nbddp.figures.document.sheet import Mark, Sheet, axis, head
from nbddp.figures.document.svg import swatch
from nbddp.figures.figure import DescribedFigure, remade
from nbddp.figures.palette import FILLS, INK, MOVES, MUTED, PAPER, RC

BAR = 0.62  # a bar's share of its row
LEFT, RIGHT, BOTTOM, LEGEND = 0.75, 0.95, 0.5, 0.42  # inches: names, totals, axis, legend
LETTER = 0.075  # inches that a letter of a label takes
LETTERS = 135  # in a line under the title
STYLES: dict[str, tuple[str, str, str, str]] = {  # fill, hatch and its colour, ink
    "parameters": (FILLS[0], "", FILLS[0], PAPER),
    "module buffers": ("#d5e3f0", "...", MUTED, INK),
    "gradients": (FILLS[2], "\\\\\\", "#5f9a68", PAPER),
    "optimizer state": (FILLS[3], "xxx", "#b6779f", PAPER),
    "DDP buckets": (FILLS[1], "|||", "#c58a52", PAPER),
}
SMALL, BETWEEN = 0.1, 0.95  # share of the bar below which the parts get axes of their own; inches between the two
OTHER = (MOVES, "////", "#8a6a45", INK)
Part = tuple[str, list[int]]  # its name, its bytes on each rank


@remade
def draw_memory(ranks: Sequence[RankMemory]) -> DescribedFigure:
    """The bars of at most 16 ranks, with the most and the least among them.

    If the rest leaves no room for the parts (a small model in a process), parts and rest are drawn beside each other.
    Each then has a scale of its own.
    """
    drawn, parts = _shown(ranks)
    apart = _are_apart(drawn)
    groups = [parts[:-1], parts[-1:]] if apart else [parts]
    with rc_context(RC):
        several = _axes(ranks, 0.55 if len(drawn) <= 4 else 0.36, [0.6, 0.4] if apart else [1.0])
        for axes, some in zip(several, groups, strict=True):
            _bars(axes, drawn, some)
        _legend(several[0], ranks)
        if apart:
            several[0].set_xlabel(f"{several[0].get_xlabel()}, kept between steps")
            several[1].set_xlabel(f"{several[1].get_xlabel()}, on top at the peak")
            several[1].set_yticks([])
    return DescribedFigure(several[0].figure, sentences(ranks), [table(ranks)], document=memory_document(ranks))


def _shown(ranks: Sequence[RankMemory]) -> tuple[list[RankMemory], list[Part]]:
    """The ranks that are drawn, and their parts."""
    places = shown_ranks(ranks)
    return [ranks[i] for i in places], [(name, [some[i] for i in places]) for name, some in shown_parts(ranks)]


def _are_apart(drawn: Sequence[RankMemory]) -> bool:
    """Whether the parts are so small against the rest that they are drawn beside it."""
    return max(r.kept for r in drawn) < SMALL * max(r.total for r in drawn)


def _axes(ranks: Sequence[RankMemory], row: float, shares: Sequence[float]) -> list[Any]:
    """Axes beside each other in a figure of their own, with what the ranks keep above them."""
    first, *others = sentences(ranks)
    texts = [line for text in others for line in textwrap.wrap(text, LETTERS)]
    bars = row * len(shown_ranks(ranks))
    height = 0.35 + LINE * len(texts) + LEGEND + bars + BOTTOM
    figure = titled(height, ": ".join(first.split(": ")[:2]), texts, 0.31)
    room, left, found = WIDTH - LEFT - RIGHT - BETWEEN * (len(shares) - 1), LEFT, []
    for share in shares:
        found.append(place(figure, left, height - BOTTOM - bars, share * room, bars))
        left += share * room + BETWEEN
    return found


def _bars(axes: Any, drawn: Sequence[RankMemory], parts: Sequence[Part]) -> None:
    """A bar per rank, with its total behind it."""
    totals = [sum(some[i] for _, some in parts) for i in range(len(drawn))]
    name_of_unit, scale = unit(max(totals))
    most = max(max(totals) / scale, 1e-9)
    axes.set(xlim=(0, most), ylim=(len(drawn) - 0.5, -0.5))
    inch = axes.get_position().width * axes.figure.get_figwidth() / most  # per unit
    for i, total in enumerate(totals):
        left = 0.0
        for name, some in parts:
            width, text = some[i] / scale, size(some[i])
            fits = len(parts) > 1 and len(text) * LETTER < width * inch
            _segment(axes, left, width, i, name, text if fits else "")
            left += width
        axes.text(left + 0.08 / inch, i, size(total), va="center", size=8.5, weight="bold")
    rows(axes, range(len(drawn)), [f"rank {r.rank}" for r in drawn])
    axes.set_xlabel(name_of_unit)


def _segment(axes: Any, left: float, width: float, row: int, name: str, text: str) -> None:
    fill, hatch, lines, ink = STYLES.get(name, OTHER)
    if width <= 0:
        return
    place = (left, row - BAR / 2)
    axes.add_patch(Rectangle(place, width, BAR, fc=fill, ec=lines, hatch=hatch or None, lw=0, clip_on=False))
    axes.add_patch(Rectangle(place, width, BAR, fc="none", ec=PAPER, lw=0.8, clip_on=False))
    if text:
        box = {"fc": fill, "ec": "none", "pad": 1.2}  # no line of a hatch through the text
        axes.text(left + width / 2, row, text, ha="center", va="center", size=7.5, color=ink, bbox=box)


def _legend(axes: Any, ranks: Sequence[RankMemory]) -> None:
    """What each fill is, and its size; kinds differ by hatch and by their order too, never by colour alone."""
    keys = []
    for name, some in shown_parts(ranks):
        fill, hatch, lines, _ = STYLES.get(name, OTHER)
        keys.append(key(f"{name}\n{span(some)}", fill, hatch, lines, 0))
    left = (EDGE - LEFT) / (axes.get_position().width * axes.figure.get_figwidth())
    spacing = {"borderpad": 0, "borderaxespad": 0.4, "columnspacing": 1.3, "handlelength": 1.8, "handleheight": 1.4}
    legend_above(axes, keys, left, len(keys), **spacing)


# -- the live drawing ------------------------------------------------------------------------------

HEAD, LANE, GAP = 17, 22, 8  # pixels: a rank's line, its bar, between ranks
KINDS = {
    "parameters": "blue", "module buffers": "tint", "gradients": "green", "optimizer state": "purple",
    "DDP buckets": "brown",
}  # fmt: skip
REST = "moves"


def memory_document(ranks: Sequence[RankMemory]) -> Document:
    """One drawing, or two beside each other where the parts are small against the rest."""
    some, parts = _shown(ranks)
    sheets = (
        [_sheet("Memory kept between steps", some, parts[:-1], 360),
         _sheet("Memory on top at the peak", some, parts[-1:], 360)]
        if _are_apart(some) else [_sheet("Memory of each rank", some, parts, 0)]
    )  # fmt: skip
    keys = [(swatch(KINDS.get(name, REST)), f"{name} {span(sizes)}") for name, sizes in shown_parts(ranks)]
    return Document(sheets, keys, sentences(ranks)[1:], kept_in_all(ranks))


def _sheet(name: str, ranks: Sequence[RankMemory], parts: Sequence[Part], beside: int) -> Sheet:
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
                kind = KINDS.get(part, REST)
                sheet.bar(mark, kind, (f"{part} {size(sizes[i])}", size(sizes[i])), kind == REST)
            left += share
        top += HEAD + LANE + GAP
    axis(sheet, top, 0.0, most / scale, f"{scale_name}: {name[0].lower()}{name[1:]}")
    return sheet
