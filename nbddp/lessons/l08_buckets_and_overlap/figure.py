"""Lesson 08's figures: gradients packed into buckets, and when the buckets move beside backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nbddp.analysis.quantities import duration, size
from nbddp.analysis.steps import exposed, lanes
from nbddp.figures.figure import DescribedFigure
from nbddp.figures.palette import FAINT, FILLS, FRAME, INK, MUTED, PAPER, RC, TINTS
from nbddp.lessons.framework import run_check
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l08_buckets_and_overlap import simulation
from nbddp.lessons.l08_buckets_and_overlap.simulation import BucketExchange, Packed, StepComparison, edges

WIDTH, LEFT, RIGHT = 8.6, 0.98, 0.12  # inches
STRIP, LINE, BELOW = 0.86, 0.26, 0.62  # inches: the packed gradients; a lane of time; the axis under it
BACKWARD = FILLS[2]


def exchange(some: BucketExchange) -> DescribedFigure:
    """The packed gradients over the timeline on paper."""
    return _figure([some], some.describe())


def beside(both: StepComparison) -> DescribedFigure:
    """The packed gradients over the timeline as it was recorded and the one on paper, on one scale."""
    return _figure([both.measured, both.foretold], both.describe())


def _figure(some: list[BucketExchange], words: str) -> DescribedFigure:
    rows = [lanes([(b.sent, b.done) for b in e.step.buckets]) for e in some]
    heights = [LINE * (3 + max(r, default=0)) for r in rows]
    height = 0.3 + STRIP + sum(heights) + BELOW + 0.42 * len(some)
    with rc_context(RC):
        figure = Figure(figsize=(WIDTH, height))
        _gradients(_axes(figure, 0.3, STRIP, height), some[0].packed, len(some[0].so_far))
        top, whole = 0.3 + STRIP + 0.42, max(e.step.backward[2] for e in some)
        for e, row, own in zip(some, rows, heights, strict=True):
            axes = _axes(figure, top, own, height)
            _time(axes, e, row, own, whole, last=e is some[-1])
            top += own + 0.42
    return DescribedFigure(figure, words)


def _axes(figure: Figure, top: float, own: float, height: float) -> Any:
    wide = (WIDTH - LEFT - RIGHT) / WIDTH
    axes = figure.add_axes((LEFT / WIDTH, 1 - (top + own) / height, wide, own / height))
    axes.set(ylim=(own, 0), yticks=[])
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    return axes


def _gradients(axes: Any, some: Packed, sent: int) -> None:
    """One box per gradient as wide as its bytes, under the bracket of its bucket; in colour if that has been sent."""
    whole = sum(some.bytes)
    axes.set(xlim=(0, whole), xticks=[])
    inch = whole / (WIDTH - LEFT - RIGHT)
    axes.text(0, -0.1, "gradients in the order in which they become ready", size=8.5, weight="bold", va="bottom")
    at = edges(some)
    for k, members in enumerate(some.buckets):
        left, right = at[members[0]][0], at[members[-1]][1]
        fill, edge = (TINTS[k % len(TINTS)], FILLS[k % len(FILLS)]) if k < sent else (FRAME, FAINT)
        for i in members:
            a, b = at[i]
            axes.add_patch(Rectangle((a, 0.06), b - a, 0.36, fc=fill, ec=INK, lw=0.4, clip_on=False))
            _fit(axes, (a + b) / 2, 0.25, [some.names[i], some.names[i].split(".")[0]], (b - a) / inch)
        axes.plot([left + 0.03 * inch, left + 0.03 * inch, right - 0.03 * inch, right - 0.03 * inch],
                  [0.48, 0.54, 0.54, 0.48], color=edge, lw=1.6, solid_joinstyle="miter")  # fmt: skip
        said = size(some.size(k))
        _fit(axes, (left + right) / 2, 0.69, [f"bucket {k} · {said}", f"{k} · {said}", str(k)], (right - left) / inch)


def _fit(axes: Any, x: float, y: float, texts: list[str], room: float, **look: Any) -> None:
    """The longest of `texts` that has room (inches) in the middle of (x, y); none if none has."""
    text = next((t for t in texts if 0.073 * len(t) + 0.04 <= room), "")
    if text:
        axes.text(x, y, text, size=7, ha="center", va="center", **look)


def _time(axes: Any, e: BucketExchange, row: list[int], own: float, whole: int, last: bool) -> None:
    """Backward, and below it the link; the bar under both is what the step waits for."""
    start, end = e.backward
    inch = whole / (WIDTH - LEFT - RIGHT)
    axes.set_xlim(0, whole / 1e6)
    axes.text(0, -0.1, e.what, size=8.5, weight="bold", va="bottom")
    for line, name in enumerate(("backward", "link")):
        axes.text(-0.1 * inch / 1e6, (line + 0.5) * LINE, name, size=8, ha="right", va="center")
    axes.add_patch(Rectangle((start / 1e6, 0.03), (end - start) / 1e6, LINE - 0.06, fc=BACKWARD, ec=PAPER, lw=0.5))
    _fit(axes, (start + end) / 2e6, LINE / 2 - 0.01, [duration((end - start) / 1e9)], (end - start) / inch, color=PAPER)
    for bucket, lane in zip(e.so_far, row, strict=False):
        k, y = bucket.index, LINE * (1 + lane)
        axes.plot([bucket.ready / 1e6] * 2, [LINE - 0.08, LINE + 0.03], color=INK, lw=0.9)
        axes.add_patch(Rectangle((bucket.sent / 1e6, y + 0.03), (bucket.done - bucket.sent) / 1e6, LINE - 0.06,
                                 fc=TINTS[k % len(TINTS)], ec=INK, lw=0.5, clip_on=False))  # fmt: skip
        middle, room = (bucket.sent + bucket.done) / 2e6, (bucket.done - bucket.sent) / inch
        _fit(axes, middle, y + LINE / 2, [f"bucket {k}", str(k)], room)
    foot = LINE * (2 + max(row, default=0))
    if e.is_whole:
        _exposed(axes, e, foot, end, whole)
    else:
        axes.plot([e.now / 1e6] * 2, [0, foot + 0.05], color=INK, lw=1.2, clip_on=False)
    if last:
        axes.spines["bottom"].set_visible(True)
        axes.set_xlabel("milliseconds since backward began", size=8)
        axes.tick_params(labelsize=7.5)
    else:
        axes.set_xticks([])


def _exposed(axes: Any, e: BucketExchange, y: float, end: int, whole: int) -> None:
    """The line under what was not hidden, with its length."""
    waits = exposed(e.step)
    said = f"exposed {duration(waits / 1e9)}" if waits else "nothing is exposed"
    if waits:
        axes.plot([end / 1e6, (end + waits) / 1e6], [y + 0.05] * 2, color=INK, lw=2, solid_capstyle="butt",
                  clip_on=False)  # fmt: skip
    axes.plot([end / 1e6] * 2, [0, y + 0.05], color=MUTED, lw=0.8, ls=(0, (3, 2)))
    at_right = end > 0.6 * whole
    x = (end + waits) / 1e6 if at_right else end / 1e6
    axes.text(x, y + 0.09, said, size=7, va="top", ha="right" if at_right else "left", color=MUTED)


# -- the explorer ----------------------------------------------------------------------------------

MOST = 24  # buckets: a layer each

buckets = Explorer(
    "Lesson 08: which gradients share a bucket, and how much of the exchange backward hides, on paper.",
    simulation.exchange,
    exchange,
    Slider("layers", "layers", 1, 24, at=(1, 8)),
    Choice("width", "width of a layer", (512, 1024, 2048), at=(512, 1024)),
    Choice("cap_mb", "bucket_cap_mb", (simulation.DEFAULT, 1, 2, 4, 8, 16, 25, 100), at=(4, 4)),
    Slider("backward", "backward, ms", 5, 100, 5, at=(20, 20)),
    Choice("ranks", "ranks", (2, 8, 64, 512), at=(2, 8)),
    Choice("link", "link", tuple(simulation.LINKS), at=("100 Gb/s InfiniBand", "100 Gb/s InfiniBand")),
    Steps(
        "sent", "buckets exchanged", 0, MOST, to_all=True, at=(MOST, MOST), moves=lambda some: len(some.step.buckets)
    ),
    begins={"layers": 8, "width": 1024, "cap_mb": 8, "ranks": 8},
)


def measured_buckets(model: Sequence[tuple[str, int]], cap_mb: float | str = simulation.DEFAULT) -> DescribedFigure:
    """Lesson 08: the median step of the last recording, beside the packer's. model: name and bytes of each
    parameter, as `named_parameters()` has them. Raises BadInput where no exchange is recorded."""
    recording = run_check.pool().timings()
    return beside(simulation.beside(recording, model, cap_mb))
