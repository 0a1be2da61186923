"""Where the time of any program goes: a bar per rank, and how often each rank was the last to arrive. It is drawn as a
picture and as a live drawing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

from nbddp.analysis.quantities import duration, percent
from nbddp.analysis.steps import Place
from nbddp.capabilities.collectives.breakdown import Split
from nbddp.capabilities.collectives.instances import Kind
from nbddp.capabilities.collectives.program import MOST_KINDS, Breakdown, called
from nbddp.figures.axes import LINE, WIDTH, key, legend_above, place, rows, titled
from nbddp.figures.document.page import Document
from nbddp.figures.document.sheet import Mark, Sheet, axis, fitted, head
from nbddp.figures.document.svg import swatch
from nbddp.figures.figure import DescribedFigure, remade
from nbddp.figures.palette import FILLS, INK, MOVES, MUTED, PAPER, RC, TINTS, WAITS

ROW, CELL = 0.3, 0.24  # inches; ROW of a rank's bar, CELL of a row of the lower table
LEFT, RIGHT, TITLE, AXIS, BETWEEN = 1.5, 1.1, 0.55, 0.45, 0.3  # inches
LETTERS, SMALL = 100, 130  # in a line of the title, and of what stands under it
LETTER = 0.072  # inches
PARTS = (  # name; fill, hatch and ink of the picture; kind of the live drawing, and whether that is hatched
    ("compute", (FILLS[2], "", PAPER), "green", False),
    ("waits for a later rank", (WAITS, "", INK), "waits", False),
    ("other exposed communication", (MOVES, "////", INK), "moves", True),
    ("copies", (FILLS[0], "", PAPER), "blue", False),
    ("idle", (PAPER, "", INK), "lost", True),
)


@remade
def draw_program(found: Breakdown) -> DescribedFigure:
    """The figure, with words and tables."""
    with rc_context(RC):
        return DescribedFigure(_figure(found), found.sentences(), found.tables(), document=program_document(found))


def _figure(found: Breakdown) -> Figure:
    ranks = [(r, found.ranks[r]) for r in found.shown] if found.whole else []
    kinds = list(found.kinds)[:MOST_KINDS]
    upper, lower = ROW * max(1, len(ranks)), CELL * (len(kinds) + 1) if kinds else 0.0
    title = textwrap.wrap(found.sentences()[0], LETTERS)
    late = [line for s in (*found.of_late(), *found.folded()) for line in textwrap.wrap(s, SMALL)]
    top = TITLE + LINE * (len(title) - 1 + len(late))
    height = top + upper + AXIS + (BETWEEN + lower if kinds else 0.0)
    figure = titled(height, "\n".join(title), ["\n".join(late)], 0.12 + LINE * len(title))
    _bars(place(figure, LEFT, top, WIDTH - LEFT - RIGHT, upper), ranks, found.window)
    if kinds:
        _last(place(figure, LEFT, height - 0.08 - lower, WIDTH - LEFT - RIGHT, lower), found, kinds)
    return figure


def _bars(axes: Any, ranks: list[tuple[int, Split]], window: str) -> None:
    axes.set(xlim=(0, 1), ylim=(max(1, len(ranks)) - 0.5, -0.5))
    for row, (_, s) in enumerate(ranks):
        left = 0.0
        for (_, look, _, _), part in zip(PARTS, _parts(s), strict=True):
            share = part / s.whole
            _segment(axes, left, share, row, look)
            left += share
        if s.overlap is not None:
            axes.text(1.015, row, f"{percent(s.overlap)} hidden", va="center", size=8)
    rows(axes, range(len(ranks)), [f"rank {r}" for r, _ in ranks])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    axes.set_xlabel(f"of the time {window}", size=8)
    there = [any(parts) for parts in zip(*(_parts(s) for _, s in ranks), strict=True)]
    used = [key(name, *look[:2]) for (name, look, _, _), some in zip(PARTS, there, strict=False) if some]
    legend_above(axes, used, 0, len(used), borderpad=0, borderaxespad=0.5, columnspacing=1.2, handlelength=1.6)


def _parts(s: Split) -> tuple[int, ...]:
    """As PARTS has them."""
    return s.compute, s.waiting, s.exposed - s.waiting, s.copies, s.idle


def _segment(axes: Any, left: float, share: float, row: int, look: tuple[str, str, str]) -> None:
    fill, hatch, ink = look
    if share <= 0:
        return
    axes.add_patch(Rectangle((left, row - 0.36), share, 0.72, fc=fill, ec=MUTED, lw=0.4, hatch=hatch or None,
                             clip_on=False))  # fmt: skip
    text = percent(share)
    if len(text) * LETTER < share * (WIDTH - LEFT - RIGHT):
        box = {"fc": fill, "ec": "none", "pad": 1.0}
        axes.text(left + share / 2, row, text, ha="center", va="center", size=7.5, color=ink, bbox=box)


def _last(axes: Any, found: Breakdown, kinds: Any) -> None:
    """How often each rank was the last, by kind of collective: numbers, and a tint that follows them."""
    ranks = found.shown
    axes.set(xlim=(0, len(ranks)), ylim=(len(kinds), -1))
    for column, rank in enumerate(ranks):
        name = f"rank {rank}" if len(ranks) <= 8 else str(rank)
        axes.text(column + 0.5, -0.5, name, ha="center", va="center", size=8)
        for row, kind in enumerate(kinds):
            if rank not in kind.ranks:
                continue
            count = kind.last.get(rank, 0)
            much = count > kind.count / 2
            fill = FILLS[1] if much else TINTS[1] if count > kind.count / 4 else PAPER
            axes.add_patch(Rectangle((column, row), 1, 1, fc=fill, ec=MUTED, lw=0.4, clip_on=False))
            axes.text(column + 0.5, row + 0.52, str(count), ha="center", va="center", size=8,
                      color=PAPER if much else INK)  # fmt: skip
    names = [f"{k.op} × {k.count}" for k in kinds]
    rows(axes, [row + 0.5 for row in range(len(kinds))], [n if len(n) < 24 else f"{n[:22]}…" for n in names])
    axes.set_xticks([])
    axes.tick_params(labelsize=8)
    axes.text(-0.02, -0.5, "last to arrive", ha="right", va="center", size=8, color=MUTED,
              transform=axes.get_yaxis_transform())  # fmt: skip
    axes.spines["bottom"].set_visible(False)


# -- the live drawing ------------------------------------------------------------------------------

HEAD, LANE, GAP, TALL = 17, 22, 8, 22  # pixels: a rank's line, its bar, between ranks, a row of the lower table


def program_document(found: Breakdown) -> Document:
    """The bars, and under them the last to arrive."""
    sheets = [_bar_sheet(found)] if found.whole else []
    if found.kinds:
        sheets.append(_last_sheet(found, list(found.kinds)[:MOST_KINDS]))
    keys = [(swatch(kind), name) for name, _, kind, _ in PARTS]
    return Document(sheets, keys, found.unseen()) if found.whole else Document(sheets)


def _bar_sheet(found: Breakdown) -> Sheet:
    sheet, top = Sheet(f"Time of each rank: {found.sentences()[0]}", zoom=True), 4.0
    for i, rank in enumerate(found.shown):
        s = found.ranks[rank]
        hidden = f"{percent(s.overlap)} of communication hidden" if s.overlap is not None else ""
        words = f"rank {rank}: {duration(s.whole / 1e9)}" + (f"\n{hidden}" if hidden else "")
        head(sheet, f"rank {rank}", hidden, top, words, 2 * i)
        left = 0.0
        for (name, _, kind, hatched), part in zip(PARTS, _parts(s), strict=True):
            share = part / s.whole
            if share > 0:
                said = f"rank {rank} · {name}\n{percent(share)}, {duration(part / 1e9)} of {duration(s.whole / 1e9)}"
                lines = found.waits_at.get(rank, ()) if kind == "waits" else ()
                mark = Mark(left, left + share, top + HEAD, top + HEAD + LANE, said + _at(lines), 2 * i + 1, lines)
                sheet.bar(mark, kind, (f"{name} {percent(share)}", percent(share)), hatched)
            left += share
        top += HEAD + LANE + GAP
    axis(sheet, top, 0.0, 100.0, f"% of the time {found.window}")
    return sheet


def _last_sheet(found: Breakdown, kinds: Sequence[Kind]) -> Sheet:
    """A row of cells for each kind of collective: how often each rank was the last."""
    sheet, top, ranks = Sheet("How often each rank was the last to arrive"), 4.0, found.shown
    for i, kind in enumerate(kinds):
        words = f"{kind.op}: {kind.count} calls\nlast to arrive: waited for {duration(kind.late / 1e9)}"
        head(sheet, f"{kind.op} × {kind.count}", "last to arrive, by rank", top, words + _at(kind.places), 2 * i)
        for column, rank in enumerate(ranks):
            if rank in kind.ranks:
                _cell(sheet, kind, rank, (column / len(ranks), (column + 1) / len(ranks)), top + HEAD, 2 * i + 1)
        top += HEAD + TALL + GAP
    for column, rank in enumerate(ranks):
        at = (column + 0.5) / len(ranks)
        sheet.body.append(fitted(at, top + 8, 1 / len(ranks), (f"rank {rank}", str(rank)), "none"))
    sheet.height = top + 14
    return sheet


def _cell(sheet: Sheet, kind: Kind, rank: int, place: tuple[float, float], top: float, row: int) -> None:
    count = kind.last.get(rank, 0)
    fill = "brown" if count > kind.count / 2 else "tan" if count > kind.count / 4 else "none"
    words = f"rank {rank} was the last in {count} of {kind.count} calls of {kind.op}{_at(kind.places)}"
    sheet.bar(Mark(*place, top, top + TALL, words, row, kind.places), fill, (str(count),))


def _at(places: Sequence[Place]) -> str:
    return f"\nat {called(places)}" if places else ""
