"""Lesson 05: averaging the gradients, after backward and by hooks during it.

Both are compared, layer by layer, with one process that has the union of the ranks' disjoint shards. Less is not sound:
comparing ranks with each other, or all ranks on the same data, lets wrong answers pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import mul
from typing import Any

from nbddp.errors import RunHung
from nbddp.launch.topology import counted
from nbddp.lessons.framework.answer import OK, Exercise, Wrong
from nbddp.lessons.framework.run_check import Reference, grouped, in_world, world_sizes
from nbddp.lessons.l05_averaging_gradients.on_rank import Brought, Gradients, Layers, averaged, expected

CLOSE = 1e-4  # of the largest number: float32 sums in another order are closer
Numbers = Sequence[float]
Found = Mapping[int, Brought]  # by rank, what `beside` gives
EXPECTED = Reference(expected)

PARAMETERS = {
    False: "you averaged the parameters; average p.grad, not p",
    True: "you averaged the parameters: this hook receives the parameter p, whose gradient is p.grad",
}


def judge(found: Found, name: str, hooks: bool) -> str:
    """The line for what the ranks brought."""
    if any(f.get("unwritten") for f in found.values()):
        return f"you have not written {name} yet"
    for number in range(2):
        line = _gradients_line(found, number, hooks)
        if line:
            return line if number == 0 else f"in the second step, {line}"
    return _apart_line(found, hooks) or OK


def _gradients_line(found: Found, number: int, hooks: bool) -> str:
    for rank, brought in sorted(found.items()):
        step = brought["steps"][number]
        for layer, yours in step["yours"].items():
            if not close(yours, step["reference"][layer]):
                return f"rank {rank}, layer {layer}: {_wrong(found, number, rank, layer, hooks)}"
    return ""


def _wrong(found: Found, number: int, rank: int, layer: str, hooks: bool) -> str:
    """What is wrong with one gradient that is not the reference."""
    step, size = found[rank]["steps"][number], len(found)
    yours, reference, own = step["yours"][layer], step["reference"][layer], step["own"][layer]
    if yours is None:
        return "p.grad is None now; change it in place, or assign a tensor"
    if len(yours) != len(reference):
        return "p.grad has another shape"
    if not all(map(math.isfinite, yours)):
        return "p.grad is not finite; did you divide by 0, for example by the rank (which is 0 on rank 0)?"
    if not any(yours):
        return "the gradient is all zeros"
    alone = _unlike(found, number, layer) or _alone(found, number, layer)
    if alone:
        return alone
    if close(yours, own):
        return "yours is this rank's own gradient: " + _why_own(found, number, rank, hooks)
    everyone = [found[r]["steps"][number]["own"][layer] for r in sorted(found)]
    known = (words for words, made in (*_picked(everyone), *_scaled(own, size)) if close(yours, made))
    return next(known, "") or _ratio(yours, reference, size)


def _unlike(found: Found, number: int, layer: str) -> str:
    """Where the ranks divide the same sum by unlike whole numbers."""
    divisors = []
    for brought in found.values():
        step = brought["steps"][number]
        ratio = _multiple(step["yours"][layer], step["reference"][layer])
        if not ratio:
            return ""
        divisors.append(round(len(found) / ratio, 3))
    if len(set(divisors)) == 1 or any(d != round(d) for d in divisors):
        return ""
    told = ", ".join(f"{d:.0f}" for d in divisors)
    return f"the ranks divide the sum by {told}; every rank must divide by the world size, dist.get_world_size()"


def _alone(found: Found, number: int, layer: str) -> str:
    """Where one rank's result went to all, or all ranks' to one."""
    steps = {r: f["steps"][number] for r, f in found.items()}
    right = [r for r, s in steps.items() if close(s["yours"][layer], s["reference"][layer])]
    if len(right) == 1:
        return f"only rank {right[0]} has the mean; reduce leaves the sum on one rank, all_reduce on all"
    for rank, theirs in steps.items():
        if all(close(s["yours"][layer], theirs["own"][layer]) for s in steps.values()):
            return f"all ranks have rank {rank}'s gradient: broadcast copies one rank's, all_reduce sums all ranks'"
    return ""


def _picked(everyone: Sequence[Numbers]) -> Iterator[tuple[str, list[float]]]:
    """What is left when the ranks' gradients are not summed but one of them is taken."""
    for rank, theirs in enumerate(everyone):
        yield f"yours is rank {rank}'s own gradient, not the mean of all ranks'", list(theirs)
    for words, pick in (("largest", max), ("smallest", min)):
        taken = f"yours has the {words} of the ranks' numbers, not their mean"
        yield f"{taken}: all_reduce sums by default", [pick(c) for c in zip(*everyone, strict=True)]


def _scaled(own: Numbers, size: int) -> Iterator[tuple[str, list[float]]]:
    share = (
        f"yours is {1 / size:.2f} × this rank's own gradient: you divided but did not sum; all_reduce first, and wait "
        "for it if it is async"
    )
    yield share, [v / size for v in own]
    yield f"yours is {size:.2f} × this rank's own gradient: that is not a sum over the ranks", [v * size for v in own]


def _ratio(yours: Numbers, reference: Numbers, size: int) -> str:
    """`yours is 2.00 × the reference: ...`, if it is a multiple of it."""
    ratio = _multiple(yours, reference)
    if ratio is None:
        if len(yours) > 1 and close(yours, [yours[0]] * len(yours)):
            return "yours is the same number everywhere; average over the ranks and keep the gradient's shape"
        apart = max(abs(a - b) for a, b in zip(yours, reference, strict=True))
        return f"yours differs from the reference by up to {apart:.2g} and is not a multiple of it"
    why = {
        size: "you summed but did not divide by the world size",
        1 / size: "you divided by the world size once too often",
        size**2: "it was summed more than once",
        size**3: "it was summed more than once",
        -1: "the sign is reversed",
    }
    known = next((words for value, words in why.items() if abs(ratio - value) < 1e-3 * abs(value)), "")
    by = size / ratio if ratio else 0.0
    if not known and by > 1 and abs(by - round(by)) < 1e-3:
        known = f"the sum is divided by {by:.0f}, but the world size is {size}: dist.get_world_size()"
    return f"yours is {ratio:.2f} × the reference{': ' * bool(known)}{known}"


def _multiple(yours: Numbers | None, reference: Numbers) -> float | None:
    """How many times the reference it is; None if it is no multiple."""
    if yours is None or len(yours) != len(reference) or not all(map(math.isfinite, yours)):
        return None
    ratio = sum(map(mul, yours, reference)) / (sum(map(mul, reference, reference)) or 1.0)
    return ratio if close(yours, [ratio * v for v in reference]) else None


def _why_own(found: Found, number: int, rank: int, hooks: bool) -> str:
    """Why a gradient may have stayed as it was."""
    step = found[rank]["steps"][number]
    if _parameters_moved(found) == "mean":
        return PARAMETERS[hooks]
    right = [n for n in step["yours"] if close(step["yours"][n], step["reference"][n])]
    if right:
        own = "; use the parameter that the hook receives" * hooks
        return f"{', '.join(right)} {'is' if len(right) == 1 else 'are'} right, but this layer is missing{own}"
    return "nothing was exchanged" + (
        ", or the result was not put into p.grad" if not hooks else ": is the hook there?"
    )


def _apart_line(found: Found, hooks: bool) -> str:
    """What the run from different parameters shows of a function that was right from equal ones."""
    moved = _parameters_moved(found)
    if moved == "mean":
        return f"the gradients are right, but {PARAMETERS[hooks]}"
    if moved:
        return "the gradients are right, but the parameters were changed too; only the optimizer may change them"
    size = len(found)
    for rank, brought in sorted(found.items()):
        for layer, yours in brought["apart"]["yours"].items():
            columns = zip(*(f["apart"]["own"][layer] for f in found.values()), strict=True)
            if not close(yours, [sum(c) / size for c in columns]):
                return (
                    f"rank {rank}, layer {layer}: where the ranks' parameters differ, yours is not the mean of "
                    "the ranks' gradients"
                )
    return ""


def _parameters_moved(found: Found) -> str:
    """Whether the function changed parameters: "", "mean" if to their mean over the ranks, else "changed"."""
    moved = ""
    for brought in found.values():
        apart = brought["apart"]
        for layer, after in apart["after"].items():
            if not close(after, apart["before"][layer]):
                columns = zip(*(f["apart"]["before"][layer] for f in found.values()), strict=True)
                if close(after, [sum(c) / len(found) for c in columns]):
                    return "mean"
                moved = "changed"
    return moved


def close(one: Numbers | None, other: Numbers | None) -> bool:
    """Whether all numbers are finite and equal within rounding."""
    if one is None or other is None or len(one) != len(other):
        return one is other
    scale = max(map(abs, (*one, *other)), default=0.0)
    return all(map(math.isfinite, (*one, *other))) and all(
        abs(a - b) <= CLOSE * scale for a, b in zip(one, other, strict=True)
    )


def judged(name: str, hooks: bool) -> Callable[[Any], str]:
    """Run the function on all ranks, then on all but the last, and judge what they bring."""

    def judge_function(function: Callable[..., Any]) -> str:
        with grouped():
            right = EXPECTED.by_rank()
            for which, size in enumerate(world_sizes()):
                expects = {r: known for r in range(size) if (known := right[r][which])}
                line = judge(_brought(function, hooks, expects), name, hooks)
                if line != OK:
                    return f"on {counted(size, 'rank')}: {line}" if which else line
        return OK

    return judge_function


def _brought(function: Callable[..., Any], hooks: bool, right: Mapping[int, Brought]) -> Found:
    """What the ranks of a world bring, beside what is right there."""
    try:
        found = in_world(len(right), averaged, function, hooks)
    except Wrong as wrong:
        raise Wrong(f"{wrong}{_circle(wrong.__cause__)}") from wrong
    return {r: beside(right[r], found[r]) for r in right}


def beside(right: Brought, brought: Brought) -> Brought:
    """What a rank brought, with what is right there: a layer that it left out is none of its gradients."""
    if brought.get("unwritten"):
        return {"unwritten": True}
    steps: list[Gradients] = [
        {**known, "yours": _of(known["reference"], theirs["yours"])}
        for theirs, known in zip(brought["steps"], right["steps"], strict=True)
    ]
    layers, theirs = right["apart"]["before"], brought["apart"]
    own: Gradients = {"yours": _of(layers, theirs["yours"]), "after": _of(layers, theirs["after"])}
    return {"steps": steps, "apart": {**own, **right["apart"]}}


def _of(layers: Iterable[str], found: Layers) -> Layers:
    return {layer: found.get(layer) for layer in layers}


def _circle(cause: BaseException | None) -> str:
    if not isinstance(cause, RunHung):
        return ""
    return (
        "; every rank must call the same collectives, in the same order: all_reduce for every parameter, on all ranks"
    )


average_gradients = Exercise(
    "average_gradients",
    judged("average_gradients", hooks=False),
    verifies="two steps on real ranks equal one process with all shards, on all ranks and on one less",
)
attach_averaging = Exercise(
    "attach_averaging",
    judged("attach_averaging", hooks=True),
    verifies="two steps on real ranks equal one process with all shards, on all ranks and on one less",
)
