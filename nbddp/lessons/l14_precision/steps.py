"""Lesson 14: a step that all ranks take, or none.

Every rank has shards of its own, so nothing but a collective can tell it that another one found an inf. A run of steps
with one optimizer: what a wrong step leaves in the parameters or in the momentum shows in the steps after it. What is
right is worked out here, as SGD with momentum does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose, isfinite
from typing import Any

from nbddp.launch.topology import rank_words
from nbddp.lessons.framework.answer import OK, Exercise, not_written
from nbddp.lessons.framework.run_check import in_group
from nbddp.lessons.l14_precision.on_rank import Stepped, stepped
from nbddp.lessons.l14_precision.plan import MOMENTUM, RATE, STEPS, finders, gradients_of, parameters_of


@dataclass(frozen=True)
class RankStep:
    """What one rank did in one step: its parameters before and after, flat, and what came back."""

    rank: int
    before: Sequence[float]
    after: Sequence[float]
    returned: Any

    @property
    def moved(self) -> bool:
        return list(self.before) != list(self.after)


def judge(found: Mapping[int, Sequence[Stepped]]) -> str:
    """The line for what all ranks did in all steps, by rank."""
    world = len(found)
    rows = [[RankStep(rank, **steps[i]) for rank, steps in sorted(found.items())] for i in range(len(STEPS))]
    if all(t.returned is None and not t.moved for row in rows for t in row):
        return not_written("step_together")
    speeds = {rank: [0.0 for part in parameters_of(rank) for _ in part] for rank in found}
    for number, (row, (scale, whose, _, _)) in enumerate(zip(rows, STEPS, strict=True)):
        who = finders(whose, world)
        line = _skipped(row, who, scale) if who else _stepped(row, speeds, number, scale)
        if line:
            return f"step {number + 1}, scale {scale:g}: {line}"
    return OK


def _skipped(row: Sequence[RankStep], who: Sequence[int], scale: float) -> str:
    """What is wrong with a step that no rank should have taken; empty if nothing is."""
    took = [t.rank for t in row if t.moved]
    found = f"{rank_words(who)} found inf or nan"
    if not took:
        return _returned(row, scale / 2, f"{found}, so all ranks halve the scale to {scale / 2:g}")
    if not set(took) & set(who):
        left = [t.rank for t in row if not t.moved]
        return (
            f"{found}, {rank_words(left)} skipped the step and {rank_words(took)} took it: the shards are now out of "
            "step; combine the ranks' findings (all_reduce) before you decide"
        )
    if any(not isfinite(x) for t in row for x in t.after):
        return f"{found}, and the step was taken: parameters are now inf or nan"
    return f"{found}, and {rank_words(took)} took the step anyway"


def _stepped(row: Sequence[RankStep], speeds: dict[int, list[float]], number: int, scale: float) -> str:
    """What is wrong with a step that all should have taken; `speeds`, the momentum, goes on as it should."""
    left = [t.rank for t in row if not t.moved]
    if left:
        return f"no rank found inf or nan, and {rank_words(left)} did not take the step"
    for t in row:
        own = [g for part in gradients_of(t.rank, number) for g in part]
        speeds[t.rank] = [MOMENTUM * v + g for v, g in zip(speeds[t.rank], own, strict=True)]
        right = [-RATE * v for v in speeds[t.rank]]
        yours = [b - a for a, b in zip(t.before, t.after, strict=True)]
        line = _update(yours, right, scale)
        if line:
            return f"rank {t.rank}: {line}"
    return _returned(row, scale, f"no rank found inf or nan, so the scale stays {scale:g}")


def _update(yours: Sequence[float], right: Sequence[float], scale: float) -> str:
    factors = [y / r for y, r in zip(yours, right, strict=True)]
    factor = factors[0]
    if not all(isclose(f, factor, rel_tol=1e-3) for f in factors):
        return "the parameters moved, but not by this rank's own unscaled gradients"
    if isclose(factor, 1, rel_tol=1e-3):
        return ""
    known = {
        scale: "the gradients were not unscaled: divide them by scale",
        scale * scale: "the gradients were multiplied by scale; backward has done that, so divide",
        1 / scale: "the gradients were divided by scale twice",
        2.0: "the step was taken twice, or the gradients were divided by half the scale",
    }
    why = next((words for value, words in known.items() if isclose(factor, value, rel_tol=1e-3)), "")
    return f"the parameters moved by {factor:.3g} × the right step" + (f": {why}" if why else "")


def _returned(row: Sequence[RankStep], right: float, why: str) -> str:
    given = [t.returned for t in row]
    if any(type(g) not in (int, float) for g in given):
        which = next(t.rank for t in row if type(t.returned) not in (int, float))
        return f"{why}; rank {which} returned {row[which].returned!r} and not the scale for the next step"
    wrong = [t for t in row if not isclose(t.returned, right)]
    if not wrong:
        return ""
    fine = next((t for t in row if isclose(t.returned, right)), None)
    line = f"{why}; rank {wrong[0].rank} returned {wrong[0].returned:g}"
    if fine is None:
        return line
    return f"{line}, and rank {fine.rank} {fine.returned:g}: from here on ranks scale their losses differently"


def _judge(function: Any) -> str:
    return judge(in_group(stepped, function))


step_together = Exercise(
    "step_together",
    _judge,
    verifies="7 steps equal SGD on finite gradients; inf or nan on any rank, and all skip",
)
