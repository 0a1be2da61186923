"""A document as HTML. It steps down by itself: a live drawing, a picture with tooltips, a picture, text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path

from nbddp.figures.document.sheet import Mark, Sheet, num
from nbddp.figures.document.svg import data_uri, sheet_style, svg
from nbddp.figures.html import FOLDED, SCROLLS, WORDS
from nbddp.figures.table import Table

HERE = Path(__file__).parent
STEPS = re.compile(r"^\s+|\s+//.*$|^//.*$", re.MULTILINE)  # of a script: what only readers need


@dataclass(frozen=True)
class Document:
    """sheets: the drawings; keys: legend, pairs of a small picture and its name. said: lines of the text that no
    drawing shows, which stay visible; the others are folded. None: all lines stay."""

    sheets: Sequence[Sheet]
    keys: Sequence[tuple[str, str]] = ()
    said: Sequence[str] | None = None


def page(made: Document, text: str, tables: Sequence[Table] = (), caption: Sequence[str] = ()) -> str:
    """The HTML of a document with its text. caption: lines that are added to both."""
    title, *more = text.split("\n")
    said = more if made.said is None else [*made.said, *caption]
    head = f"<b>{escape(title)}</b>" + "".join(f"\n{escape(line)}" for line in said)
    keys = "".join(map(_key, made.keys))
    panes = "".join(_pane(sheet) for sheet in made.sheets)
    return (
        f'<style>{css()}</style><div class="nbddp-figure">{WORDS.format(head)}'
        f'<div class="nbddp-keys">{keys}</div><div class="nbddp-panes">{panes}</div>'
        f"{_folded(text if made.said is not None else '', tables)}</div>"
        f"<script>{live()}</script>"
    )


def _folded(text: str, tables: Sequence[Table]) -> str:
    """What a drawing shows too."""
    if not text and not tables:
        return ""
    what = FOLDED if text else "The figure as a table" if len(tables) == 1 else "The figure as tables"
    shown = "".join(SCROLLS.format(table._repr_html_()) for table in tables)
    words = WORDS.format(escape(text)) if text else ""
    return f'<details><summary style="cursor: pointer">{what}</summary>{words}{shown}</details>'


def _key(key: tuple[str, str]) -> str:
    source, name = key
    return f'<span style="white-space: nowrap"><img alt="" src="{escape(source)}"> {escape(name)} &ensp;</span> '


def _pane(sheet: Sheet) -> str:
    kind = ' data-zoom="1"' if sheet.zoom else ""
    kind += f' data-beside="1" style="--beside: {sheet.beside}px"' if sheet.beside else ""
    kind += ' data-own="1"' if sheet.width else ""
    width = str(sheet.width) if sheet.width else "100%"
    image = (
        f'<img class="dark-light" alt="{escape(sheet.name)}" width="{width}" height="{num(sheet.height)}" '
        f'src="{escape(data_uri(svg(sheet)))}">'
    )
    spots = "".join(_spot(mark, sheet) for mark in sheet.marks)
    own = f"; width: {sheet.width}px" if sheet.width else ""
    return (
        f'<div class="nbddp-pane"{kind}><div class="nbddp-view" style="overflow-x: auto">'
        f'<div class="nbddp-drawing" style="position: relative{own}">{image}{spots}</div></div></div>'
    )


def _spot(mark: Mark, sheet: Sheet) -> str:
    """The text of a part, where the pointer rests on a picture; `live.js` takes all of it."""
    share = {
        "left": mark.left, "top": mark.top / sheet.height, "width": mark.right - mark.left,
        "height": (mark.bottom - mark.top) / sheet.height,
    }  # fmt: skip
    place = ";".join(f"{side}:{100 * part:.2f}%" for side, part in share.items())
    more = f' data-row="{mark.row}" data-at="{50 * (mark.left + mark.right):.2f}"'
    more += f' data-cell="{mark.cell[0]}:{mark.cell[1]}"' if mark.cell else ""
    return (
        f'<span class="nbddp-part" aria-hidden="true" title="{escape(mark.words)}" '
        f'style="position:absolute;{place}"{more}></span>'
    )


@lru_cache(maxsize=1)
def css() -> str:
    """The rules of a page with figures, in one line."""
    own = (HERE / "page.css").read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", own) + sheet_style()


@lru_cache(maxsize=1)
def live() -> str:
    return packed((HERE / "live.js").read_text(encoding="utf-8"))


def packed(script: str) -> str:
    """A script without its comments and indents."""
    return STEPS.sub("", script)
