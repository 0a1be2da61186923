"""Lesson 05's figure: the loss of every rank's parameters on all the data, and how far apart the parameters are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from nbddp.draw.palette import FAINT, FILLS, INK, MUTED, RC
from nbddp.draw.shown import Shown
from nbddp.lessons.averaging.simulation import Fit
from nbddp.plan.topology import rank_words

STYLES = ("-", (0, (6, 2)), (0, (4, 1.5, 1, 1.5)), (0, (2, 1.5)))
CLOSE = 0.075  # of an axis: labels are at least so far apart


def averaging(fit: Fit) -> Shown:
    """Two panels over the steps; the words are the fit's."""
    with rc_context(RC):
        figure = Figure(figsize=(8.2, 2.9))
        left, right = figure.add_axes((0.07, 0.17, 0.36, 0.63)), figure.add_axes((0.62, 0.17, 0.36, 0.63))
        head = f"{fit.ranks} ranks · start: {fit.start} · gradients {fit.exchange}"
        figure.text(0.012, 0.955, head, size=9.5, weight="bold", va="center")
        _losses(left, fit)
        _distances(right, fit)
    return Shown(figure, fit.words())


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
    axes.set_title(title, size=8.5, loc="left", color=MUTED, pad=6)
    axes.set_xlabel("step", size=8, color=MUTED)
    axes.set_xlim(0, fit.steps)
    axes.tick_params(labelsize=7.5, colors=MUTED, which="both")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)


def _label(axes: Any, last: float, ends: Sequence[tuple[float, str, str]]) -> None:
    """The lines' names to the right of their ends, moved up where they would lie on each other."""
    transform = axes.transData + axes.transAxes.inverted()
    at = -1.0
    for y, words, colour in sorted((transform.transform((last, value))[1], w, c) for value, w, c in ends):
        at = max(y, at + CLOSE)
        axes.text(1.03, at, words, transform=axes.transAxes, size=7.8, va="center", color=colour)
