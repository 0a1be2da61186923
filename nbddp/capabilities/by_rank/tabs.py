"""A run's output as HTML: one pane for the ranks that printed the same, and tabs over the panes. Pure.

The HTML has the panes once, as folds. A script makes tabs of them; all ranks, one rank, and ranks side by side are the
same panes, laid out differently. Where scripts are removed, the folds stay, and where HTML is not shown, the text. The
HTML of a run that has ended depends on its output alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path

from nbddp.capabilities.by_rank import panes as model
from nbddp.capabilities.by_rank.embedded import embedded
from nbddp.capabilities.by_rank.panes import Line, Pane, Rich
from nbddp.figures import terminal_colours
from nbddp.output.page import OutputPage, OutputState

MANY = 40  # lines from which on output is worth tabs
NAME = "nbddp-tabs"
LATER = "Here are only the newest lines of each rank. The lines that differ are listed when the cell has ended."
SHORT = 12  # ranks from which on a tab has the number alone
# What is left of the looks where styles are removed
BOX = "max-height: 22em; overflow: auto"
PRE = "margin: 0; white-space: pre; font-family: monospace"
TAGS = {"stderr": "i", model.NOTE: "b", model.MOVING: "u"}


def page(state: OutputState) -> OutputPage | None:
    """The page, or None where the output is short."""
    if state.live:
        if max(map(model.printed, state.outputs), default=0) <= MANY:
            return None
        shown = model.live(state)
    else:
        shown = model.kept(state)
        if not is_worth(shown):
            return None
    return OutputPage(html(shown, state.live, state.below), lambda display: embedded(display) is not None)


def is_worth(panes: Sequence[Pane]) -> bool:
    """Whether there are more lines than a screen has, or pictures and tables of several ranks."""
    return lines_of(panes) > MANY or sum(pane.has_large() or pane.has_below() for pane in panes) > 1


def lines_of(panes: Sequence[Pane]) -> int:
    return sum(isinstance(part, Line) for pane in panes for part in pane.parts)


def html(panes: Sequence[Pane], live: bool = False, below: Sequence[str] = ()) -> str:
    """The panes under tabs. live: while the run goes on; below: what is said of it."""
    rich = any(pane.has_large() for pane in panes)
    about = " data-live" * live + " data-rich" * rich + " data-short" * (lines_of(panes) <= MANY)
    count = len(panes)
    body = "".join(_pane(pane, is_open=i == 0, short=count > SHORT) for i, pane in enumerate(panes))
    if count > 1:
        body += _differs(panes, live)
    about += f' data-below="{escape(" · ".join(below))}"' * live  # which the script shows, as long as it is true
    rules = _file("tabs.css") + (terminal_colours.rules() if f'<span class="{terminal_colours.CLASS}' in body else "")
    style, script = f"<style>{rules}</style>", f"<script>{_file('tabs.js')}</script>"
    return f'<div class="{NAME}"{about}>{style}<div class="nbddp-body">{body}</div>{script}</div>'


@cache
def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _pane(pane: Pane, *, is_open: bool, short: bool) -> str:
    count = "1 line" if pane.lines == 1 else f"{pane.lines:,} lines"
    said = " · ".join([pane.name, *([count] if pane.lines else []), *([pane.mark] if pane.mark else [])])
    tab = pane.name.partition(" ")[2] if short else pane.name
    ranks = " ".join(map(str, pane.ranks))
    about = f'data-ranks="{ranks}" data-tab="{tab}"' + " data-failed" * bool(pane.mark)
    parts = [_lines([part for part in some if isinstance(part, Line)]) if is_line else "".join(map(_rich, some))
             for is_line, some in groupby(pane.parts, lambda part: isinstance(part, Line))]  # fmt: skip
    return _fold("nbddp-rank", said, "".join(parts), about, is_open)


def _differs(panes: Sequence[Pane], live: bool) -> str:
    """live: while the run goes on, of lines that are all there; a line that other ranks have yet to print differs."""
    if live and any(pane.is_cut() for pane in panes):
        return _fold("nbddp-differs", "differences", f"<p>{LATER}</p>")
    found = model.differences(panes)
    said = "".join(f'<div class="nbddp-name">{escape(name)}</div>{_lines(rows)}' for name, rows in found)
    alike = f"<p>Every line {'so far ' * live}is the same on all ranks.</p>"
    return _fold("nbddp-differs", "differences", said or alike)


def _fold(name: str, said: str, body: str, about: str = "", is_open: bool = False) -> str:
    box = f'<div class="nbddp-lines" style="{BOX}">{body}</div>'
    summary = f'<summary style="display: list-item; cursor: pointer">{escape(said)}</summary>'
    return f'<details class="{name}" {about}{" open" * is_open}>{summary}{box}</details>'


def _rich(part: object) -> str:
    return f'<div class="nbddp-rich">{part.html}</div>' if isinstance(part, Rich) else ""


def _lines(lines: Sequence[Line]) -> str:
    """Lines in one element; of those that are no plain output each has an element of its own."""
    return f'<pre style="{PRE}">' + "\n".join(map(_line, lines)) + "</pre>"


def _line(line: Line) -> str:
    tag, said = TAGS.get(line.kind, ""), terminal_colours.html(line.text)
    if line.file is not None:
        said += f'<a href="{escape(line.file.as_uri())}">{escape(str(line.file))}</a>'
    return f"<{tag}>{said}</{tag}>" if tag else said
