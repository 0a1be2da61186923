"""Lesson 16's second exercise: which ranks see the same samples as a rank, and which hold the same shard. A table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbddp.lessons.framework.answer import Exercise
from nbddp.lessons.framework.run_check import judged_by
from nbddp.lessons.framework.tables import Case, TableExercise

MESHES = ((2, 3), (2, 2), (4, 2), (1, 4), (3, 1))  # data × tensor; the first is not square
CASES = tuple((rank, data, tensor) for data, tensor in MESHES for rank in range(data * tensor))
Pair = list[list[int]]


def right_groups(rank: int, data: int, tensor: int) -> Pair:
    first = rank // tensor * tensor
    return [list(range(first, first + tensor)), list(range(rank % tensor, data * tensor, tensor))]


def _turned(rank: int, data: int, tensor: int) -> Pair:
    """On a mesh whose data ranks are side by side."""
    first = rank // data * data
    return [list(range(rank % data, data * tensor, data)), list(range(first, first + data))]


def _of(change: Callable[[Pair, int, int], Any]) -> Any:
    return lambda rank, data, tensor: change(right_groups(rank, data, tensor), rank, tensor)


MISTAKES = {
    "the two lists are swapped: first the ranks that see the same samples, then those with the same shard": (
        _of(lambda p, r, t: p[::-1])
    ),
    "that mesh has data ranks side by side; here tensor ranks are: rank = data index × tensor + tensor index": _turned,
    "that mesh has data ranks side by side, and the two lists are swapped": (
        lambda rank, data, tensor: _turned(rank, data, tensor)[::-1]
    ),
    "a rank is a member of both of its groups": _of(lambda p, r, t: [[k for k in g if k != r] for g in p]),
    "those are coordinates; return the ranks of the two groups": _of(lambda p, r, t: [r // t, r % t]),
    "those are the groups of rank 0; return the groups of the given rank": (
        lambda rank, data, tensor: right_groups(0, data, tensor)
    ),
}


def why_not(case: Case, answer: Any) -> str:
    """What is wrong with a pair that no known mistake gives."""
    if not (isinstance(answer, list) and len(answer) == 2 and all(isinstance(g, list) for g in answer)):
        return "return a pair of lists of ranks"
    right = right_groups(*case)
    if [sorted(g) for g in answer] == right:
        return "list the ranks in ascending order"
    wrong = [name for name, a, b in zip(("same samples", "same shard"), answer, right, strict=True) if a != b]
    return f"check the list of the {wrong[0]}" if len(wrong) == 1 else ""


GROUPS = TableExercise("groups_of", CASES, right_groups, MISTAKES, why_not)
groups_of = Exercise(
    "groups_of",
    judged_by(GROUPS),
    verifies="both groups of every rank, on five meshes",
)
