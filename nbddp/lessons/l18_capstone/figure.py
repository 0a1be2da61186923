"""Lesson 18's figure: the loss of the training and of one process, the learning rate, and the rubric's lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from nbddp.figures.axes import sheet
from nbddp.figures.figure import described
from nbddp.figures.palette import FAINT, FILLS, FRAME, INK, MUTED, PAPER
from nbddp.lessons.framework.explorer import Choice, Explorer, Slider, Steps
from nbddp.lessons.l18_capstone.simulation import (
    EVERY,
    MISTAKES,
    NO_OPTIMIZER,
    NONE,
    PEAK,
    RANKS,
    STEPS,
    CapstoneTraining,
    RubricLine,
    TrainedStep,
    simulate_training,
)

LEFT, PLOT, GAP, TABLE = 0.42, 3.5, 0.3, 2.4  # inches: the scale, the curves, between, the rubric
HEAD, LOSSES, BETWEEN, RATES, FOOT = 0.66, 1.55, 0.26, 0.5, 0.56
WIDTH = LEFT + PLOT + GAP + TABLE
TOP = 3.0  # the loss at the upper edge: above all that is drawn
ONE, OF_RANKS, SAID, LOST = FAINT, FILLS[0], FILLS[1], FILLS[3]
PROGRAM = {"color": OF_RANKS, "lw": 1.2, "marker": ".", "ms": 3}
GONE = {"color": LOST, "lw": 1.2, "ls": (0, (1, 1)), "marker": "o", "ms": 4, "mfc": PAPER}  # by more than the colour
SIGNS = {True: "✓", False: "✕", None: "–"}
INKS = {True: FILLS[2], False: FILLS[1], None: MUTED}


@described
def draw_training(chosen: CapstoneTraining) -> Figure:
    """Curves at the left, the rubric at the right; the words are those of the data."""
    height = HEAD + LOSSES + BETWEEN + RATES + FOOT
    figure, axes = sheet(WIDTH, height)
    axes.text(0, 0.12, chosen.head(), size=9.5, weight="bold", va="center", color=INK)
    axes.text(0, 0.33, chosen.story(), size=8, va="center", color=MUTED)
    _frames(axes, chosen)
    _losses(axes, chosen)
    _rates(axes, chosen)
    _rubric(axes, chosen.lines())
    _key(axes, height)
    return figure


def _across(number: float) -> float:
    """Where a step is, counted from 1."""
    return LEFT + PLOT * (number - 1) / (STEPS - 1)


def _down(loss: float) -> float:
    return HEAD + LOSSES * (1 - loss / TOP)


def _below(rate: float) -> float:
    return HEAD + LOSSES + BETWEEN + RATES * (1 - rate / PEAK)


def _frames(axes: Any, chosen: CapstoneTraining) -> None:
    """The scales, the steps with a checkpoint, and the failure."""
    bottom, end = HEAD + LOSSES + BETWEEN + RATES, _across(STEPS)
    for loss in range(int(TOP) + 1):
        axes.plot([LEFT, end], [_down(loss)] * 2, color=FRAME if loss else FAINT, lw=0.8, zorder=0)
        axes.text(LEFT - 0.06, _down(loss), str(loss), size=7.5, ha="right", va="center", color=MUTED)
    for rate in (0.0, PEAK):
        axes.plot([LEFT, end], [_below(rate)] * 2, color=FRAME if rate else FAINT, lw=0.8, zorder=0)
        axes.text(LEFT - 0.06, _below(rate), f"{rate:g}", size=7.5, ha="right", va="center", color=MUTED)
    axes.text(LEFT + 0.04, HEAD - 0.02, "loss of the whole batch", size=7.5, va="bottom", color=MUTED)
    axes.text(LEFT + 0.04, HEAD + LOSSES + BETWEEN - 0.03, "learning rate", size=7.5, va="bottom", color=MUTED)
    for number in range(EVERY, STEPS + 1, EVERY):
        done = any(s.number + 1 == number for s in chosen.steps)
        axes.plot([_across(number)] * 2, [bottom, bottom + 0.05], color=INK if done else FAINT, lw=1.2)
        axes.text(_across(number), bottom + 0.12, str(number), size=7.5, ha="center", va="center", color=MUTED)
    axes.text(LEFT, bottom + 0.12, "step", size=7.5, ha="center", va="center", color=MUTED)
    if chosen.resumed is not None:
        axes.plot([_across(chosen.fails - 0.5)] * 2, [HEAD, bottom], color=LOST, lw=1, ls=(0, (3, 2)))


def _runs(chosen: CapstoneTraining) -> list[Sequence[TrainedStep]]:
    """The steps before and after the restart."""
    return [[s for s in chosen.steps if s.again == again] for again in (False, True)]


def _losses(axes: Any, chosen: CapstoneTraining) -> None:
    reached = max((s.number for s in chosen.steps), default=-1) + 1
    one = chosen.right[:reached]
    axes.plot([_across(s.number + 1) for s in one], [_down(s.loss) for s in one], color=ONE, lw=4, zorder=1)
    before, after = _runs(chosen)
    lost = [s for s in chosen.steps if not s.again and s.number + 1 in chosen.lost]
    for some, look in ((before, PROGRAM), (after, PROGRAM), (lost, GONE)):
        x, y = [_across(s.number + 1) for s in some], [_down(s.loss) for s in some]
        axes.plot(x, y, zorder=2, **look)
    said = chosen.printed()
    x, y = [_across(s.number + 1) for s in said], [_down(s.said) for s in said]
    axes.plot(x, y, ls="", marker="D", ms=4.5, color=SAID, mec=PAPER, mew=0.6, zorder=3)


def _rates(axes: Any, chosen: CapstoneTraining) -> None:
    for some in _runs(chosen):
        axes.plot([_across(s.number + 1) for s in some], [_below(s.rate) for s in some], color=OF_RANKS, lw=1.2)


def _rubric(axes: Any, lines: Sequence[RubricLine]) -> None:
    x = LEFT + PLOT + GAP
    axes.text(x, HEAD - 0.02, "lines of the rubric that numbers decide", size=7.5, va="bottom", color=MUTED)
    row = (LOSSES + BETWEEN + RATES) / len(lines)
    for i, line in enumerate(lines):
        y = HEAD + (i + 0.5) * row
        axes.plot([x, WIDTH], [HEAD + i * row] * 2, color=FRAME, lw=0.8)
        axes.text(x + 0.09, y, SIGNS[line.met], size=9, weight="bold", ha="center", va="center", color=INKS[line.met])
        axes.text(x + 0.24, y - 0.07, line.asks, size=8, va="center", color=INK)
        axes.text(x + 0.24, y + 0.08, line.found, size=7.5, va="center", color=MUTED)


def _key(axes: Any, height: float) -> None:
    """What the curves are, under them."""
    marks: tuple[tuple[dict[str, Any], str], ...] = (
        ({"color": ONE, "lw": 4}, "one process"), (PROGRAM, "this program"), (GONE, "lost steps"),
        ({"color": SAID, "ls": "", "marker": "D", "ms": 4.5}, "what rank 0 prints"),
    )  # fmt: skip
    x, y = LEFT, height - 0.14
    for look, text in marks:
        axes.plot([x + 0.1] if look.get("ls") == "" else [x, x + 0.2], [y] if look.get("ls") == "" else [y, y], **look)
        axes.text(x + 0.27, y, text, size=7.5, va="center", color=MUTED)
        x += 0.42 + 0.073 * len(text)
    axes.text(WIDTH, y, "ticks: checkpoints", size=7.5, ha="right", va="center", color=MUTED)


# -- the explorer ----------------------------------------------------------------------------------

LONGEST = 2 * STEPS - 1  # steps taken, where all are taken again

training = Explorer(
    "Lesson 18: the effect of one mistake on a training, and which lines of the rubric find it.",
    simulate_training,
    draw_training,
    Choice("mistake", "mistake", MISTAKES, at=(NONE, NO_OPTIMIZER)),
    Slider("ranks", "ranks", 1, RANKS, at=(2, 4)),
    Slider("fails", "failure in step (0: none)", 0, STEPS, at=(0, 25)),
    Steps("time", "steps taken", 0, LONGEST, to_all=True, at=(8, LONGEST), moves=lambda found: found.total),
    begins={"time": LONGEST},
)
