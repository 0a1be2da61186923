"""A step as a live drawing: per rank what it computed, where it lost time, and over it what it communicated. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nbddp.analysis.quantities import duration, size
from nbddp.analysis.steps import Span
from nbddp.analysis.wait_time import CurvePoint
from nbddp.capabilities.timings.analysis import RankView, StepView
from nbddp.capabilities.timings.text import folded, of_bucket, of_rank, of_step, sentences, when
from nbddp.figures.document.page import Document
from nbddp.figures.document.plot import Plot, look, round_steps
from nbddp.figures.document.sheet import Mark, Sheet, axis, head
from nbddp.figures.document.svg import stroke, swatch

HEAD, LANE, GAP, BETWEEN = 17, 20, 2, 9  # pixels: of a rank's line, of a lane, between lanes, between ranks
CURVES, CURVES_FROM = 96, 4  # pixels of the curves; steps from which on there are some
MOST_COLUMNS = 200  # of the curves that say what they are
LEAST = 0.001  # of the step: a shorter gap between phases is no lost time to be seen
AFTER_FORWARD, EXPOSED = "between forward and backward", "exposed communication"
BEFORE_OPTIMIZER = "before the optimizer"
SHORT = {AFTER_FORWARD: "loss", EXPOSED: "exposed", BEFORE_OPTIMIZER: "other", "step done": "done"}
KEYS = (
    ("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer"), ("waits", "bucket waits"),
    ("moves", "bucket moves"), ("lost", "the rank computes nothing"),
)  # fmt: skip


def step_document(view: StepView) -> Document:
    """The drawing of a step, and of the curves of all steps."""
    keys = [(swatch(kind), name) for kind, name in KEYS]
    sheets = [timeline(view)]
    if len(view.curves) >= CURVES_FROM:
        sheets.append(curves(view.curves, view.number))
        keys += [(stroke(i), name) for i, name in enumerate(("step", "exposed communication", "spread between ranks"))]
    return Document(sheets, keys)


def timeline(view: StepView) -> Sheet:
    """The ranks from top to bottom, on one clock."""
    sheet = Sheet(f"Timeline of step {view.number}: {sentences(view)[0]}", zoom=True)
    top = 4.0
    for i, mine in enumerate(view.ranks):
        _head(sheet, mine, len(view.transfers), top, 100 * i)
        _computing(sheet, mine, view, top + HEAD, 100 * i + 1)
        _buckets(sheet, mine, view, top + HEAD, 100 * i + 2)
        top += HEAD + mine.depth * (LANE + GAP) + BETWEEN
    note = folded(view)
    axis(
        sheet, top, 0.0, (view.end - view.begin) / 1e6, "ms since the first rank began" + (f"; {note}" if note else "")
    )
    return sheet


def _head(sheet: Sheet, mine: RankView, buckets: int, top: float, row: int) -> None:
    """A line with the rank's name and what it lost; it has the text of all its bars together."""
    share = "no exchange" if mine.hidden_share is None else f"{100 * mine.hidden_share:.0f} % hidden"
    lost = f" · exposed {duration(mine.exposed / 1e9)}" if mine.exposed else ""
    head(sheet, f"rank {mine.rank}", f"{share}{lost}", top, of_rank(mine, buckets), row)


def _computing(sheet: Sheet, mine: RankView, view: StepView, top: float, row: int) -> None:
    """The phases, and what is lost between them."""
    bars = [(start, end, name, name) for name, (start, end) in mine.phases]
    bars += [(start, end, "lost", why) for why, (start, end) in lost(mine, view)]
    for start, end, kind, name in sorted(bars):
        said = f"rank {mine.rank} · {name}\n{when(start - view.begin, end - view.begin)}"
        place = _share(start, view), _share(end, view), top, top + LANE
        long, short = duration((end - start) / 1e9), SHORT.get(name, name)
        labels = tuple(dict.fromkeys((f"{name} {long}", f"{short} {long}", short)))
        sheet.bar(Mark(*place, said, row), kind, labels, kind == "lost")


def lost(mine: RankView, view: StepView) -> Iterator[tuple[str, Span]]:
    """Why and when the rank computes nothing that is known. The step begins on the first rank and ends on the last."""
    step = mine.step
    _, computed, exchanged = step.backward
    after = step.optimizer[0] if step.optimizer else exchanged
    parts = [
        ("not begun", (view.begin, step.start)),
        (AFTER_FORWARD, (step.forward[1], step.backward[0])),
        (EXPOSED, (computed, exchanged)),
        (BEFORE_OPTIMIZER, (exchanged, after)),
        ("step done", (step.end, view.end)),
    ]
    for why, (start, end) in parts:
        if end - start > LEAST * (view.end - view.begin):
            yield why, (start, end)


def _buckets(sheet: Sheet, mine: RankView, view: StepView, top: float, row: int) -> None:
    """A bar of two parts for each: it waits, it moves."""
    for of in mine.buckets:
        at = top + (1 + of.lane) * (LANE + GAP)
        sent, start, done = (_share(t, view) for t in (of.bucket.sent, of.start, of.bucket.done))
        words = of_bucket(mine.rank, of) + "\n" + when(of.bucket.sent - view.begin, of.bucket.done - view.begin)
        labels = (f"{of.bucket.index} · {size(of.bucket.bytes)}", str(of.bucket.index))
        sheet.two(Mark(sent, done, at, at + LANE, words, row), start, ("waits", "moves"), labels)


def _share(at: int, view: StepView) -> float:
    return (at - view.begin) / max(1, view.end - view.begin)


# -- the curves of all steps ---------------------------------------------------------------------------


def curves(some: Sequence[CurvePoint], number: int) -> Sheet:
    """Step time, exposed communication and spread; a column for each step says what it was."""
    sheet = Sheet(f"Step time of {len(some)} steps, in milliseconds; step {number} is shown", beside=0)
    first, last = some[0].number - 0.5, some[-1].number + 0.5
    most = max(c.duration for c in some) / 1e6
    plot = Plot(sheet, 16, CURVES, (first, last), (0.0, 1.08 * most or 1.0))
    columns(sheet, plot, some, number)
    plot.grid(round_steps(most, 3), lambda value: f"{value:g} ms")
    for i, of in enumerate(("duration", "exposed", "spread")):
        plot.line([(c.number, getattr(c, of) / 1e6) for c in some], look(i))
    plot.finish()
    axis(sheet, 16 + CURVES, first, last, "step")
    return sheet


def columns(sheet: Sheet, plot: Plot, some: Sequence[CurvePoint], number: int) -> None:
    """One for each step, or for the longest of several where there are many."""
    each = -(-len(some) // MOST_COLUMNS)
    for group in (some[i : i + each] for i in range(0, len(some), each)):
        longest = max(group, key=lambda c: c.duration)
        left, right = plot.across(group[0].number - 0.5), plot.across(group[-1].number + 0.5)
        here = any(c.number == number for c in group)
        sheet.mark(
            sheet.rect(left, right, plot.top, plot.height, "now" if here else "hit"),
            Mark(left, right, plot.top, plot.top + plot.height, of_step(longest), 0),
        )
