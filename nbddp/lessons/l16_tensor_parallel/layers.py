"""Lesson 16's first exercise: a column-split layer, then a row-split one, on all ranks and on one rank fewer.

Outputs and gradients must be those of one process with whole weights. What a wrong answer did is found in how its
numbers compare with those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbddp.launch.topology import counted
from nbddp.lessons.framework.answer import OK, Exercise, mismatch, not_written
from nbddp.lessons.framework.closeness import is_near
from nbddp.lessons.framework.run_check import Reference, grouped, in_both_worlds, in_world
from nbddp.lessons.l16_tensor_parallel import on_rank
from nbddp.lessons.l16_tensor_parallel.on_rank import HIDDEN, PARTS, Computed, Expected, Rows, computed, expected

CLOSE = 1e-4
RIGHT = Reference(expected)
TWICE = (
    "the backward of your sum all-reduces again; every rank computes the whole loss, so pass the gradient of the sum "
    "on unchanged"
)


def parts_of(right: Expected, rank: int, world: int) -> on_rank.Gradients:
    """The gradients that a rank should have: all of x's, its rows of up's, its columns of down's."""
    each = -(-HIDDEN // world)
    mine = slice(rank * each, (rank + 1) * each)
    return {"x": right["x"], "up": right["up"][mine], "down": [row[mine] for row in right["down"]]}


def judge_layers(right: Expected, by_rank: Mapping[int, Computed]) -> str:
    """The line for what each rank brings from `computed`."""
    ranks = sorted(by_rank)
    if all(by_rank[r]["output"] is None for r in ranks):
        return not_written("column_then_row")
    for r in ranks:
        line = _output(right["output"], r, by_rank, len(ranks))
        if line:
            return line
    for r in ranks:
        if not by_rank[r]["graph"]:
            return f"the outputs are right; rank {r}'s output has no graph, so there is no backward: is it detached?"
    for name in reversed(PARTS):
        for r in ranks:
            line = _gradient(name, parts_of(right, r, len(ranks))[name], r, by_rank, right)
            if line:
                return f"the outputs are right; {line}"
    return OK


def _output(right: Rows, r: int, by_rank: Mapping[int, Computed], world: int) -> str:
    found, shape = by_rank[r]["output"], by_rank[r]["shape"]
    size = [len(right), len(right[0])]
    if shape != size:
        what = f"a tensor of shape {tuple(shape)}" if shape is not None else repr(found)[:60]
        return f"rank {r} returned {what}; return an output of shape {tuple(size)}, the same on all ranks"
    if near(found, right):
        return ""
    every = [by_rank[k]["output"] for k in sorted(by_rank)]
    if near(found, _times(right, 1 / world)):
        why = "that is the sum divided by the world size; the parts are added up, not averaged"
    elif all(by_rank[k]["shape"] == size for k in by_rank) and near(_sum(every), right):
        why = "each rank has its own part of a sum; all-reduce the parts"
    elif near(found, _times(right, world)):
        why = "that is the world size × the sum: it was added up twice"
    else:
        why = "compare relu(x @ up.T) @ down.T on this rank's parts, added up over the ranks after the second layer"
    return f"rank {r}: output[0][0]: {mismatch(f'{right[0][0]:.3f}', f'{found[0][0]:.3f}', why)}"


def _gradient(name: on_rank.Name, right: Rows, r: int, by_rank: Mapping[int, Computed], whole: Expected) -> str:
    found, world = by_rank[r][name], len(by_rank)
    if found is None:
        return f"rank {r}: {name} has no gradient. Was it detached, or computed with under torch.no_grad()?"
    if near(found, right):
        return ""
    every = [part for k in sorted(by_rank) if (part := by_rank[k][name]) is not None]
    if near(found, _times(right, world)):
        why = TWICE
    elif near(found, _times(right, 1 / world)):
        why = "that is the gradient divided by the world size; nothing is averaged here"
    elif name == "x" and near(_sum(every), right):
        why = "that is only this rank's part; every rank's columns used x, so all-reduce its gradient in backward"
    elif name == "x" and near(_sum(every), _times(right, world)):
        why = f"that is only this rank's part, and the world size × too large: {TWICE}"
    else:
        why = "follow backward: the sum passes its gradient on unchanged, and x's gradient is added up over the ranks"
    at = next((i, j) for i, row in enumerate(right) for j, v in enumerate(row) if not abs(found[i][j] - v) <= CLOSE)
    value, wanted = found[at[0]][at[1]], right[at[0]][at[1]]
    told = mismatch(f"{wanted:.3f}", f"{value:.3f}", why)
    return f"rank {r}: in the gradient of {name}[{at[0]}][{at[1]}], {told}"


def near(some: Rows, other: Rows) -> bool:
    """Whether two tables have the same numbers."""
    return all(is_near(a, b, CLOSE) for x, y in zip(some, other, strict=True) for a, b in zip(x, y, strict=True))


def _sum(tables: Sequence[Rows]) -> Rows:
    return [[sum(cell) for cell in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)]


def _times(table: Rows, by: float) -> Rows:
    return [[by * v for v in row] for row in table]


def _judge(function: Any) -> str:
    with grouped():
        right = RIGHT.by_rank()[0]
        return in_both_worlds(
            "column_then_row",
            lambda world: counted(world, "rank"),
            lambda world, screen: judge_layers(right, in_world(world, computed, function, screen=screen)),
        )


column_then_row = Exercise(
    "column_then_row",
    _judge,
    verifies="outputs and all gradients are those of one process with whole weights, on all ranks and one rank fewer",
)
