"""The curve of a training loop as a drawing: live in the panel, and with the chosen step in a saved notebook. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from itertools import pairwise

from nbddp.capabilities.panel.curves import Curve, cut, top, words
from nbddp.capabilities.panel.state import State
from nbddp.figures.document.page import Document, in_theme, inline, legend_key, page
from nbddp.figures.document.sheet import Mark, Plot, Sheet, axis, round_steps
from nbddp.figures.document.svg import stroke

ABOVE, HEIGHT = 16, 140  # pixels: over the plot, and of it
BESIDE = 0.02  # of the width: between two marks over the plot
NAMES = ("step time of the slowest rank", "exposed communication, the longest")


@lru_cache(maxsize=8)  # most looks find the one before
def live(found: Curve) -> str:
    """The curve, with its steps as data for who points at one; empty without steps."""
    if not found.drawn:
        return ""
    steps = [(point[0], words(point)) for point in found.points]
    data = escape(json.dumps(steps, ensure_ascii=False, separators=(",", ":")))
    return f'<div class="nbddp-curve" data-steps="{data}">{inline(_drawn(found))}</div>'


def legend(more: str) -> str:
    """What the lines are. more: HTML that follows."""
    return in_theme(f"<small>{''.join(map(legend_key, _keys()))}{more}</small>")


def _keys() -> list[tuple[str, str]]:
    return [(stroke(i), name) for i, name in enumerate(NAMES)]


def kept(state: State) -> str:
    """What a saved notebook has of the run: the curve, and the step that was chosen; empty without steps."""
    if not state.curve.drawn:
        return ""
    sheet = _drawn(state.curve, state.step.number if state.step is not None else -1)
    keys, said = _keys(), words(state.curve.points[-1])
    if state.step is None:
        return page(Document([sheet], keys), "\n".join([said, *_notes(state)]))
    step = state.step.document
    has_curves = len(step.sheets) > 1  # those of ranks on several hosts have
    more, keys = ([], []) if has_curves else ([sheet], keys)
    both = Document([*step.sheets, *more], [*step.keys, *keys], step.said, step.title)
    return page(both, state.step.words, state.step.tables, state.step.captions)


def _notes(state: State) -> Sequence[str]:
    return [state.timing_note] if state.timing_note else []


def _drawn(found: Curve, chosen: int | None = None) -> Sheet:
    """The plot. chosen: the step that is marked, where each step has its words; None: none has."""
    high, (first, last) = top(found), (found.first, found.last)
    sheet = Sheet(f"Step time and exposed communication up to step {found.points[-1][0]}", zoom=chosen is not None)
    plot = Plot(sheet, ABOVE, HEIGHT, (first, last), (0.0, 1e3 * high))
    if chosen is not None:
        _columns(plot, found, chosen)
    plot.grid(round_steps(1e3 * high, 3), _named)
    times, waits = ([(point[0], 1e3 * min(high, point[i])) for point in found.points] for i in (1, 2))
    plot.area([(waits[0][0], 0.0), (waits[-1][0], 0.0)], waits, "a1")
    plot.line(waits, "l1 x1")
    plot.line(times, "l0 x0")
    before = -1.0
    for place in (plot.across(number) for number, _ in cut(found, high)):
        if place - before > BESIDE:
            sheet.text(place, ABOVE - 3, "▲", "s c")
            before = place
    plot.finish()
    axis(sheet, ABOVE + HEIGHT, first, last, "step")
    return sheet


def _named(milliseconds: float) -> str:
    return f"{milliseconds:g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:g} s"


def _columns(plot: Plot, found: Curve, chosen: int) -> None:
    """One for each step that is drawn, up to the middle between it and the next."""
    numbers = [point[0] for point in found.points]
    sides = [found.first, *((a + b) / 2 for a, b in pairwise(numbers)), found.last]
    for point, (left, right) in zip(found.points, pairwise(sides), strict=True):
        place = plot.across(left), plot.across(right), plot.top, plot.top + plot.height
        look = "hit now" if point[0] == chosen else "hit"
        plot.sheet.mark(plot.sheet.rect(*place[:2], plot.top, plot.height, look), Mark(*place, words(point)))
