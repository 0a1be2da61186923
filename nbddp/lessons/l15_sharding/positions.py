"""Lesson 15's third exercise: a rank's samples in the rest of an epoch, when training resumes on another world size.

A way is right if all ranks together read the rest once, and each step reads the next samples. Then the count of samples
is a position that the next checkpoint can hold, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbddp.lessons.framework.answer import OK, Exercise
from nbddp.lessons.framework.run_check import tabulated
from nbddp.lessons.framework.tables import Outcome, call, depends, nothing, raised, unwritten

NAME = "rest_of_epoch"
ORDERS = {n: [(7 * i + 3) % n + 100 for i in range(n)] for n in (16, 13, 10)}  # 7 divides none of them
QUESTIONS = (
    (16, 8, 2),
    (16, 6, 4),
    (16, 0, 4),
    (13, 7, 3),
    (10, 7, 4),
    (16, 16, 2),
    (13, 5, 1),
)  # samples, seen, ranks
CASES = tuple((ORDERS[n], seen, rank, world) for n, seen, world in QUESTIONS for rank in range(world))
Rule = Callable[[Sequence[int], int, int, int], list[int]]


def _block(order: Sequence[int], seen: int, rank: int, world: int) -> list[int]:
    rest = order[seen:]
    size = -(-len(rest) // world)
    return list(rest[rank * size : (rank + 1) * size])


def _padded(order: Sequence[int], seen: int, rank: int, world: int) -> list[int]:
    rest = list(order[seen:])
    lacking = -len(rest) % world
    return (rest + (rest * world)[:lacking])[rank::world]


RULES: Mapping[str, Rule] = {
    "seen counts the samples of all ranks together, not those of each rank": lambda o, s, r, w: list(o[r::w][s:]),
    "that is right only if the world size divides seen: first remove the read samples, then share out the rest": (
        lambda o, s, r, w: list(o[r::w][s // w :])
    ),
    "that rounds up if the world size does not divide seen: first remove the read samples, then share out the rest": (
        lambda o, s, r, w: list(o[r::w][-(-s // w) :])
    ),
    "that restarts the epoch; remove the first `seen` samples of order": lambda o, s, r, w: list(o[r::w]),
    "every rank reads all remaining samples; share them out": lambda o, s, r, w: list(o[s:]),
    "those are positions in order; return the samples at these positions": lambda o, s, r, w: list(
        range(s + r, len(o), w)
    ),
    "those samples were read already": lambda o, s, r, w: list(o[:s][r::w]),
    "each rank has a block: in the middle of a block, one number cannot describe what has been read; assign the "
    "samples to the ranks in turn": _block,
    "some samples are read twice so that all ranks have the same number, as DistributedSampler does; "
    "do not pad": _padded,
    "the last samples are not read if the world size does not divide their number": lambda o, s, r, w: list(
        o[s : s + (len(o) - s) // w * w][r::w]
    ),
}


def judge_positions(outcomes: Sequence[Outcome]) -> str:
    """The line for the outcome of each of CASES."""
    early = unwritten(NAME, outcomes)
    if early:
        return early
    for case, (kind, value) in zip(CASES, outcomes, strict=True):
        if kind != "value":
            return f"{_call(case)} {raised(value)}"
        if not isinstance(value, list) or not all(type(v) is int for v in value):
            return f"{_call(case)} is {value!r}; {nothing(value) or 'return a list of samples'}"
    table = {_key(case): list(value) for case, (_, value) in zip(CASES, outcomes, strict=True)}
    known = next((w for w, rule in RULES.items() if all(table[_key(c)] == rule(*c) for c in CASES)), "")
    for question in QUESTIONS:
        line = _fails(question, [table[(*question, r)] for r in range(question[2])])
        if line:
            return line + f": {known}" * bool(known)
    return OK


def _key(case: tuple[Any, ...]) -> tuple[int, int, int, int]:
    return len(case[0]), case[1], case[3], case[2]


def _call(case: tuple[Any, ...]) -> str:
    return call(NAME, case).replace(repr(case[0]), "order", 1)


def _fails(question: tuple[int, int, int], parts: Sequence[Sequence[int]]) -> str:
    """What is wrong with what the ranks read; empty if nothing is."""
    n, seen, world = question
    order, where = ORDERS[n], f"{n} samples, {seen} of them seen, {world} rank{'s' * (world != 1)}"
    given = [v for part in parts for v in part]
    strange = [v for v in given if v not in order]
    if strange:
        return f"{where}: {strange[0]} is not in order, which has {order[0]}, {order[1]}, …"
    again = sum(v in order[:seen] for v in given)
    if again:
        return f"{where}: {again} of the seen samples {'is' if again == 1 else 'are'} read again"
    twice = len(given) - len(set(given))
    if twice:
        return f"{where}: {twice} too many are read, some samples more than once"
    missing = n - seen - len(given)
    if missing:
        return f"{where}: {missing} of the {n - seen} remaining samples {'is' if missing == 1 else 'are'} not read"
    for k in range(max(map(len, parts), default=0)):
        row = [part[k] for part in parts if k < len(part)]
        due = order[seen + k * world : seen + (k + 1) * world]
        if sorted(row) != sorted(due):
            return f"{where}: the ranks' samples number {k} are {_listed(row)}, the next in order are {_listed(due)}"
    return ""


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) if values else "nothing"


def _judge(found: Mapping[int, Sequence[Outcome]]) -> str:
    return depends(NAME, CASES, found) or judge_positions(found[min(found)])


rest_of_epoch = Exercise(
    NAME,
    tabulated(CASES, _judge),
    verifies="each remaining sample is read once and in order, on 1 to 4 ranks",
)
