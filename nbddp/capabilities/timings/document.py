"""A step as a live drawing: per rank what it computed, where it lost time, and over it what it communicated. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from nbddp.analysis.quantities import duration, size
from nbddp.analysis.steps import Place, Recording, Span
from nbddp.analysis.wait_time import CurvePoint
from nbddp.capabilities.timings.analysis import RankView, StepView, analysed
from nbddp.capabilities.timings.text import folded, heading, of_bucket, of_rank, of_step, sentences, table, when
from nbddp.figures.document.page import Document, Scene, pack_scenes
from nbddp.figures.document.sheet import Mark, Plot, Sheet, axis, head, look, round_steps
from nbddp.figures.document.svg import stroke, swatch

HEAD, LANE, GAP, BETWEEN = 17, 20, 2, 9  # pixels: of a rank's line, of a lane, between lanes, between ranks
CURVES, CURVES_FROM = 96, 4  # pixels of the curves; steps from which on there are some
MOST_COLUMNS = 200  # of the curves that say what they are
MOST_BARS = 2000  # of all steps that a click draws: some 200 kB of a notebook
MARK = 4  # pixels across, of the mark of a step that can be drawn
LEAST = 0.001  # of the step: a shorter gap between phases is no lost time to be seen
AFTER_FORWARD, EXPOSED = "between forward and backward", "exposed communication"
BEFORE_OPTIMIZER = "before the optimizer"
SHORT = {AFTER_FORWARD: "loss", EXPOSED: "exposed", BEFORE_OPTIMIZER: "other", "step done": "done"}
KEYS = (
    ("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer"), ("waits", "bucket waits"),
    ("moves", "bucket moves"), ("lost", "the rank computes nothing"),
)  # fmt: skip


def step_document(view: StepView, scenes: str = "") -> Document:
    """The drawing of a step, and of the curves of all steps. scenes: `other_steps`."""
    keys = [(swatch(kind), name) for kind, name in KEYS]
    sheets = [timeline(view)]
    if len(view.curves) < CURVES_FROM:
        return Document(sheets, keys, told(view))
    kept = chosen(view) if scenes else []
    sheets.append(curves(view, kept))
    keys += [(stroke(i), name) for i, name in enumerate(("step", "exposed communication", "spread between ranks"))]
    return Document(sheets, keys, told(view), scenes=scenes, offered=_offered(len(kept), len(view.curves)))


def told(view: StepView) -> list[str]:
    """Of its text what the drawing does not show."""
    return [line for line in sentences(view) if line != folded(view)]


# -- the steps that a click on the curves draws --------------------------------------------------------


def other_steps(recording: Recording, view: StepView) -> str:
    """`pack_scenes` of the steps that are kept; empty where there are no curves."""
    if len(view.curves) < CURVES_FROM:
        return ""
    views = {n: view if n == view.number else analysed(recording, n, view) for n in chosen(view)}
    return pack_scenes({n: Scene(timeline(v), words(v), [table(v)], told(v)) for n, v in views.items()})


def words(view: StepView) -> str:
    return "\n".join([heading(view), *sentences(view)])


def chosen(view: StepView) -> list[int]:
    """Numbers of steps: all, or as many as MOST_BARS allows: this one, the median one, the slowest, and others at
    equal distances. Each has a column of its own."""
    bars = sum(6 + len(mine.buckets) for mine in view.ranks)
    most, some = max(3, MOST_BARS // bars), [shown for _, shown in columns_of(view)]
    if len(some) <= most:
        return [c.number for c in some]
    slowest = sorted(some, key=lambda c: -c.duration)[: most // 3]
    found = {view.number, median(view.curves), *(c.number for c in slowest)}
    apart = most - len(found)
    found |= {some[i * (len(some) - 1) // max(1, apart - 1)].number for i in range(apart)}
    return sorted(found)


def median(some: Sequence[CurvePoint]) -> int:
    """The number of a step whose duration is the median one."""
    return sorted(some, key=lambda c: (c.duration, c.number))[(len(some) - 1) // 2].number


def columns_of(view: StepView) -> list[tuple[Sequence[CurvePoint], CurvePoint]]:
    """The columns of the curves: steps, and the one that stands for them. That is this step, the slowest of all, the
    median one, or the slowest of the column."""
    some = view.curves
    special = view.number, max(some, key=lambda c: c.duration).number, median(some)
    each = -(-len(some) // MOST_COLUMNS)
    groups = [some[i : i + each] for i in range(0, len(some), each)]
    return [(group, max(group, key=lambda c: (*(c.number == n for n in special), c.duration))) for group in groups]


def _offered(kept: int, of: int) -> str:
    if kept == of:
        return "Click a step, or press Enter on it, to draw it above."
    return (
        f"Click a step with a mark below it, or press Enter on it, to draw it above: {kept} of {of:,} steps are kept "
        "here, the median one, the slowest, and others at equal distances."
    )


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
        sheet.bar(Mark(*place, said, row, _lines(mine, name)), kind, labels, kind == "lost")


def _lines(mine: RankView, phase: str) -> Sequence[Place]:
    found = mine.step.line_of(phase)
    return [found] if found else []


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
        mark = Mark(sent, done, at, at + LANE, words, row, _lines(mine, "backward"))
        sheet.two(mark, start, ("waits", "moves"), labels)


def _share(at: int, view: StepView) -> float:
    return (at - view.begin) / max(1, view.end - view.begin)


# -- the curves of all steps ---------------------------------------------------------------------------


def curves(view: StepView, kept: Collection[int]) -> Sheet:
    """Step time, exposed communication and spread; a column for each step says what it was. kept: steps that it may
    draw."""
    some, number = view.curves, view.number
    sheet = Sheet(f"Step time of {len(some)} steps, in milliseconds; step {number} is shown", zoom=True)
    first, last = some[0].number - 0.5, some[-1].number + 0.5
    most = max(c.duration for c in some) / 1e6
    plot = Plot(sheet, 16, CURVES, (first, last), (0.0, 1.08 * most or 1.0))
    columns(plot, view, kept)
    plot.grid(round_steps(most, 3), lambda value: f"{value:g} ms")
    for i, of in enumerate(("duration", "exposed", "spread")):
        plot.line([(c.number, getattr(c, of) / 1e6) for c in some], look(i))
    plot.finish()
    axis(sheet, 16 + CURVES, first, last, "step")
    return sheet


def columns(plot: Plot, view: StepView, kept: Collection[int]) -> None:
    """One for each step, or for one of several where there are many. Those that may be drawn have a mark where others
    may not."""
    sheet, bottom = plot.sheet, plot.top + plot.height
    for group, shown in columns_of(view):
        left, right = plot.across(group[0].number - 0.5), plot.across(group[-1].number + 0.5)
        here = shown.number == view.number
        shapes = sheet.rect(left, right, plot.top, plot.height, "hit now" if here else "hit")
        scene = shown.number if shown.number in kept else None
        if scene is not None and len(kept) < len(view.curves):
            shapes += sheet.tick((left + right) / 2, bottom - 5, 5, MARK)
        sheet.mark(shapes, Mark(left, right, plot.top, bottom, of_step(shown), 0, scene=scene))
