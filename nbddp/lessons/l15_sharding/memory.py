"""Lesson 15's first exercise: the bytes that a rank holds at each stage of ZeRO, a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbddp.lessons.framework.answer import Exercise
from nbddp.lessons.framework.on_rank import tabulate
from nbddp.lessons.framework.run_check import on_ranks
from nbddp.lessons.framework.tables import Case, Outcome, TableExercise
from nbddp.lessons.l15_sharding.simulation import share

CLOSE = 1e-6  # relative
SIZES = ((1_024_000, 4), (7_500_000_000, 64), (1_024_000, 1), (350_000_000, 8))  # parameters, ranks
BYTES_CASES = tuple((stage, parameters, ranks) for parameters, ranks in SIZES for stage in (0, 1, 2, 3))


def right_bytes(stage: int, parameters: int, ranks: int) -> int:
    """Of Adam in mixed precision; the cases divide evenly."""
    return round(share(stage, parameters, ranks).total)


def _as(own: tuple[int, int, int], sharded_from: tuple[int, int, int] = (3, 2, 1)) -> Any:
    """What comes of other bytes per parameter (parameters, gradients, optimizer), or sharding from other stages on."""

    def would(stage: int, parameters: int, ranks: int) -> int:
        parts = (b * parameters // (ranks if stage >= s else 1) for b, s in zip(own, sharded_from, strict=True))
        return sum(parts)

    return would


UNITS = {1e-9: "GB", 1e-6: "MB", 2.0**-30: "GiB", 2.0**-20: "MiB", 8: "bits"}


def why_not_so_many(case: Case, answer: Any) -> str:
    """Which stage's bytes were given instead, in another unit, or that it is not a number."""
    _, parameters, ranks = case
    if isinstance(answer, list):
        return "return one number of bytes: the sum of the parts"
    if type(answer) not in (int, float):
        return "return a number of bytes"
    other = [s for s in (0, 1, 2, 3) if right_bytes(s, parameters, ranks) == answer]
    unit = next((u for c, u in UNITS.items() if abs(answer - c * right_bytes(*case)) <= CLOSE * abs(answer)), "")
    return f"those are the bytes of stage {other[0]}" if other else unit and f"that is in {unit}; return bytes"


BYTES = TableExercise(
    "bytes_per_rank",
    BYTES_CASES,
    right_bytes,
    {
        "mixed precision keeps a float32 copy of the parameters for the optimizer as well: 4 + 4 + 4 bytes, not 8": (
            _as((2, 2, 8))
        ),
        "that is float32 throughout, 4 + 4 + 8; in mixed precision it is 2 + 2 + 12: the sum is the same, but a "
        "stage shards other bytes": _as((4, 4, 8)),
        "that shards everything at every stage; stage 0 shards nothing, stage 1 the optimizer's state alone": (
            _as((2, 2, 12), (0, 0, 0))
        ),
        "that shards everything from stage 1 on; stage 1 shards the optimizer's state alone": _as(
            (2, 2, 12), (1, 1, 1)
        ),
        "that is one stage too far: stage 1 shards the optimizer's state alone, stage 2 gradients too, stage 3 "
        "parameters too": _as((2, 2, 12), (2, 1, 0)),
        "that is one stage behind: stage 1 shards the optimizer's state already": _as((2, 2, 12), (4, 3, 2)),
        "stage 3 shards the parameters too": _as((2, 2, 12), (4, 2, 1)),
        "the order is wrong: first the optimizer's state, then gradients, then parameters": _as((2, 2, 12), (1, 2, 3)),
        "that shards nothing at any stage": _as((2, 2, 12), (4, 4, 4)),
        "that shards one part at each stage; a stage shards what the one before it does, and one part more": (
            lambda stage, parameters, ranks: sum(
                b * parameters // (ranks if stage == s else 1) for b, s in ((2, 3), (2, 2), (12, 1))
            )
        ),
        "the number of ranks is an argument; that is always 64": lambda stage, parameters, ranks: right_bytes(
            stage, parameters, 64
        ),
        "the float32 copy is among the optimizer's 12 bytes already; a parameter and its gradient take 2 each": _as(
            (4, 4, 12)
        ),
        "that is the optimizer's state alone; parameters and gradients are held too": _as((0, 0, 12)),
        "those are the parameters alone": lambda stage, parameters, ranks: 2 * parameters,
        "that is what all ranks hold together; return what one rank holds": (
            lambda stage, parameters, ranks: ranks * right_bytes(stage, parameters, ranks)
        ),
    },
    why_not_so_many,
)


def whole(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Floats that are whole numbers count as these."""
    return [(k, int(v)) if isinstance(v, float) and v.is_integer() else (k, v) for k, v in outcomes]


def _judge_bytes(function: Any) -> str:
    found = on_ranks(tabulate, function, BYTES_CASES)
    return BYTES.judge({r: whole(found[r]) for r in found.ranks})


bytes_per_rank = Exercise(
    "bytes_per_rank",
    _judge_bytes,
    verifies="bytes at all four stages, for four models on 1 to 64 ranks",
)
