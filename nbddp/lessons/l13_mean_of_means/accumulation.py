"""Lesson 13: gradients accumulated over micro-batches of one size, and exchanged once.

Run on real ranks, each with samples of its own, and compared with what one process gives on all of them; how often
gradients were exchanged is what the recorder of DDP's steps has seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbddp.lessons.framework.answer import OK, Exercise, mismatch
from nbddp.lessons.framework.on_rank import seeded
from nbddp.lessons.framework.run_check import Reference, grouped, on_ranks
from nbddp.lessons.l13_mean_of_means.gradients import Gradients, combination, common_multiple, minus, near
from nbddp.lessons.l13_mean_of_means.on_rank import Accumulated, RightAccumulation, accumulated, expected
from nbddp.lessons.l13_mean_of_means.passes import Passes, micro
from nbddp.output.screens import NullScreen

COUNTS = (5, 3, 1)  # micro-batches; no usual world size, so that dividing by that is seen
EXPECTED = Reference(expected, COUNTS)


@dataclass(frozen=True)
class RankAccumulation:
    """What one rank did with some micro-batches, and what is right."""

    rank: int
    did: Accumulated
    right: RightAccumulation

    @property
    def passes(self) -> Passes:
        did = self.did
        return Passes(self.right["count"], did["called"], did["entered"], did["exchanged"], did["kept"])

    @property
    def untouched(self) -> bool:
        """Whether nothing came of the function."""
        return not self.did["exchanged"] and not any(self.did["gradients"].values())


def diagnose(runs: Sequence[Sequence[Accumulated]], right: Mapping[int, Sequence[RightAccumulation]]) -> str:
    """The line for what every rank did, a run for each number of micro-batches. right: by rank."""
    cases = [[RankAccumulation(r, run[r], right[r][i]) for r in sorted(right)] for i, run in enumerate(runs)]
    if all(t.untouched for case in cases for t in case):
        return "accumulate left no gradients: you have not written it yet, or it calls no backward()"
    for case in cases:
        for taken in case:
            line = _line(taken)
            if line != OK:
                return line
    return OK


def _line(taken: RankAccumulation) -> str:
    if taken.did["moved"]:
        return f"rank {taken.rank}: a parameter changed; accumulate leaves gradients, and its caller takes the step"
    if taken.did["turned"]:
        return f"rank {taken.rank}: loss_of takes the outputs, then the targets, as in loss_of(model(inputs), targets)"
    gradients: dict[str, Sequence[float]] = {}
    for name, values in taken.did["gradients"].items():
        if values is None:
            return f"rank {taken.rank}: {name} has no gradient after {micro(taken.right['count'])}"
        gradients[name] = values
    same = common_multiple(gradients, taken.right["reference"])
    if same is not None and near(same, 1):
        return taken.passes.line()
    early = taken.passes.not_exchanged()
    return f"rank {taken.rank}, {early}" if early else _wrong(taken, gradients, same)


def _wrong(taken: RankAccumulation, gradients: Gradients, ratio: float | None) -> str:
    n, world, reference = taken.right["count"], taken.right["world"], taken.right["reference"]
    first = next(iter(reference))
    who = f"rank {taken.rank}, {first}, {micro(n)}"
    if ratio is not None:
        return f"{who}: yours is {ratio:.2f} × the reference" + _why(ratio, n, world)
    if n > 1 and common_multiple(gradients, taken.right["last"]) is not None:
        return (
            f"{who}: yours is of the last micro-batch alone; gradients add up only if they are not set to zero "
            "between the micro-batches"
        )
    uneven = shares(gradients, taken.right)
    if uneven:
        early, late = uneven
        got = f"{late:.2f} for the last and {early:.2f} for each before it"
        return f"{who}: {mismatch(f'a weight of 1/{n} for each micro-batch', got)}"
    apart = minus(gradients, reference)
    name = max(apart, key=lambda n: max(map(abs, apart[n])))
    off = max(map(abs, apart[name]))
    return f"rank {taken.rank}, {name}, {micro(n)}: yours differs from the reference by up to {off:.2g}"


def shares(gradients: Gradients, right: RightAccumulation) -> list[float] | None:
    """How much each micro-batch but the last counts, and the last, if that explains the gradients; else None."""
    if right["count"] < 2:
        return None
    return combination([minus(right["reference"], right["last"], right["count"]), right["last"]], gradients)


def _why(ratio: float, count: int, world: int) -> str:
    if near(ratio, 0):
        return ": they were set to zero after the last backward()"
    if near(ratio, count):
        return f": you added up {micro(count)} but did not divide by their number"
    if near(ratio, count * world):
        return ": DDP's average over the ranks was undone, and the sum not divided by the number of micro-batches"
    if near(ratio, count / world):
        return ": you divided by the world size, which DDP does itself; divide by the number of micro-batches"
    if near(ratio, 1 / world):
        return ": you divided by the world size too, which DDP has done already"
    if near(ratio, 1 / count):
        return ": you divided by the number of micro-batches twice"
    if near(ratio, world):
        return ": you added up over the ranks what DDP had averaged over them already"
    return f"; each micro-batch's loss counts 1/{count} of the whole"


def _judge_accumulation(function: Any) -> str:
    """A run for each number of micro-batches, so that a rank that leaves early is seen to have finished; the first one
    shows what is printed."""
    with grouped():
        right = EXPECTED.by_rank()
        runs: list[Sequence[Accumulated]] = [on_ranks(seeded, accumulated, function, COUNTS[0])]
        runs += [on_ranks(seeded, accumulated, function, count, screen=NullScreen()) for count in COUNTS[1:]]
    return diagnose(runs, right)


accumulate = Exercise(
    "accumulate",
    _judge_accumulation,
    verifies="5, 3 and 1 micro-batches equal one process with all samples, for one exchange",
)
