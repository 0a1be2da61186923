"""The quiet line of ordinary runs: what is said, and that doubt of any kind keeps it silent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nbddp.capabilities.sanitizer.hints import Look, RankHints, SeenOptimizer, line
from nbddp.protocol.codec import from_json, to_json


def looks(rank: int, gradients: Any = None, parameters: Any = None) -> tuple[Look, ...]:
    """Of three steps; what differs by rank if nothing is said."""
    sums, sets = ((2.0 + rank,) if gradients is None else gradients, rank if parameters is None else parameters)
    return tuple(Look(step, sums, sets if step > 1 else 0) for step in (1, 2, 3))


def bare(rank: int) -> SeenOptimizer:
    return SeenOptimizer(1, steps=3, bare=3, past=3, quiet=True, bare_looks=looks(rank), left=rank)


def beside(rank: int) -> SeenOptimizer:
    return SeenOptimizer(
        1, steps=3, buckets=3, left=0, beside=("h.weight", "h.bias"), shapes=7, beside_looks=looks(rank),
        beside_left=rank,
    )  # fmt: skip


def stepped(rank: int) -> SeenOptimizer:
    return SeenOptimizer(1, steps=3 + rank, buckets=4, left=rank)


def said(*seen: SeenOptimizer, world: int = 2) -> str:
    return line({rank: from_json(RankHints, to_json(RankHints(world, (each,)))) for rank, each in enumerate(seen)})


def test_each_finding_has_its_words() -> None:
    past = "DDP's forward was not called before 3 of 3 optimizer steps, so no gradients were exchanged"
    assert said(bare(0), bare(1)) == f"{past}, and its replicas differ; %%ddp --sanitize shows where"
    called = [replace(bare(rank), past=1) for rank in (0, 1)]
    assert said(*called).startswith("DDP exchanged no gradients before 3 of 3 optimizer steps, and its replicas differ")
    assert "moves 2 parameters that DDP does not exchange (h.weight, h.bias), and they differ" in said(
        beside(0), beside(1)
    )
    one = [replace(beside(rank), beside=("h.bias",)) for rank in (0, 1)]
    assert "moves a parameter that DDP does not exchange (h.bias), and it differs" in said(*one)
    assert "optimizer steps (3 on rank 0, 4 on rank 1), and" in said(stepped(0), stepped(1))


def test_the_most_serious_one_alone_is_said() -> None:
    found = {rank: RankHints(2, (stepped(rank), beside(rank), bare(rank))) for rank in (0, 1)}
    assert line(found).startswith("DDP's forward was not called")
    found = {rank: RankHints(2, (stepped(rank), beside(rank))) for rank in (0, 1)}
    assert line(found, "--sanitize").startswith("DDP's optimizer also moves")


@pytest.mark.parametrize("make", [bare, beside, stepped])
@pytest.mark.parametrize(
    "change",
    [
        {"likeness": 2},  # another optimizer
        {"left": None, "beside_left": None, "bare_looks": looks(1)[:1], "beside_looks": looks(1)[:1]},
        {"left": 0, "beside_left": 0},  # equal in the end
        {"quiet": False, "shapes": 8, "buckets": 5},  # other collectives, other parameters, Join
        {"steps": 9, "bare": 2, "buckets": 0},
    ],
)
def test_what_is_not_sure_on_one_rank_is_not_said(make: Any, change: dict[str, Any]) -> None:
    assert said(make(0), make(1))
    assert said(make(0), replace(make(1), **change)) == ""


@pytest.mark.parametrize("make", [bare, beside])
def test_equal_gradients_or_parameters_at_one_look_keep_it_silent(make: Any) -> None:
    for other in (looks(1, gradients=(2.0001,)), looks(1, parameters=0), (*looks(1)[:2], looks(0)[2])):
        changed = replace(make(1), bare_looks=other, beside_looks=other)
        assert said(make(0), changed) == ""
    broken = looks(1, gradients=(float("nan"),))
    assert said(make(0), replace(make(1), bare_looks=broken, beside_looks=broken)) == ""


def test_ranks_that_did_not_say_anything_keep_it_silent() -> None:
    assert said(bare(0), bare(1), world=3) == ""
    assert said(bare(0), world=1) == ""
    assert line({0: RankHints(2, (bare(0),)), 1: RankHints(2, (bare(1), bare(1)))}) == ""
