"""Lesson 18 on paper: a training with at most one mistake, beside one process that sees every whole batch.

The model is softmax regression: a letter's row of a matrix scores the letter that follows. Targets follow from the
inputs by a rule that can be learned, but in every fifth row they are random. Scores are rounded to bfloat16, as under
autocast; all sums are in float64, so the number of ranks alone changes nothing that can be seen. AdamW is that of
Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), with PyTorch's defaults.

Lines of the rubric are judged as `check.capstone` does. The checkpoint is judged by the run that fails and goes on, all
others by the same program without a failure. Pure: same choice, same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from nbddp.launch.topology import counted

NONE = "none"
ALONE = "the model is not wrapped in DDP"
WHOLE = "every rank takes the whole batch"
EARLY = "each rank clips before the all-reduce"
LATE_RATE = "the warm-up begins again after a restart"
OWN_LOSS = "rank 0 prints its own loss"
MEANS = "test: the mean of the ranks' means"
NO_OPTIMIZER = "the checkpoint has no optimizer"
NO_STEP = "the checkpoint has no step"
MISTAKES = (NONE, ALONE, WHOLE, EARLY, LATE_RATE, OWN_LOSS, MEANS, NO_OPTIMIZER, NO_STEP)

RANKS, STEPS, EVERY, WARMUP, PEAK, LIMIT = 4, 40, 10, 10, 0.1, 0.4  # RANKS: the most
ROWS, TEST, LENGTH, LETTERS, SCALE = 12, 11, 4, 8, 2.0  # 4, 3 and 2 divide a batch's rows, not the test's
BETAS, EPSILON, DECAY = (0.9, 0.999), 1e-8, 0.01
NEAR, CLOSE = 0.03, 0.05  # weights as one process's, numbers as the whole batch's

Array = Any  # of numpy


def rate(step: int) -> float:
    """The learning rate of a step, counted from 0."""
    return PEAK * min(1.0, (step + 1) / WARMUP)


def rows_of(seed: int, rows: int) -> tuple[Array, Array]:
    """Inputs and targets of shape (rows, LENGTH), numbers of letters. 2, 3 and 4 do not divide the distance of random
    rows, so that no rank gets all of them."""
    chance = np.random.default_rng(seed)
    inputs, other = chance.integers(LETTERS, size=(2, rows, LENGTH))
    targets = (3 * inputs + 1) % LETTERS
    targets[::5] = other[::5]
    return inputs, targets


def loss_and_gradient(weights: Array, inputs: Array, targets: Array) -> tuple[float, Array]:
    """The mean loss per letter, and its gradient, of shape (LETTERS, LETTERS) as the weights."""
    letters, following = inputs.ravel(), targets.ravel()
    scores = in_bfloat16(SCALE * weights[letters])
    scores = scores - scores.max(1, keepdims=True)
    shares = np.exp(scores)
    shares /= shares.sum(1, keepdims=True)
    places = np.arange(len(letters))
    loss = -float(np.log(shares[places, following]).mean())
    shares[places, following] -= 1
    gradient = np.zeros_like(weights)
    np.add.at(gradient, letters, SCALE * shares / len(letters))
    return loss, gradient


def in_bfloat16(values: Array) -> Array:
    """Rounded to the nearest bfloat16, to even."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def clipped(gradient: Array) -> Array:
    """Scaled down to a norm of LIMIT, if it has a larger one."""
    return gradient * min(1.0, LIMIT / max(norm_of(gradient), 1e-12))


@dataclass
class AdamW:
    """One rank's weights and its optimizer's state."""

    weights: Array
    first: Array = field(init=False)
    second: Array = field(init=False)
    steps: int = 0

    def __post_init__(self) -> None:
        self.first, self.second = np.zeros_like(self.weights), np.zeros_like(self.weights)

    def step(self, gradient: Array, lr: float) -> None:
        self.steps += 1
        self.first = BETAS[0] * self.first + (1 - BETAS[0]) * gradient
        self.second = BETAS[1] * self.second + (1 - BETAS[1]) * gradient**2
        mean, spread = self.first / (1 - BETAS[0] ** self.steps), self.second / (1 - BETAS[1] ** self.steps)
        self.weights = self.weights * (1 - lr * DECAY) - lr * mean / (np.sqrt(spread) + EPSILON)

    def copy(self) -> AdamW:
        made = AdamW(self.weights)
        made.first, made.second, made.steps = self.first, self.second, self.steps
        return made


@dataclass(frozen=True)
class TrainedStep:
    """A step that was taken. again: after the restart; rows: of all ranks' forward passes; loss: of the whole batch by
    rank 0's weights; said: what rank 0 would print; norm: of the gradient that the optimizer took; weights: by rank."""

    number: int
    again: bool
    rate: float
    rows: int
    loss: float
    said: float
    norm: float
    weights: tuple[Array, ...]


@lru_cache(maxsize=64)
def taken(ranks: int, mistake: str, fails: int) -> tuple[TrainedStep, ...]:
    """All steps, those that were lost too. fails: the step in which a rank fails, from 1; 0: none."""
    made = [AdamW(first_weights(0 if mistake != ALONE else r)) for r in range(ranks)]
    found: list[TrainedStep] = []
    saved, number, again, began = ([m.copy() for m in made], 0), 0, False, 0
    while number < STEPS:
        if fails == number + 1 and not again:
            again = True
            made, number = [m.copy() for m in saved[0]], saved[1]
            if mistake == NO_OPTIMIZER:
                made = [AdamW(m.weights) for m in made]
            if mistake == NO_STEP:
                number = 0
            began = number
        found.append(_step(made, number, began if mistake == LATE_RATE else 0, mistake, again))
        number += 1
        if number % EVERY == 0:
            # rank 0 writes, and all ranks load what it has written
            saved = [made[0].copy() for _ in made], number
    return tuple(found)


def first_weights(rank: int) -> Array:
    """What a rank begins with, if it does not get rank 0's."""
    return 0.3 * np.random.default_rng(1000 + rank).standard_normal((LETTERS, LETTERS))


def _step(made: Sequence[AdamW], number: int, since: int, mistake: str, again: bool) -> TrainedStep:
    """One step of all ranks, as the program with this mistake takes it."""
    inputs, targets = rows_of(number, ROWS)
    shares = [slice(None) if mistake == WHOLE else slice(r, None, len(made)) for r in range(len(made))]
    own = [loss_and_gradient(m.weights, inputs[s], targets[s]) for m, s in zip(made, shares, strict=True)]
    gradients = [g for _, g in own]
    if mistake == EARLY:
        gradients = [clipped(g) for g in gradients]
    if mistake != ALONE:
        gradients = [sum(gradients) / len(made)] * len(made)
    if mistake != EARLY:
        gradients = [clipped(g) for g in gradients]
    whole, _ = loss_and_gradient(made[0].weights, inputs, targets)
    lr = rate(number - since)
    for m, gradient in zip(made, gradients, strict=True):
        m.step(gradient, lr)
    said = own[0][0] if mistake == OWN_LOSS else sum(loss for loss, _ in own) / len(own)
    rows = sum(len(inputs[s]) for s in shares)
    return TrainedStep(number, again, lr, rows, whole, said, norm_of(gradients[0]), tuple(m.weights for m in made))


def tested(weights: Sequence[Array], mistake: str) -> tuple[float, float]:
    """The loss over the test as the program computes it, and as one process with rank 0's weights does."""
    inputs, targets = rows_of(999, TEST)
    size = len(weights)
    own = [loss_and_gradient(w, inputs[r::size], targets[r::size])[0] for r, w in enumerate(weights)]
    counts = [len(inputs[r::size]) for r in range(size)]
    right, _ = loss_and_gradient(weights[0], inputs, targets)
    if mistake == MEANS:
        return sum(own) / size, right
    return sum(loss * n for loss, n in zip(own, counts, strict=True)) / TEST, right


def away(some: Array, other: Array, began: Array) -> float:
    """How far two sets of weights are apart, as a share of how far the other one has come."""
    return norm_of(some - other) / max(norm_of(other - began), 1e-9)


def norm_of(values: Array) -> float:
    return float(np.linalg.norm(values))


def apart(gap: float) -> str:
    """`away` in words."""
    return f"{gap:.1%} apart" if gap <= 1 else "more than 100% apart"


Judged = tuple[bool | None, str]  # a RubricLine's `met` and `found`


@dataclass(frozen=True)
class RubricLine:
    """A line of the rubric. met: None if it cannot be judged yet; found: what was compared, in words."""

    asks: str
    met: bool | None
    found: str

    @property
    def sign(self) -> str:
        return {True: "ok", False: "no", None: "–"}[self.met]


@dataclass(frozen=True)
class CapstoneTraining:
    """`steps`: those that were taken so far, of `total`; `whole`: those of the same program without a failure, as far
    as it has come; `right`: all of one process's."""

    ranks: int
    mistake: str
    fails: int
    steps: tuple[TrainedStep, ...]
    total: int
    whole: tuple[TrainedStep, ...]
    right: tuple[TrainedStep, ...]

    @property
    def over(self) -> bool:
        return len(self.steps) == self.total

    @property
    def resumed(self) -> int | None:
        """The step, from 1, with which the restart began, if it has."""
        return next((s.number + 1 for s in self.steps if s.again), None)

    @property
    def due(self) -> int:
        """The step, from 1, that follows the last checkpoint before the failure."""
        return (self.fails - 1) // EVERY * EVERY + 1

    @property
    def lost(self) -> list[int]:
        """The steps, from 1, that no checkpoint has."""
        return [s.number + 1 for s in self.steps if not s.again and self.resumed and s.number + 1 >= self.due]

    def lines(self) -> list[RubricLine]:
        """The rubric's lines that are decided by numbers, as far as training has come."""
        names = "same weights on all ranks", "as one process", f"clipping to {LIMIT:g}", "warm-up"
        judges = self._weights, self._as_one, self._clipping, self._warm_up
        first = [
            RubricLine(n, *(judge() if self.whole else (None, "no step yet")))
            for n, judge in zip(names, judges, strict=True)
        ]
        others = {"logging": self._logging, "evaluation": self._evaluation, "checkpoint": self._checkpoint}
        return [*first, *(RubricLine(name, *judge()) for name, judge in others.items())]

    def _weights(self) -> Judged:
        gap = _between(self.whole[-1].weights)
        return gap == 0, "equal" if gap == 0 else apart(gap)

    def _as_one(self) -> Judged:
        last = self.whole[-1]
        if last.rows != ROWS:
            return False, f"{last.rows} rows in a step, the batch has {ROWS}"
        gap = away(last.weights[0], self.right[last.number].weights[0], first_weights(0))
        return gap <= NEAR, f"weights {apart(gap)}"

    def _clipping(self) -> Judged:
        pairs = [(s.norm, self.right[s.number].norm, s.number + 1) for s in self.whole[:WARMUP]]
        off = [(found, wanted, at) for found, wanted, at in pairs if abs(found - wanted) > 0.1 * LIMIT]
        if off:
            found, wanted, at = off[0]
            return False, f"norm {found:.2f} instead of {wanted:.2f} in step {at}"
        return True, "norms as one process's"

    def _warm_up(self) -> Judged:
        off = next((s for s in self.whole if s.rate != rate(s.number)), None)
        if off is not None:
            return False, f"rate {off.rate:.2f} instead of {rate(off.number):.2f} in step {off.number + 1}"
        return True, f"rate {self.whole[-1].rate:.2f} in step {self.whole[-1].number + 1}"

    def printed(self) -> list[TrainedStep]:
        """The steps after which rank 0 prints."""
        return _printed(self.steps)

    def _logging(self) -> Judged:
        said = _printed(self.whole)
        if not said:
            return None, f"after {EVERY} steps"
        off = max(said, key=lambda s: abs(s.said - s.loss))
        if abs(off.said - off.loss) > CLOSE * off.loss:
            return False, f"{off.said:.2f} instead of {off.loss:.2f} in step {off.number + 1}"
        return True, f"{counted(len(said), 'line')}, the batch's loss"

    def _evaluation(self) -> Judged:
        if not self.over:
            return None, "at the end"
        found, right = tested(self.whole[-1].weights, self.mistake)
        if abs(found - right) > 5e-3 * right:
            return False, f"{found:.3f} instead of {right:.3f}"
        return True, f"test loss {found:.3f}"

    def _checkpoint(self) -> Judged:
        since = self.resumed
        if since is None:
            return None, "no restart" if not self.fails or self.over else "no restart yet"
        if since != self.due:
            return False, f"continued with step {since} instead of {self.due}"
        if not self.over:
            return None, f"continued with step {since}"
        last = self.steps[-1].weights
        gap = away(last[0], self.whole[-1].weights[0], first_weights(0))
        if gap > NEAR:
            return False, f"{apart(gap)} from the run without a failure"
        if between := _between(last):
            return False, f"ranks end {apart(between)}"
        return True, "as without a failure"

    def head(self) -> str:
        at = f"step {self.steps[-1].number + 1} of {STEPS}" if self.steps else "before the first step"
        return f"{counted(self.ranks, 'rank')}, {at}; mistake: {self.mistake}"

    def story(self) -> str:
        """What the failure has done so far."""
        if not self.fails:
            return "no rank fails"
        if self.resumed is None:
            return f"a rank fails in step {self.fails}"
        lost = f"{counted(len(self.lost), 'step')} lost" if self.lost else "no step lost"
        twice = f"; steps 1–{self.due - 1} are taken twice" if self.resumed < self.due else ""
        return f"a rank failed in step {self.fails}; the restart began with step {self.resumed}; {lost}{twice}"

    def verdict(self) -> str:
        """Which lines find the mistake."""
        against = [line.asks for line in self.lines() if line.met is False]
        if against:
            return f"not met: {', '.join(against)}"
        if not self.over:
            return "no line is unmet so far"
        return "all lines are met" if self.mistake == NONE else "this run does not show the mistake"

    def describe(self) -> str:
        lines = [self.head(), self.story()]
        losses = [f"step {s.number + 1}: {s.said:.3f}" for s in self.printed()]
        lines.append(f"losses printed: {', '.join(losses) or 'none'}")
        lines += [f"{line.asks}: {line.sign} ({line.found})" for line in self.lines()]
        return "\n".join([*lines, self.verdict()])


def _between(weights: Sequence[Array]) -> float:
    """How far ranks are `away` from rank 0, at most."""
    return max(away(w, weights[0], first_weights(0)) for w in weights)


def _printed(steps: Sequence[TrainedStep]) -> list[TrainedStep]:
    return [s for s in steps if (s.number + 1) % EVERY == 0]


def simulate_training(ranks: int = 2, mistake: str = NONE, fails: int = 35, time: int = 8) -> CapstoneTraining:
    """The explorer's picture, after `time` steps taken. Past the end nothing changes any more."""
    every, right = taken(ranks, mistake, fails), taken(1, NONE, 0)
    steps = every[:time]
    reached = max((s.number + 1 for s in steps), default=0)
    return CapstoneTraining(ranks, mistake, fails, steps, len(every), taken(ranks, mistake, 0)[:reached], right)
