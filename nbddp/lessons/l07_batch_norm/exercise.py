"""Lesson 07: statistics of the whole batch, and batch norm by them, forward and backward, on unequal shards.

Judged against one process with the whole batch; what a wrong answer did is found in
`nbddp.lessons.l07_batch_norm.norms`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import isnan
from typing import Any, cast

from nbddp.lessons.framework.answer import OK, Exercise, mismatch, not_written
from nbddp.lessons.framework.run_check import in_group, pool
from nbddp.lessons.l07_batch_norm import on_rank
from nbddp.lessons.l07_batch_norm.norms import (
    EPS,
    FEATURES,
    GRADIENTS,
    MEANS,
    SCALES,
    VARIANCES,
    Columns,
    Rows,
    feature,
    forward,
    gradients,
    known,
    near,
    shards_for,
    why_divisor,
    why_gradient,
    why_moment,
    why_output,
)

WAY_BACK = "check the backward of each sum: each must add up the gradients of all ranks"
ROOT = "that is the root of a negative variance; add up the counts over the ranks too"
MEAN, VARIANCE, OUTPUT, GRADIENT = "mean", "variance", "output", "gradient"


# -- statistics ------------------------------------------------------------------------------


def judge_statistics(shards: Sequence[Rows], by_rank: Mapping[int, object]) -> str:
    """The line for what each rank gives: a pair of the means and the variances of the features."""
    ranks = sorted(by_rank)
    if all(by_rank[r] is None for r in ranks):
        return not_written("batch_statistics")
    for r in ranks:
        if not _is_table(by_rank[r], 2, FEATURES):
            wanted = f"return a pair, means and variances, each of shape ({FEATURES},)"
            return f"rank {r} returned {_short(by_rank[r])}; {wanted}"
    moments = cast(Mapping[int, Sequence[Sequence[float]]], by_rank)
    for which, (name, ways) in enumerate(((MEAN, MEANS), (VARIANCE, VARIANCES))):
        right = [ways[0].of(known(feature(shards, f))[0]) for f in range(FEATURES)]
        given = [[moments[r][which][f] for r in ranks] for f in range(FEATURES)]
        for r, f in product(ranks, range(FEATURES)):
            if not near([given[f][r]], [right[f]]):
                why = why_moment(ways, shards, given) or (why_divisor(shards, given) if name == MEAN else "")
                told = _differs(given[f][r], right[f], why)
                return f"{_where(shards)}: rank {r}, {name} of feature {f}, {told}"
    return OK


def _differs(value: float, right: float, why: str) -> str:
    return mismatch(f"{right:.3f}", f"{value:.3f}", why)


def _is_table(value: Any, rows: int, columns: int) -> bool:
    return (
        isinstance(value, list) and len(value) == rows
        and all(isinstance(row, list) and len(row) == columns for row in value)
        and all(type(v) in (int, float) for row in value for v in row)
    )  # fmt: skip


def _short(value: Any) -> str:
    """Plain data with few digits, cut off where it is long."""
    if type(value) is float:
        return f"{value:.3f}"
    if isinstance(value, list):
        some = ", ".join(map(_short, value[:4]))
        return f"[{some}{', …' if len(value) > 4 else ''}]"
    return repr(value)


def _where(shards: Sequence[Rows]) -> str:
    sizes = [str(len(s)) for s in shards]
    return f"shards of {', '.join(sizes[:-1])} and {sizes[-1]} samples"


# -- both ------------------------------------------------------------------------------------


def judge_norm(shards: Sequence[Rows], weights: Sequence[Rows], by_rank: Mapping[int, tuple[Any, Any]]) -> str:
    """The line for what each rank gives: outputs and gradients, of its shard's shape."""
    ranks = sorted(by_rank)
    if all(by_rank[r][0] is None for r in ranks):
        return not_written("sync_batch_norm")
    for r in ranks:
        if not _is_table(by_rank[r][0], len(shards[r]), FEATURES):
            return f"rank {r}: return a tensor of the shape of x, ({len(shards[r])}, {FEATURES})"
    outputs = [by_rank[r][0] for r in ranks]
    right = [forward(feature(shards, f), MEANS[0], VARIANCES[0], SCALES[0][1]) for f in range(FEATURES)]
    line = _line(shards, OUTPUT, outputs, right, lambda x, y: why_output(x, y) or ROOT * _any_nan(y))
    if line != OK:
        return line
    for r in ranks:
        if by_rank[r][1] is None:
            return f"outputs are right; rank {r} does not return a tensor, so there is no backward"
        if not _is_table(by_rank[r][1], len(shards[r]), FEATURES):
            return (
                f"outputs are right; rank {r}, x gets no gradient: is it detached, or computed under torch.no_grad()?"
            )
    right = [gradients(feature(shards, f), feature(weights, f), GRADIENTS[0]) for f in range(FEATURES)]
    given = [by_rank[r][1] for r in ranks]
    return _line(shards, GRADIENT, given, right, lambda x, g: why_gradient(x, weights, g) or WAY_BACK)


def _line(
    shards: Sequence[Rows], name: str, given: Sequence[Rows], right: Sequence[Columns],
    why: Callable[[Sequence[Rows], Sequence[Rows]], str],
) -> str:  # fmt: skip
    """OK, or the first number that differs and the reason. right: by feature, then by rank."""
    for r, f in product(range(len(shards)), range(FEATURES)):
        for i, row in enumerate(given[r]):
            if not near([row[f]], [right[f][r][i]]):
                told = _differs(row[f], right[f][r][i], why(shards, given))
                head = "outputs are right; " if name == GRADIENT else f"{_where(shards)}: "
                return f"{head}rank {r}, {name} of sample {i}, feature {f}: {told}"
    return OK


def _any_nan(by_rank: Sequence[Rows]) -> bool:
    return any(isnan(v) for rows in by_rank for row in rows for v in row)


def statistics_line(function: Any) -> str:
    """Run the learner's statistics on all ranks and judge them."""
    shards = shards_for(pool(at_least=2).world_size)
    return judge_statistics(shards, in_group(on_rank.statistics, function, shards))


def norm_line(function: Any) -> str:
    """Run the learner's batch norm on all ranks, forward and backward, and judge both."""
    n = pool(at_least=2).world_size
    shards, weights = shards_for(n), shards_for(n, seed=1)
    found = in_group(on_rank.normalised, function, shards, weights, EPS)
    return judge_norm(shards, weights, found)


batch_statistics = Exercise(
    "batch_statistics",
    statistics_line,
    verifies="mean and variance of unequal shards equal those of the whole batch, on every rank",
)
sync_batch_norm = Exercise(
    "sync_batch_norm",
    norm_line,
    verifies="outputs and gradients of unequal shards equal those of one process with the whole batch",
)
