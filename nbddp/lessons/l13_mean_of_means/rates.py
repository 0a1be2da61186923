"""Lesson 13: a learning rate that follows the effective batch by the linear rule, after a warm-up.

Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017, sections 2.1 and 2.2. The learning
rate grows as the batch. During the warm-up it grows by a constant amount a step, from the one of the small batch. All
cases come out exact in floats, in whatever order one multiplies.
"""

from __future__ import annotations

from typing import Any

from nbddp.lessons.framework.answer import Exercise
from nbddp.lessons.framework.run_check import judged_by
from nbddp.lessons.framework.tables import Case, TableExercise

SETTINGS = (  # warmup, base, base_batch, ranks, batch, micro_batches
    (4, 0.5, 8, 4, 8, 2),
    (8, 0.25, 32, 2, 16, 8),
    (0, 0.5, 16, 8, 16, 1),
    (4, 0.5, 64, 2, 8, 2),
    (4, 0.5, 8, 1, 8, 1),
)
CASES = tuple((step, *setting) for setting in SETTINGS for step in (0, 1, 2, 3, 4, 6, 8, 64))


def by(target: Any = None, start: Any = None, part: Any = None) -> Any:
    """A schedule with another `target(base, base_batch, ranks, batch, micro_batches)`, another start from (base,
    target), or another `part(step, warmup)` of the warm-up."""

    def would(step: int, warmup: int, base: float, *of: int) -> float:
        last = (target or linear)(base, *of)
        begin = start(base, last) if start else base
        done = part(step, warmup) if part else min(1.0, step / warmup) if warmup else 1.0
        return float(begin + (last - begin) * done)

    return would


def linear(base: float, base_batch: int, ranks: int, batch: int, micro_batches: int) -> float:
    return base * ranks * batch * micro_batches / base_batch


right_rate = by()


def _ramp(offset: int) -> Any:
    return lambda step, warmup: min(1.0, (step + offset) / warmup) if warmup else 1.0


def why_not_that(case: Case, answer: Any) -> str:
    """What a single wrong answer is, if that can be seen."""
    step, warmup, base, *of = case
    if type(answer) not in (int, float):
        return "a learning rate is a number"
    target = linear(base, *of)
    if step >= warmup and answer != target:
        return f"after the warm-up it is {base} × effective batch / base_batch, {target}"
    if not min(base, target) <= answer <= max(base, target):
        return f"during the warm-up it lies between {base} and {target}"
    return f"step {step} of a warm-up of {warmup} steps is {step}/{warmup} of the way from {base} to {target}"


RATES = TableExercise(
    "learning_rate",
    CASES,
    right_rate,
    {
        "that is the learning rate of the small batch; the effective batch is ranks × batch × micro_batches": (
            by(lambda base, *of: base)
        ),
        "the effective batch includes the micro-batches of a step as well": (
            by(lambda base, small, ranks, batch, micro: base * ranks * batch / small)
        ),
        "the effective batch includes all ranks: each has its own samples": (
            by(lambda base, small, ranks, batch, micro: base * micro * batch / small)
        ),
        "ranks × micro_batches is how many batches there are; how many times base_batch that is depends on batch": by(
            lambda base, small, ranks, batch, micro: base * ranks * micro
        ),
        "that divides where it should multiply: a larger batch gets a larger learning rate": (
            by(lambda base, *of: base * base / linear(base, *of))
        ),
        "that grows with the square root of the batch; use the linear rule": (
            by(lambda base, *of: base * (linear(base, *of) / base) ** 0.5)
        ),
        "there is no warm-up": by(part=lambda step, warmup: 1.0),
        "that begins at 0; this warm-up begins at base, which is known to work": by(start=lambda a, b: 0.0),
        "that is one step ahead: step 0 has base, and step `warmup` is the first one with the full rate": by(
            part=_ramp(1)
        ),
        "that keeps growing after the warm-up": by(part=lambda step, warmup: step / warmup if warmup else 1.0),
        "that stays at base until the warm-up is over; grow by the same amount at each step": (
            by(part=lambda step, warmup: float(step >= warmup))
        ),
    },
    why_not_that,
    exact=False,
)

learning_rate = Exercise(
    "learning_rate",
    judged_by(RATES),
    verifies="5 settings at 8 steps each, one without warm-up",
)
