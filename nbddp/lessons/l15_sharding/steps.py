"""Lesson 15's second exercise: a step of SGD with momentum whose state is sharded, on all ranks and on one rank fewer.

The right numbers are worked out here one by one, and so are those of each known mistake. A wrong answer is explained by
the mistake that gives exactly the learner's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from random import Random
from typing import Any

from nbddp.launch.topology import counted
from nbddp.lessons.framework.answer import OK, Exercise, mismatch
from nbddp.lessons.framework.run_check import in_both_worlds, in_world
from nbddp.lessons.l15_sharding.on_rank import GATHER, LR, SCATTER, SHAPES, Stepped, stepped
from nbddp.output.screens import Screen

COUNT = sum(map(prod, SHAPES))  # 25: neither 4 nor 3 nor 2 ranks divide it
STEPS, BETA = 3, 0.9
CLOSE = 1e-4
KINDS = {SCATTER: SCATTER, "reduce_scatter": SCATTER, GATHER: GATHER, "all_gather": GATHER}
Gradients = Sequence[Sequence[Sequence[float]]]  # by step, by rank, flat


def mean(gradients: Sequence[Sequence[float]], rank: int, i: int) -> float:
    return sum(g[i] for g in gradients) / len(gradients)


@dataclass(frozen=True)
class StepVariant:
    """A way to make the step. reduced: gradients by rank, rank, index → what the rank that owns the number takes for
    its gradient; moment: old momentum, gradient → new; used: old, new, gradient → what is subtracted, times lr;
    gathers: whether a rank sees the shards of others; keeps: whether momentum is kept."""

    words: str
    reduced: Callable[[Sequence[Sequence[float]], int, int], float] = mean
    moment: Callable[[float, float], float] = lambda m, g: BETA * m + g
    used: Callable[[float, float, float], float] = lambda old, new, g: new
    gathers: bool = True
    keeps: bool = True
    lost: bool = False  # the numbers that do not divide

    def after(self, begin: Sequence[float], gradients: Gradients, rank: int) -> list[list[float]]:
        """By step, the parameters on a rank."""
        world = len(gradients[0])
        size = -(-COUNT // world)
        values, momentum, found = list(begin), [0.0] * COUNT, []
        for by_rank in gradients:
            for i in range(COUNT):
                owner = i // size
                if (not self.gathers and owner != rank) or (self.lost and i >= COUNT // world * world):
                    continue
                gradient = self.reduced(by_rank, owner, i)
                new = self.moment(momentum[i], gradient)
                values[i] -= LR * self.used(momentum[i], new, gradient)
                momentum[i] = new if self.keeps else 0.0
            found.append(list(values))
        return found


RIGHT = StepVariant("")
WAYS = (
    StepVariant(
        "that is the step of summed gradients; divide by the world size for the mean",
        reduced=lambda g, r, i: sum(of[i] for of in g),
    ),
    StepVariant(
        "each rank updated its shard with its own gradient only; reduce-scatter sums the gradients of all ranks",
        reduced=lambda g, r, i: g[r][i],
    ),
    StepVariant(
        "each rank updated its shard with its own gradient only, divided by the world size; reduce-scatter sums the "
        "gradients of all ranks",
        reduced=lambda g, r, i: g[r][i] / len(g),
    ),
    StepVariant("the gradients were divided by the world size twice", reduced=lambda g, r, i: mean(g, r, i) / len(g)),
    StepVariant("the gradients were multiplied by the world size", reduced=lambda g, r, i: mean(g, r, i) * len(g) ** 2),
    StepVariant(
        "those are the smallest gradients of all ranks; return the mean", reduced=lambda g, r, i: min(o[i] for o in g)
    ),
    StepVariant(
        "those are the largest gradients of all ranks; return the mean", reduced=lambda g, r, i: max(o[i] for o in g)
    ),
    StepVariant(
        "each rank has updated only its own shard; all-gather the shards, so that every rank has all parameters",
        gathers=False,
    ),
    StepVariant(
        "momentum is lost between steps; update the given tensor in place, momentum.mul_(0.9).add_(gradient)",
        keeps=False,
    ),
    StepVariant("the step has the wrong sign; subtract lr × momentum", used=lambda old, new, g: -new),
    StepVariant(
        "the step used the momentum from before this gradient; update momentum first", used=lambda old, new, g: old
    ),
    StepVariant("the step used the gradient; use the updated momentum", used=lambda old, new, g: g),
    StepVariant(
        "the old momentum is not reduced; multiply it by 0.9 before you add the gradient", moment=lambda m, g: m + g
    ),
    StepVariant(
        "here the gradient has weight 0.1; momentum is 0.9 × the old one plus the whole gradient",
        moment=lambda m, g: BETA * m + (1 - BETA) * g,
    ),
    StepVariant("the learning rate is missing", used=lambda old, new, g: new / LR),
    StepVariant(
        "the last numbers did not change, since the world size does not divide their count; pad with zeros instead of "
        "cutting",
        lost=True,
    ),
)


@dataclass(frozen=True)
class WorldQuestion:
    """One world's question."""

    begin: Sequence[float]
    gradients: Gradients


def asked(world: int) -> WorldQuestion:
    """Numbers without a pattern, the same in every run."""
    chance = Random(100 + world)

    def some() -> list[float]:
        return [round(chance.uniform(-2, 2), 2) for _ in range(COUNT)]

    return WorldQuestion(some(), [[some() for _ in range(world)] for _ in range(STEPS)])


def judge_steps(question: WorldQuestion, by_rank: Mapping[int, Stepped]) -> str:
    """The line for what each rank brings from `stepped`."""
    ranks = sorted(by_rank)
    if all(by_rank[r]["after"][-1] == _float32(question.begin) and not any(by_rank[r]["called"]) for r in ranks):
        return "sharded_step changed no parameter and called no collective: you have not written it yet"
    found = {r: by_rank[r]["after"] for r in ranks}
    for s in range(STEPS):
        for r in ranks:
            right = RIGHT.after(question.begin, question.gradients, r)[s]
            for i in range(COUNT):
                if not abs(found[r][s][i] - right[i]) <= CLOSE:
                    why = _why(question, found)
                    told = mismatch(f"{right[i]:.3f}", f"{found[r][s][i]:.3f}", why)
                    return f"after step {s + 1} of {STEPS}, rank {r}, {_number(i)}: {told}"
    return next(
        (line for r in ranks for s in range(STEPS) if (line := _moved(by_rank[r]["called"][s], len(ranks)))), OK
    )


def _float32(values: Sequence[float]) -> list[float]:
    from array import array

    return list(array("f", values))


def _number(i: int) -> str:
    """`parameters[1][2]`, counted in the flat parameter."""
    for k, shape in enumerate(SHAPES):
        if i < prod(shape):
            return f"number {i} of parameters[{k}]"
        i -= prod(shape)
    raise IndexError(i)


def _why(question: WorldQuestion, found: Mapping[int, list[list[float]]]) -> str:
    for way in WAYS:
        if all(_close(found[r], way.after(question.begin, question.gradients, r)) for r in found):
            return way.words
    ranks = sorted(found)
    if all(found[r] == [_float32(question.begin)] * STEPS for r in ranks):
        return "no parameter changed; write the result back into them, p.data.copy_(...)"
    if any(found[r] != found[ranks[0]] for r in ranks):
        return "the ranks' parameters differ, and must be the same on all of them after a step"
    right = [sorted(RIGHT.after(question.begin, question.gradients, 0)[0]), sorted(found[ranks[0]][0])]
    if all(abs(a - b) <= CLOSE for a, b in zip(*right, strict=True)):
        return "the numbers are right, but in the wrong places: join the shards in rank order, then split them again"
    return ""


def _close(some: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> bool:
    return all(abs(x - y) <= CLOSE for a, b in zip(some, other, strict=True) for x, y in zip(a, b, strict=True))


def _moved(called: Sequence[tuple[str, int]], world: int) -> str:
    """The fault of a right step that is no reduce-scatter and all-gather of shards; empty if it has none."""
    size = -(-COUNT // world)
    for name, _ in called:
        if name not in KINDS:
            return (
                f"the parameters are right, but {name} was called: reduce-scatter the gradients, so that a rank "
                "receives its own shard alone, and all-gather the parameters"
            )
    for kind, most in ((SCATTER, world * size), (GATHER, size)):
        given = sum(count for name, count in called if KINDS[name] == kind)
        if given > most:
            return (
                f"the parameters are right, but a rank gave {counted(given, 'number')} to {kind} in a step, where "
                f"{most} are enough"
            )
    return ""


def _judge(function: Any) -> str:
    def in_one(world: int, screen: Screen) -> str:
        question = asked(world)
        found = in_world(world, stepped, function, question.begin, question.gradients, screen=screen)
        return judge_steps(question, found)

    return in_both_worlds("sharded_step", _where, in_one)


def _where(world: int) -> str:
    return f"{counted(world, 'rank')}, {COUNT} numbers"


sharded_step = Exercise(
    "sharded_step",
    _judge,
    verifies="parameters after three steps, on all ranks and on one rank fewer, and no collective moved more than "
    "necessary",
)
