"""Lesson 10's explorer: which steps of a training that fails again and again are done, lost and repeated. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbddp.errors import BadInput, counted, several

KEPT, LOST, FAILED = "kept", "lost", "failed"
STEPS = 20


@dataclass(frozen=True)
class Attempt:
    """One attempt: it loads the checkpoint before step `start`, does steps until `stop` (exclusive) and, if it
    `fails`, fails in that one. Steps from `kept` on are in no checkpoint when it fails: they are lost."""

    start: int
    stop: int
    kept: int
    fails: bool

    @property
    def lost(self) -> int:
        return self.stop - self.kept

    def kind(self, step: int) -> str:
        """What the step is in this attempt: KEPT, LOST, FAILED, or empty if it is not done in it."""
        if self.start <= step < self.stop:
            return KEPT if step < self.kept else LOST
        return FAILED if self.fails and step == self.stop else ""


@dataclass(frozen=True)
class RestartedTraining:
    """All attempts of a training of `steps` steps with a checkpoint after every `every`."""

    steps: int
    every: int
    attempts: tuple[Attempt, ...]

    @property
    def finished(self) -> bool:
        return not self.attempts[-1].fails

    @property
    def done(self) -> int:
        """Steps that were done, repeated ones as often as they were."""
        return sum(a.stop - a.start for a in self.attempts)

    @property
    def repeated(self) -> int:
        """Steps that were done again because they had been lost."""
        return self.done - max(a.stop for a in self.attempts)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is written after this step."""
        return (step + 1) % self.every == 0

    def verdict(self) -> str:
        """What it came to, in a sentence."""
        if self.finished:
            more = f", {self.repeated} of them repeated" if self.repeated else ", none repeated"
            return f"finished in {counted(len(self.attempts), 'attempt')}: {counted(self.done, 'step')} done{more}"
        safe = self.attempts[-1].kept
        stuck = len(self.attempts) > 1 and safe == self.attempts[-1].start
        why = ": no attempt reaches a checkpoint, so more restarts do not help" if stuck else ""
        return f"not finished: the restarts are used up, and {counted(safe, 'step')} of {self.steps} are safe{why}"

    def describe(self) -> str:
        lines = []
        for k, a in enumerate(self.attempts):
            did = f"runs {several('step', range(a.start, a.stop))}" if a.stop > a.start else "runs no steps"
            end = f"fails in step {a.stop}" if a.fails else "ends"
            lost = f"; {several('step', range(a.kept, a.stop))} {'are' if a.lost > 1 else 'is'} lost" if a.lost else ""
            lines.append(f"attempt {k}: starts at step {a.start}, {did}, {end}{lost}")
        return "\n".join([*lines, self.verdict()])


def training(steps: int, every: int, lives: Sequence[int]) -> RestartedTraining:
    """Attempt k does at most `lives[k]` steps and then fails; there are as many attempts as lives.

    Raises BadInput for what is no training.
    """
    if steps < 1 or every < 1 or not lives or min(lives) < 0:
        raise BadInput("a training needs at least one step, one step per checkpoint, and one attempt")
    attempts: list[Attempt] = []
    start = 0
    for life in lives:
        stop = min(steps, start + life)
        fails = stop < steps
        kept = max(start, stop // every * every) if fails else stop
        attempts.append(Attempt(start, stop, kept, fails))
        start = kept
        if not fails:
            break
    return RestartedTraining(steps, every, tuple(attempts))


def simulate_restarts(every: int = 4, life: int = 7, max_restarts: int = 3) -> RestartedTraining:
    """STEPS steps; every attempt fails after `life` steps; `max_restarts` attempts follow the first."""
    return training(STEPS, every, [life] * (max_restarts + 1))
