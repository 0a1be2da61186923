"""Lesson 12: gradients accumulated over micro-batches and exchanged once.

Run on real ranks, each with samples of its own, it must give what one process gives on all of them; how often
gradients were exchanged is what the recorder of DDP's steps has seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbddp.lessons.answer import OK, Exercise
from nbddp.lessons.beyond.on_rank import accumulated, expected
from nbddp.lessons.exercise import seeded
from nbddp.lessons.running import Reference, grouped, on_ranks
from nbddp.run.screen import Silent

COUNTS = (5, 3, 1)  # micro-batches; no usual world size, so that who divides by that is told apart
CLOSE = 1e-6  # relative, of float64
Gradients = Mapping[str, Sequence[float]]
EXPECTED = Reference(expected, COUNTS)


# -- accumulation ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taken:
    """What one rank did with `count` micro-batches, and what is right: the fields are those of `accumulated` and
    `expected` in `nbddp.lessons.beyond.on_rank`."""

    rank: int
    count: int
    world: int
    gradients: Mapping[str, Sequence[float] | None]
    reference: Gradients
    last: Gradients
    called: int
    entered: int
    exchanged: Sequence[bool]
    kept: int
    turned: bool
    moved: bool

    @property
    def exchanges(self) -> int:
        return sum(self.exchanged)

    @property
    def untouched(self) -> bool:
        """Whether nothing came of the function."""
        return not self.exchanged and not any(self.gradients.values())


def multiple(some: Sequence[float], of: Sequence[float]) -> float | None:
    """c, if `some` is c × `of` throughout; else None."""
    square = sum(y * y for y in of)
    if square == 0:
        return None
    c = sum(x * y for x, y in zip(some, of, strict=True)) / square
    error = max(abs(x - c * y) for x, y in zip(some, of, strict=True))
    return c if error <= CLOSE * max(map(abs, of)) else None


def common_multiple(some: Gradients, of: Gradients) -> float | None:
    """c, if every gradient is c × that of `of`, with one c for all."""
    found = [multiple(some[n], of[n]) for n in of]
    first = found[0]
    if first is None or any(c is None or abs(c - first) > CLOSE * max(1, abs(first)) for c in found):
        return None
    return first


def diagnose(by_rank: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    """The line for what every rank did, one mapping per number of micro-batches."""
    cases = [[Taken(rank, **case[i]) for rank, case in sorted(by_rank.items())] for i in range(len(COUNTS))]
    if all(t.untouched for case in cases for t in case):
        return "accumulate left no gradients: it is still to be written, or it calls no backward()"
    for case in cases:
        for taken in case:
            line = _line(taken)
            if line != OK:
                return line
    return OK


def _line(taken: Taken) -> str:
    if taken.moved:
        return f"rank {taken.rank}: a parameter changed; accumulate leaves gradients, and its caller takes the step"
    if taken.turned:
        return f"rank {taken.rank}: loss_of takes the outputs first, then the targets: loss_of(model(inputs), targets)"
    gradients: dict[str, Sequence[float]] = {}
    for name, values in taken.gradients.items():
        if values is None:
            return f"rank {taken.rank}: {name} has no gradient after {_micro(taken.count)}"
        gradients[name] = values
    same = common_multiple(gradients, taken.reference)
    if same is not None and abs(same - 1) <= CLOSE:
        return _structure(taken)
    return _not_exchanged(taken) or _wrong(taken, gradients, same)


def _structure(taken: Taken) -> str:
    """The gradients are right: were they exchanged as they should be?"""
    n, passes = taken.count, len(taken.exchanged)
    if taken.exchanges == 1 and passes == n:
        return OK if taken.kept <= 1 else _all_at_once(taken)
    if taken.exchanges == 0:
        return (
            "the gradients are right, but DDP exchanged none of them: leave the last micro-batch outside no_sync and "
            "it does, bucket by bucket while backward runs"
        )
    if passes < n:
        return (
            f"the gradients are right, but {_micro(n)} went through the model in {_times(passes, 'forward')}: that "
            "needs the activations of all of them at once, which accumulation is there to avoid"
        )
    if taken.called and not taken.entered:
        return (
            f"the gradients are right, but were exchanged {_times(taken.exchanges)}: model.no_sync() was called and "
            "never entered; it is a context manager, so write `with model.no_sync():`"
        )
    if taken.entered and taken.exchanges == n:
        return (
            f"the gradients are right, but were exchanged {_times(taken.exchanges)} although no_sync was entered: DDP "
            "decides in forward whether backward will exchange, so forward belongs inside no_sync as well"
        )
    if taken.exchanges > 1:
        return (
            f"the gradients are right, but were exchanged {_times(taken.exchanges)} for {_micro(n)}, where once will "
            "do: all but the last belong inside model.no_sync()"
        )
    return f"the gradients are right, but the model was called {_times(passes)} for {_micro(n)}"


def _all_at_once(taken: Taken) -> str:
    return (
        f"the gradients are right, but up to {taken.kept} losses waited for backward() at a time: that keeps the "
        "activations of all of them, which accumulation is there to avoid; call backward() for each micro-batch"
    )


def _not_exchanged(taken: Taken) -> str:
    """What is said where the exchange was left out or came too early; empty where it was in its place."""
    who = f"rank {taken.rank}, {_micro(taken.count)}"
    if not taken.exchanged:
        return f"{who}: nothing went through DDP; call model(inputs), since model.module goes past it"
    if not taken.exchanges and len(taken.exchanged) < taken.count:
        return (
            f"{who}: {_times(len(taken.exchanged), 'forward')}, all inside no_sync, so no gradients were exchanged: "
            "the last micro-batch is missing, and it belongs outside"
        )
    if not taken.exchanges:
        return (
            f"{who}: no gradients were exchanged, so every rank has its own: the last micro-batch was inside "
            "no_sync too"
        )
    if not taken.exchanged[-1]:
        at = 1 + max(i for i, did in enumerate(taken.exchanged) if did)
        return (
            f"{who}: gradients were exchanged in micro-batch {at}, and what came after it is every rank's own: the one "
            "outside no_sync must be the last"
        )
    return ""


def _wrong(taken: Taken, gradients: Gradients, ratio: float | None) -> str:
    n, first = taken.count, next(iter(taken.reference))
    who = f"rank {taken.rank}, {first}, {_micro(n)}"
    if ratio is not None:
        return f"{who}: yours is {ratio:.2f} × the reference" + _why(ratio, n, taken.world)
    if n > 1 and common_multiple(gradients, taken.last) is not None:
        return (
            f"{who}: yours is of the last micro-batch alone; gradients add up only while nobody sets them to zero "
            "between the micro-batches"
        )
    uneven = shares(gradients, taken)
    if uneven:
        early, late = uneven
        return f"{who}: the last micro-batch counts {late:.2f} and each before it {early:.2f}, right is 1/{n} for each"
    name = next(n for n in taken.reference if not _close(gradients[n], taken.reference[n]))
    off = max(abs(x - y) for x, y in zip(gradients[name], taken.reference[name], strict=True))
    return f"rank {taken.rank}, {name}, {_micro(n)}: yours differs from the reference by up to {off:.2g}"


def shares(gradients: Gradients, taken: Taken) -> tuple[float, float] | None:
    """How much each micro-batch but the last counts, and the last, if that explains the gradients; else None.

    Two unknowns from the two components that tell them apart best, tried on all others. The early ones' sum is
    count × reference - last.
    """
    n = taken.count
    rows = [
        (n * whole - last, last, found)
        for name in taken.reference
        for whole, last, found in zip(taken.reference[name], taken.last[name], gradients[name], strict=True)
    ]
    if n < 2:
        return None
    one = max(rows, key=lambda row: row[0] ** 2 + row[1] ** 2)
    two = max(rows, key=lambda row: abs(one[0] * row[1] - one[1] * row[0]))
    determinant = one[0] * two[1] - one[1] * two[0]
    if determinant == 0:
        return None
    early = (one[2] * two[1] - one[1] * two[2]) / determinant
    late = (one[0] * two[2] - one[2] * two[0]) / determinant
    scale = max(abs(found) for _, _, found in rows)
    fits = all(abs(early * a + late * b - found) <= CLOSE * scale for a, b, found in rows)
    return (early, late) if fits else None


def _why(ratio: float, count: int, world: int) -> str:
    def near(value: float) -> bool:
        return abs(ratio - value) <= CLOSE * max(1, abs(value))

    if near(0):
        return ": they were set to zero after the last backward()"
    if near(count):
        return f": you added up {_micro(count)} but did not divide by their number"
    if near(count * world):
        return ": DDP's average over the ranks was undone, and the sum not divided by the number of micro-batches"
    if near(count / world):
        return ": you divided by the world size, which DDP does itself; divide by the number of micro-batches"
    if near(1 / world):
        return ": you divided by the world size too, which DDP has done already"
    if near(1 / count):
        return ": you divided by the number of micro-batches twice"
    if near(world):
        return ": you added up over the ranks what DDP had averaged over them already"
    return f"; each micro-batch's loss counts 1/{count} of the whole"


def _close(some: Sequence[float], of: Sequence[float]) -> bool:
    c = multiple(some, of)
    return c is not None and abs(c - 1) <= CLOSE


def _micro(count: int) -> str:
    return f"{count} micro-batch{'es' * (count != 1)}"


def _times(count: int, noun: str = "") -> str:
    if noun:
        return f"{count} {noun}{'s' * (count != 1)}"
    return "once" if count == 1 else f"{count} times"


def _judge_accumulation(function: Any) -> str:
    """A run for each number of micro-batches, so that a rank that leaves early is seen to have finished; the first one
    shows what is printed."""
    with grouped():
        right = EXPECTED.by_rank()
        runs = [on_ranks(seeded, accumulated, function, COUNTS[0])]
        runs += [on_ranks(seeded, accumulated, function, count, screen=Silent()) for count in COUNTS[1:]]
    return diagnose({r: [{**run[r], **known} for run, known in zip(runs, right[r], strict=True)] for r in right})


accumulate = Exercise(
    "accumulate",
    _judge_accumulation,
    (
        "backward() adds to .grad, so micro-batches add up by themselves; a mean over all of them is what is wanted",
        "divide each loss by len(micro_batches) before backward(); put all but the last micro-batch, forward and "
        "backward, inside `with model.no_sync():`",
        "for i, (inputs, targets) in enumerate(micro_batches): ... with model.no_sync() if i + 1 < len(micro_batches) "
        "else contextlib.nullcontext(): ...",
    ),
)
