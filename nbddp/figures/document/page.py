"""A document as HTML. It steps down by itself: a live drawing, a picture with tooltips, a picture, text."""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path

from nbddp.figures.document.sheet import Mark, Sheet, num
from nbddp.figures.document.svg import CLASS, data_uri, sheet_style, style, svg
from nbddp.figures.html import FOLDED, SCROLLS, WORDS
from nbddp.figures.page_script import DOT
from nbddp.figures.table import Table

HERE = Path(__file__).parent
STEPS = re.compile(r"^\s+|\s+//.*$|^//.*$", re.MULTILINE)  # of a script: what only readers need


@dataclass(frozen=True)
class Document:
    """sheets: the drawings; keys: legend, pairs of a small picture and its name. said: lines of the text that no
    drawing shows, which stay visible; the others are folded. None: all lines stay. title: in place of the first line,
    where the drawings show its rest. scenes: of `pack_scenes`, for parts with one, which show it in place of the first
    drawing; offered: which there are, in words."""

    sheets: Sequence[Sheet]
    keys: Sequence[tuple[str, str]] = ()
    said: Sequence[str] | None = None
    title: str = ""
    scenes: str = ""
    offered: str = ""


@dataclass(frozen=True)
class Scene:
    """What a document's first drawing may show, with the text and the tables of that."""

    sheet: Sheet
    text: str
    tables: Sequence[Table] = ()
    said: Sequence[str] | None = None


def pack_scenes(scenes: Mapping[int, Scene]) -> str:
    """As `live.js` unpacks them; a drawing takes a tenth of its bytes."""
    data = {
        number: {
            "name": scene.sheet.name, "height": num(scene.sheet.height), "body": "".join(scene.sheet.body),
            "parts": [{"words": mark.words, **_data(mark)} for mark in scene.sheet.marks],
            "head": _head(scene.text, scene.said), "fold": _inside(scene.text, scene.tables, scene.said),
        }
        for number, scene in scenes.items()
    }  # fmt: skip
    return b64encode(zlib.compress(json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode())).decode()


def page(made: Document, text: str, tables: Sequence[Table] = (), caption: Sequence[str] = ()) -> str:
    """The HTML of a document with its text. caption: the text's last lines, which are of no scene alone."""
    return f"<style>{css()}</style>{_figure(made, text, tables, caption)}<script>{live()}</script>"


def in_widget(made: Document, text: str, tables: Sequence[Table] = (), caption: Sequence[str] = ()) -> str:
    """The same for a widget, which runs no script but what an image calls when it is there."""
    calls = f'<img hidden alt="" src="{DOT}" onload="{escape(live())}">'
    return f"<style>{css()}</style>{_figure(made, text, tables, caption)}{calls}"


def inline(sheet: Sheet) -> str:
    """A drawing alone, for a page that has `inline_rules`. It follows the colour scheme of the page."""
    name = f'role="img" aria-label="{escape(sheet.name)}" style="color-scheme: inherit"'
    drawn = f'<svg class="{CLASS}" {name} width="100%" height="{num(sheet.height)}">{"".join(sheet.body)}</svg>'
    return in_theme(f'<div class="nbddp-drawing">{drawn}</div>')


def in_theme(html: str) -> str:
    """HTML in the colour scheme of the page, without anything that `live.js` treats."""
    return f'<div class="nbddp-figure" data-live="1">{html}</div>'


def inline_rules() -> str:
    return css() + style()


def _figure(made: Document, text: str, tables: Sequence[Table], caption: Sequence[str]) -> str:
    more = "".join(f"\n{line}" for line in caption)
    head = _head(text.removesuffix(more), made.said, made.title)
    head += f'<span class="nbddp-caption">{escape(more)}</span>' if more else ""
    keys = "".join(map(legend_key, made.keys))
    panes = "".join(_pane(sheet) for sheet in made.sheets)
    scenes = f' data-scenes="{made.scenes}" data-offered="{escape(made.offered)}"' if made.scenes else ""
    return (
        f'<div class="nbddp-figure"{scenes}>{WORDS.format(head)}'
        f'<div class="nbddp-keys">{keys}</div><div class="nbddp-panes">{panes}</div>'
        f"{_folded(text, tables, made.said)}</div>"
    )


def _head(text: str, said: Sequence[str] | None, shorter: str = "") -> str:
    """The title, and what no drawing shows."""
    title, *more = text.split("\n")
    lines = more if said is None else said
    return f"<b>{escape(shorter or title)}</b>" + "".join(f"\n{escape(line)}" for line in lines)


def _folded(text: str, tables: Sequence[Table], said: Sequence[str] | None) -> str:
    """What a drawing shows too."""
    inside = _inside(text, tables, said)
    what = "The figure as a table" if len(tables) == 1 else "The figure as tables"
    name = what if said is None else FOLDED
    return f'<details><summary style="cursor: pointer">{name}</summary>{inside}</details>' if inside else ""


def _inside(text: str, tables: Sequence[Table], said: Sequence[str] | None) -> str:
    words = WORDS.format(escape(text)) if said is not None else ""
    return words + "".join(SCROLLS.format(table._repr_html_()) for table in tables)


def legend_key(key: tuple[str, str]) -> str:
    """An entry of a legend."""
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
    more = "".join(f' data-{name}="{value}"' for name, value in _data(mark).items())
    return (
        f'<span class="nbddp-part" aria-hidden="true" title="{escape(mark.words)}" '
        f'style="position:absolute;{place}"{more}></span>'
    )


def _data(mark: Mark) -> dict[str, str]:
    """What `live.js` knows of a part besides its words."""
    more = {"cell": " ".join(f"{cell}:{line}" for cell, line in mark.cells)} if mark.cells else {}
    more |= {"scene": str(mark.scene)} if mark.scene is not None else {}
    return {"row": str(mark.row), "at": f"{50 * (mark.left + mark.right):.2f}", **more}


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
