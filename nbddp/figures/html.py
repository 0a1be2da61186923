"""A picture on a page, with its words and table beneath it: HTML that follows the page's theme.

The picture is one opaque PNG. In a dark theme a CSS rule inverts its lightness, keeps its hues, and lets the page
show through what was white. JupyterLab and Notebook 7 remove CSS from notebooks that they do not trust, but keep
classes; the extension in `labextensions/` gives their page the same rules. Without it the PNG is on white, which can
be read in every theme.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from nbddp.figures.table import Table

PICTURE, SHEET, SPOT = "nbddp-picture", "nbddp-sheet", "nbddp-spot"  # CSS classes: a picture, what it lies on, a part
DARK = (
    '[data-jp-theme-light="false"]',  # JupyterLab, Notebook 7, nbconvert
    ".vscode-dark",
    ".vscode-high-contrast:not(.vscode-high-contrast-light)",
)
RULE = "filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen"
GROUND = (
    "background: var(--jp-layout-color0, var(--vscode-editor-background, transparent))"  # JupyterLab isolates cells
)
RULES = ((PICTURE, RULE), (SHEET, GROUND))
STYLE = "".join(f"{', '.join(f'{theme} .{name}' for theme in DARK)} {{{rule}}} " for name, rule in RULES)
POINTED = f".{SPOT} {{position: absolute}} .{SPOT}:hover {{outline: 2px solid currentColor; outline-offset: -1px}} "
ON_PAPER = f"@media print {{.{PICTURE} {{min-width: 0 !important}}}} "  # paper does not scroll
LEAST = 0.8  # of a picture's width: on a narrower page it scrolls, for smaller text could not be read
LOOK = "white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere; line-height: 1.35; margin: 4px 0"
WORDS = f'<pre style="{LOOK}">{{}}</pre>'  # JupyterLab breaks such lines within words
FOLDED = "The figure as text"
SCROLLS = '<div style="overflow-x: auto" tabindex="0" role="region" aria-label="table">{}</div>'


@dataclass(frozen=True)
class Spot:
    """A part of a picture that has words of its own. left, top, width, height: shares of the picture's."""

    left: float
    top: float
    width: float
    height: float
    words: str


def words_of(text: str) -> str:
    """Words as HTML, line by line."""
    return WORDS.format(escape(text))


def folded(text: str) -> str:
    """Words that say again what a picture shows, line by line, behind a line that opens them."""
    return f'<details><summary style="cursor: pointer">{FOLDED}</summary>{words_of(text)}</details>'


def picture(png: bytes, width: int, alt: str, more: str = "", spots: Sequence[Spot] = ()) -> str:
    """The picture as HTML. width: CSS pixels; alt: what a reader gets who does not see it; more: further classes.
    spots: parts whose words appear where the pointer rests. They are hidden from screen readers, since words and table
    beneath the picture say the same. The picture is a block: below one in a line is room for descenders, which would
    shift them. Where styles are removed, the plain picture is left."""
    least = round(LEAST * width)
    size = f"display: block; max-width: 100%; min-width: {least}px; height: auto; background: #ffffff"
    data = f"data:image/png;base64,{b64encode(png).decode()}"
    image = f'<img class="{PICTURE} {more}" alt="{escape(alt)}" width="{width}" style="{size}" src="{data}">'
    if spots:
        over = "".join(map(_over, spots))
        image = f'<div style="position: relative; max-width: {width}px; min-width: {least}px">{image}{over}</div>'
    style = STYLE + POINTED if spots else STYLE
    return f'<style>{style}{ON_PAPER}</style><div class="{SHEET}" style="overflow-x: auto">{image}</div>'


def _over(spot: Spot) -> str:
    sides = {"left": spot.left, "top": spot.top, "width": spot.width, "height": spot.height}
    place = ";".join(f"{side}:{100 * share:.2f}%" for side, share in sides.items())
    return f'<span class="{SPOT}" aria-hidden="true" title="{escape(spot.words)}" style="{place}"></span>'


def page(png: bytes, width: int, text: str, tables: Sequence[Table] = (), spots: Sequence[Spot] = ()) -> str:
    """Picture, words, and tables that scroll by themselves."""
    alt = text.partition("\n")[0]
    shown = "".join(SCROLLS.format(table._repr_html_()) for table in tables)
    return picture(png, width, alt, spots=spots) + words_of(text) + shown
