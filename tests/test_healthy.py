"""No healthy program is stopped or called dead, however long its ranks wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import nbddp
from nbddp.run.screen import Silent
from tests.healthy import HANG_AFTER, PROGRAMS
from tests.lessons import pool_of


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, nbddp.Pool]]:
    with pool_of(2) as two, pool_of(4) as four:
        yield {2: two, 4: four}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_healthy_program_is_left_alone(pools: dict[int, nbddp.Pool], name: str) -> None:
    world, program = PROGRAMS[name]
    pool = pools[world]
    found = pool.run_cell(program + "'done'", want_value=True, hang_after=HANG_AFTER, screen=Silent())
    assert list(found) == ["done"] * world
    assert pool.last_run is not None
    assert pool.last_run.deadlock is None
