"""Lesson 09: a training loop that must not wait for batches which other ranks do not have, and a log to be read.

The loop runs on real ranks with uneven batches. That it ends is seen by the pool (a deadlock is named); that it still
trains is judged against one process that holds all shards and averages their gradients step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbddp.launch.topology import rank_words
from nbddp.lessons.framework.answer import OK, Exercise, Wrong
from nbddp.lessons.framework.on_rank import seeded
from nbddp.lessons.framework.run_check import grouped, judged_by, on_ranks, pool
from nbddp.lessons.framework.tables import Case, TableExercise
from nbddp.lessons.l09_hangs.on_rank import Batch, trained

START = (0.3, -0.2, 0.1)  # two weights and the bias
LEARNING_RATE = 0.1
CLOSE = 1e-9
Shards = Sequence[Sequence[Batch]]


def layouts(ranks: int) -> list[list[int]]:
    """How many batches each rank has, in each of the runs. In the third the mean is larger than the smallest."""
    return [[3, *[2] * (ranks - 1)], [*[2] * (ranks - 1), 4], [*[5] * (ranks - 1), 2], [3] * ranks]


def shards(counts: Sequence[int]) -> list[list[Batch]]:
    """Batches of two samples with two features; no two of a layout are equal."""

    def sample(rank: int, i: int, k: int) -> tuple[list[float], list[float]]:
        x = [((7 * rank + 3 * i + 5 * k) % 11) / 11, ((4 * rank + 9 * i + 2 * k) % 13) / 13 - 0.5]
        return x, [((5 * rank + 2 * i + 3 * k) % 7) / 7]

    made: list[list[Batch]] = []
    for rank, count in enumerate(counts):
        samples = [[sample(rank, i, k) for k in range(2)] for i in range(count)]
        made.append([([x for x, _ in some], [y for _, y in some]) for some in samples])
    return made


def gradient(at: Sequence[float], batch: Batch) -> list[float]:
    """Of the mean squared error of a linear layer on one batch, with respect to weights and bias."""
    found = [0.0] * len(at)
    for x, (y,) in zip(*batch, strict=True):
        ones = [*x, 1.0]
        error = sum(a * b for a, b in zip(at, ones, strict=True)) - y
        found = [f + 2 * error * b / len(batch[0]) for f, b in zip(found, ones, strict=True)]
    return found


def stepped(at: Sequence[float], batches: Sequence[Batch], divisor: int) -> list[float]:
    """One step of SGD with the sum of the batches' gradients over `divisor`."""
    found = [gradient(at, b) for b in batches]
    return [a - LEARNING_RATE * sum(column) / divisor for a, column in zip(at, zip(*found, strict=True), strict=True)]


def added_up(steps: Sequence[Sequence[Batch]]) -> list[float]:
    """Parameters after steps whose gradients nobody sets to zero: each has all earlier ones in it."""
    at, total = list(START), [0.0] * len(START)
    for some in steps:
        moved = stepped(at, some, len(some))
        total = [t + m - a for t, m, a in zip(total, moved, at, strict=True)]
        at = [a + t for a, t in zip(at, total, strict=True)]
    return at


def run(steps: Sequence[Sequence[Batch]], divisor: int | None = None) -> list[float]:
    """Parameters after steps, each on some batches; divided by how many these are, or by `divisor`."""
    at = list(START)
    for some in steps:
        at = stepped(at, some, divisor or len(some))
    return at


def rows(held: Shards, count: int, more: Callable[[Sequence[Batch], int], Batch] | None = None) -> list[list[Batch]]:
    """Batches of step 0, 1, ... of `count`: of the ranks that have one, or with `more` of all."""
    return [[s[i] if i < len(s) else more(s, i) for s in held if i < len(s) or more] for i in range(count)]  # type: ignore[misc]


@dataclass(frozen=True)
class Outcome:
    """A way to train and what it gives; `words` is what to say to who did it, empty if it is a right one."""

    parameters: Sequence[float]
    words: str = ""


def outcomes(held: Shards) -> list[Outcome]:
    """Right ways, then wrong ones."""
    fewest, most, ranks = min(map(len, held)), max(map(len, held)), len(held)
    alone = [run([[b] for b in some]) for some in held]
    short = [
        Outcome(run(rows(held, k)), f"only {k} of the {fewest} batches that every rank has {_were(k)} used")
        for k in range(1, fewest)
    ]
    return [
        Outcome(run(rows(held, fewest))),  # the count that all have
        Outcome(run(rows(held, most), ranks)),  # Join: who has ended adds nothing, the world size divides
        Outcome(run(rows(held, most))),  # Join(divide_by_initial_world_size=False)
        Outcome(run(rows(held, most, lambda some, i: some[i % len(some)]))),  # begin again with the first batch
        Outcome(run(rows(held, most, lambda some, i: some[-1]))),  # repeat the last batch
        Outcome(START, "the parameters did not change: no step was taken"),
        Outcome(
            added_up(rows(held, fewest)),
            "each step's gradients were added to those of earlier steps: optimizer.zero_grad() is missing",
        ),
        *short,
        Outcome(
            [sum(column) / ranks for column in zip(*alone, strict=True)],
            "each rank trained alone and the parameters were averaged at the end; DDP averages gradients in every step",
        ),
        *(
            Outcome(own, f"rank {r} alone would get these parameters: the others' gradients are missing")
            for r, own in enumerate(alone)
        ),
    ]


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def near(one: Sequence[float], other: Sequence[float]) -> bool:
    """Equal but for rounding."""
    return len(one) == len(other) and all(abs(a - b) <= CLOSE for a, b in zip(one, other, strict=True))


def verdict(found: Mapping[int, Sequence[float]], held: Shards) -> str:
    """The line for the parameters that the ranks ended with."""
    first = min(found)
    apart = next((r for r in sorted(found) if not near(found[r], found[first])), None)
    if apart is not None:
        return (
            f"ranks {first} and {apart} end with different parameters: a step was taken whose gradients were not "
            "exchanged (no_sync or model.module?)"
        )
    known = next((o for o in outcomes(held) if near(o.parameters, found[first])), None)
    if known is not None:
        return known.words or OK
    return (
        "all ranks agree, but not on the result of averaged gradients. It fits neither the batches that every rank "
        "has, nor all of them as Join takes them"
    )


def layout_words(counts: Sequence[int]) -> str:
    """`with 3 batches on rank 0, 2 on ranks 1–3`."""
    by_count: dict[int, list[int]] = {}
    for rank, count in enumerate(counts):
        by_count.setdefault(count, []).append(rank)
    first, *others = [(count, rank_words(ranks)) for count, ranks in by_count.items()]
    return ", ".join([f"with {first[0]} batches on {first[1]}", *(f"{count} on {ranks}" for count, ranks in others)])


def without_file(line: str) -> str:
    """The line without `cell`: a check's line is about one function."""
    return line.replace("(cell line", "(line")


def judge_training(train: Callable[..., Any]) -> str:
    """Train on every layout in turn, up to the first that goes wrong."""
    with grouped():
        return _judged(train)


def _judged(train: Callable[..., Any]) -> str:
    for counts in layouts(pool().world_size):
        held = shards(counts)
        try:
            found = on_ranks(seeded, trained, train, held, START, LEARNING_RATE)
        except Wrong as wrong:
            raise Wrong(f"{layout_words(counts)}: {without_file(str(wrong))}") from wrong
        line = verdict(found.by_rank(), held)
        if line != OK:
            return f"{layout_words(counts)}: {line}"
    return OK


# -- the log ---------------------------------------------------------------------------------

A, B, C = "all_reduce", "broadcast", "barrier"
LOG_CASES: tuple[Case, ...] = (
    ({0: [B, A, A], 1: [B, A, A], 2: [B, A], 3: [B, A, A]},),
    ({0: [B, A, A, A], 1: [B, A], 2: [B, A, A], 3: [B, A, A, A]},),
    ({0: [B], 1: [B, A, C], 2: [B], 3: [B, A, C]},),
    ({0: [A, C], 1: [A, C]},),
    ({1: [A, A, A], 5: [A, A], 3: [A]},),
    ({0: [A], 1: []},),
    ({3: [A], 1: [A, B], 0: [A]},),
    ({0: [B, A], 1: [A, B]},),  # as many calls, in another order: no rank is missing
    ({0: [B, A, C], 1: [A, B], 2: [C, C, C]},),
)


def missing(log: Mapping[int, Sequence[str]]) -> Any:
    """The right answer: [number of the first collective that not all have called, the ranks that have not]; or None."""
    reached = {rank: len(calls) for rank, calls in log.items()}
    fewest = min(reached.values())
    if fewest == max(reached.values()):
        return None
    return [fewest + 1, sorted(r for r, n in reached.items() if n == fewest)]


def _of(log: Mapping[int, Sequence[str]], answer: Callable[[int, int], Any]) -> Any:
    """What a wrong way answers from the fewest and the most calls; None where all have called as many."""
    counts = [len(calls) for calls in log.values()]
    return None if min(counts) == max(counts) else answer(min(counts), max(counts))


def _ranks(log: Mapping[int, Sequence[str]], keep: Callable[[int], bool]) -> list[int]:
    return sorted(r for r, calls in log.items() if keep(len(calls)))


def why_not_this(case: Case, answer: Any) -> str:
    """What is wrong with an answer."""
    (log,) = case
    right = missing(log)
    if right is None:
        return "all ranks made the same number of calls, whatever their names: no rank is missing, so return None"
    if not (isinstance(answer, list) and len(answer) == 2 and isinstance(answer[1], list)):
        return "return a pair: the number of the collective, and the list of the ranks that have not called it"
    if answer[0] == right[0] and answer[1] != sorted(answer[1], key=repr) and sorted(answer[1], key=repr) == right[1]:
        return "sort the ranks"
    if isinstance(answer[0], str):
        return "return the number of the collective, counted from 1, not its name"
    return "the number is right, the ranks are not" if answer[0] == right[0] else ""


LOGS = TableExercise(
    "missing_ranks",
    LOG_CASES,
    missing,
    {
        "those are the ranks that wait; return the ranks that they wait for": lambda log: _of(
            log, lambda low, high: [low + 1, _ranks(log, lambda n: n > low)]
        ),
        "that names every rank that is behind; a rank may have called this collective and miss only a later one": (
            lambda log: _of(log, lambda low, high: [low + 1, _ranks(log, lambda n: n < high)])
        ),
        "that is the last collective that any rank called; the ranks wait in the first that not all have called": (
            lambda log: _of(log, lambda low, high: [high, _ranks(log, lambda n: n < high)])
        ),
        "that is the last collective that all have called; the next one is where they wait": lambda log: _of(
            log, lambda low, high: [low, _ranks(log, lambda n: n == low)]
        ),
        "only one of the missing ranks is named": lambda log: _of(
            log, lambda low, high: [low + 1, _ranks(log, lambda n: n == low)[:1]]
        ),
        "those are positions in the log, not ranks: a group may have ranks other than 0, 1, 2": lambda log: _of(
            log, lambda low, high: [low + 1, [i for i, calls in enumerate(log.values()) if len(calls) == low]]
        ),
    },
    why_not_this,
)

train_uneven = Exercise(
    "train_uneven",
    judge_training,
    verifies="with equal and unequal numbers of batches no rank hangs, and all ranks end with the right weights",
)
missing_ranks = Exercise(
    "missing_ranks",
    judged_by(LOGS),
    verifies=f"{len(LOG_CASES)} logs, on every rank of the pool",
)
