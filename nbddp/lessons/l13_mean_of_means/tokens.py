"""Lesson 13: the gradients of the mean loss over all tokens of all ranks and micro-batches, exchanged once.

Whatever a learner's function does, its gradients are nearly always a weighted sum of the micro-batches' gradients. The
weights are found by least squares, compared with what known mistakes would give, and shown otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from nbddp.launch.topology import counted
from nbddp.lessons.framework.answer import OK, Exercise, mismatch
from nbddp.lessons.framework.run_check import Reference, grouped, in_world, world_sizes
from nbddp.lessons.l13_mean_of_means.gradients import Gradients, combination, near
from nbddp.lessons.l13_mean_of_means.on_rank import Part, Watched, parts, token_weighted
from nbddp.lessons.l13_mean_of_means.passes import Passes
from nbddp.output.screens import NullScreen

CASES = (0, 1, 2)  # of `on_rank.plan`
PARTS = Reference(parts, CASES)


@dataclass(frozen=True)
class Piece:
    """A micro-batch of a rank: its tokens, its positions (padding included), its gradient summed over tokens; `own`:
    the tokens of its rank, `mates`: how many micro-batches that has, `last`: whether this is its last."""

    rank: int
    number: int
    tokens: int
    positions: int
    gradient: Gradients
    own: int
    mates: int
    last: bool


@dataclass(frozen=True)
class TokenStep:
    """All micro-batches of a step on `world` ranks."""

    world: int
    pieces: Sequence[Piece]

    @property
    def tokens(self) -> int:
        return sum(p.tokens for p in self.pieces)

    @property
    def positions(self) -> int:
        return sum(p.positions for p in self.pieces)

    @property
    def filled(self) -> list[Piece]:
        """Those that are not all padding; the others have no gradient."""
        return [p for p in self.pieces if p.tokens]


def step_of(case: int, world: int, by_rank: Mapping[int, Sequence[Sequence[Part]]]) -> TokenStep:
    made = []
    for rank in range(world):
        own = by_rank[rank][case]
        tokens = sum(p["tokens"] for p in own)
        made += [
            Piece(rank, i + 1, p["tokens"], p["positions"], p["gradient"], tokens, len(own), i + 1 == len(own))
            for i, p in enumerate(own)
        ]
    return TokenStep(world, made)


Weights = Callable[[TokenStep, Piece], float]
MEAN = "every micro-batch counts the same, however many tokens it has"
KNOWN: tuple[tuple[str, Weights], ...] = (
    (f"{MEAN}: that is the mean of means", lambda s, p: 1 / (s.world * p.mates * p.tokens)),
    (f"{MEAN}, and the means were added up", lambda s, p: 1 / (s.world * p.tokens)),
    (
        "you divided by the tokens of this rank alone, so a rank with few tokens counts as much as one with many. "
        "All-reduce the number of tokens",
        lambda s, p: 1 / (s.world * p.own),
    ),
    (
        "you divided by the tokens of this rank alone: all_reduce their number before you divide",
        lambda s, p: 1 / p.own,
    ),
    (
        "DDP divides the sum over ranks by the world size, and you divide by all tokens as well: multiply by the "
        "world size",
        lambda s, p: 1 / (s.world * s.tokens),
    ),
    ("you multiplied by the world size once too often", lambda s, p: s.world / s.tokens),
    ("the sum over tokens was not divided by their number", lambda s, p: 1.0),
    ("the sum over tokens was not divided by their number", lambda s, p: 1 / s.world),
    ("padding was counted: a target of -100 is not a token", lambda s, p: 1 / s.positions),
    (
        "padding was counted, but a target of -100 is not a token; and DDP's division by the world size was not undone",
        lambda s, p: 1 / (s.world * s.positions),
    ),
    (
        "you divided by the number of micro-batches as well; a sum of tokens' losses needs no such division",
        lambda s, p: 1 / (s.tokens * p.mates),
    ),
    (
        "only the last micro-batches count: gradients add up only if they are not set to zero in between",
        lambda s, p: p.last / s.tokens,
    ),
    ("they were set to zero after the last backward()", lambda s, p: 0.0),
)


def explained(step: TokenStep, weights: Sequence[float]) -> str:
    """Why a token of each of `step.filled` counts `weights`."""
    for words, would in KNOWN:
        if all(near(step.tokens * w, step.tokens * would(step, p)) for w, p in zip(weights, step.filled, strict=True)):
            return words
    pairs = [(float(f"{w:.6g}"), p) for w, p in zip(weights, step.filled, strict=True)]  # ties: the first rank's
    (least, one), (most, other) = (pick(pairs, key=lambda pair: pair[0]) for pick in (min, max))
    expected = f"a weight of 1/{step.tokens}, {1 / step.tokens:.3f}, for every token"
    if near(least, most):
        factor = weights[0] * step.tokens * step.world
        if near(factor, round(factor)):
            return f"you multiply by {factor:.0f}, and the world size is {step.world}: dist.get_world_size()"
        return mismatch(expected, f"{least:.3g} for every token")
    return mismatch(
        expected,
        f"{most:.3g} in rank {other.rank}'s micro-batch {other.number} and {least:.3g} in rank {one.rank}'s "
        f"micro-batch {one.number}",
    )


def judge(step: TokenStep, found: Mapping[int, Watched]) -> str:
    """The line for what the ranks did in one step, by rank."""
    if all(not f["exchanged"] and not any(f["gradients"].values()) for f in found.values()):
        return "token_weighted_backward left no gradients: you have not written it yet, or it calls no backward()"
    return next((line for line in _lines(step, found) if line != OK), OK)


def _lines(step: TokenStep, found: Mapping[int, Watched]) -> Iterator[str]:
    for rank, did in sorted(found.items()):
        line = _line(step, rank, did)
        yield line if line == OK or line.startswith("the gradients are right") else f"rank {rank}{line}"


def _line(step: TokenStep, rank: int, did: Watched) -> str:
    if did["moved"]:
        return ": a parameter changed; token_weighted_backward leaves gradients, and its caller takes the step"
    gradients: dict[str, list[float]] = {}
    for name, values in did["gradients"].items():
        if values is None:
            return f": {name} has no gradient"
        gradients[name] = values
    if not all(isfinite(x) for values in gradients.values() for x in values):
        return ": a gradient is nan or infinite"
    count = sum(p.rank == rank for p in step.pieces)
    passes = Passes(count, did["called"], did["entered"], did["exchanged"], did["kept"])
    weights = combination([p.gradient for p in step.filled], gradients)
    if weights is not None and all(near(step.tokens * w, 1) for w in weights):
        return passes.line()
    early = passes.not_exchanged()
    if early:
        return f", {early}"
    if weights is None:
        return ": yours is not a weighted sum of the tokens' gradients"
    return f", {counted(step.tokens, 'token')} on {counted(step.world, 'rank')}: {explained(step, weights)}"


def judge_tokens(function: Any) -> str:
    """All cases on all ranks, the first one also on a rank less; each in a run of its own, so that a rank that leaves
    early is seen to have finished."""
    with grouped():
        right = PARTS.by_rank()
        whole, less = world_sizes()
        for case, world in (*((c, whole) for c in CASES), (0, less)):
            screen = None if (case, world) == (0, whole) else NullScreen()
            found = in_world(world, token_weighted, function, case, screen=screen)
            line = judge(step_of(case, world, right), found)
            if line != OK:
                return line
    return OK


token_weighted_backward = Exercise(
    "token_weighted_backward",
    judge_tokens,
    verifies="every token of all ranks counts the same, padding counts nothing, for one exchange",
)
