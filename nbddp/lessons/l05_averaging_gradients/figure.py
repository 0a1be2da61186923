"""Lesson 05's figure: the points and the line of each rank, the loss of the lines on all points, and their distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from nbddp.figures.figure import described
from nbddp.figures.palette import FAINT, FILLS, INK, MUTED
from nbddp.launch.topology import counted, rank_words
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider
from nbddp.lessons.l05_averaging_gradients.simulation import (
    MEAN,
    NOTHING,
    OWN,
    SAME,
    SUM,
    Fit,
    shards,
    simulate_averaging,
)

STYLES = ("-", (0, (6, 2)), (0, (4, 1.5, 1, 1.5)), (0, (2, 1.5)))
MARKERS = ("o", "s", "^", "D")  # one per rank; the colour says it too
CLOSE = 0.075  # of an axis: labels are at least so far apart
ROOM = 0.06  # of the height of points and lines, above and below them


@described
def draw_averaging(fit: Fit) -> Figure:
    """The lines among the points, and two panels over the steps; the words are the fit's."""
    figure = Figure(figsize=(8.2, 5.6))
    top = figure.add_axes((0.07, 0.52, 0.72, 0.37))
    left, right = figure.add_axes((0.07, 0.09, 0.36, 0.3)), figure.add_axes((0.62, 0.09, 0.36, 0.3))
    head = f"{fit.ranks} ranks · start: {fit.start} · gradients {fit.exchange}"
    figure.text(0.012, 0.975, head, size=9.5, weight="bold", va="center")
    _losses(left, fit)
    _distances(right, fit)
    _fitted(top, fit)
    return figure


def _fitted(axes: Any, fit: Fit) -> None:
    """Each rank's points, and the line that it has after the last step."""
    points = shards(fit.ranks)
    for rank, shard in enumerate(points):
        xs, ys = zip(*shard, strict=True)
        axes.plot(xs, ys, MARKERS[rank], color=FILLS[rank], markersize=5, linestyle="none")
    lines = [(fit.lines[g[0]][-1], rank_words(g), FILLS[g[0]], STYLES[g[0]]) for g in fit.groups()]
    lines.append((fit.alone[-1], "one process (dots)", INK, (0, (1, 2.5))))
    ends = []
    for (w, b), words, colour, style in lines:
        axes.plot((-1, 1), (b - w, b + w), color=colour, linestyle=style, linewidth=2, solid_capstyle="butt")
        ends.append((b + w, words, colour))
    seen = [y for shard in points for _, y in shard] + [b + w * x for (w, b), *_ in lines for x in (-1, 1)]
    low, high = min(seen), max(seen)
    axes.set_ylim(low - ROOM * (high - low), high + ROOM * (high - low))
    _framed(axes, f"each rank's points, and its line y = wx + b after {counted(fit.steps, 'step')}", "x")
    axes.set_xlim(-1.03, 1.03)
    _label(axes, 1, ends)


def _losses(axes: Any, fit: Fit) -> None:
    steps, ends = range(fit.steps + 1), []
    for group in fit.groups():
        values, rank = fit.losses(fit.lines[group[0]]), group[0]
        wide = 2.6 if len(group) > 1 else 1.7
        axes.plot(steps, values, color=FILLS[rank], linestyle=STYLES[rank], linewidth=wide)
        ends.append((values[-1], rank_words(group), FILLS[rank]))
    alone = fit.losses(fit.alone)
    axes.plot(
        steps,
        alone,
        color=INK,
        linewidth=0,
        marker="o",
        markersize=3.2,
        clip_on=False,
        markevery=max(1, fit.steps // 10),
    )
    ends.append((alone[-1], "one process (dots)", INK))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _frame(axes, fit, "loss on all the data")
    _label(axes, fit.steps, ends)


def _distances(axes: Any, fit: Fit) -> None:
    apart = fit.distances()
    axes.plot(range(fit.steps + 1), apart, color=INK, linewidth=2)
    axes.set_ylim(-0.05 * max(1.0, *apart), 1.15 * max(1.0, *apart))
    _frame(axes, fit, "distance of parameters from rank 0's")


def _frame(axes: Any, fit: Fit, title: str) -> None:
    _framed(axes, title, "step")
    axes.set_xlim(0, fit.steps)


def _framed(axes: Any, title: str, across: str) -> None:
    axes.set_title(title, size=8.5, loc="left", color=MUTED, pad=6)
    axes.set_xlabel(across, size=8, color=MUTED)
    axes.tick_params(labelsize=7.5, colors=MUTED, which="both")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)


def _label(axes: Any, last: float, ends: Sequence[tuple[float, str, str]]) -> None:
    """The lines' names to the right of their ends, moved up where they would lie on each other."""
    transform = axes.transData + axes.transAxes.inverted()
    at = -CLOSE
    for y, words, colour in sorted((transform.transform((last, value))[1], w, c) for value, w, c in ends):
        at = max(y, at + CLOSE)
        axes.text(1.03, at, words, transform=axes.transAxes, size=7.8, va="center", color=colour)


# -- the explorer ----------------------------------------------------------------------------------

averaging = Explorer(
    "Lesson 05: the ranks' lines, loss and distance, by their start and their treatment of gradients.",
    simulate_averaging,
    draw_averaging,
    Slider("ranks", "ranks", 2, 4, at=(4, 4)),
    Slider("steps", "steps", 10, 200, 10, at=(30, 200)),
    Choice("begin", "start", (SAME, OWN), at=(SAME, SAME)),
    Choice("exchange", "gradients", (NOTHING, MEAN, SUM), at=(MEAN, NOTHING)),
)
