"""No healthy program is stopped or called dead, however long its ranks wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from torch.torch_version import TorchVersion

import nbddp
from nbddp.run.screen import Silent
from tests.healthy import HANG_AFTER, PROGRAMS
from tests.lessons import pool_of


@pytest.fixture(scope="module")
def pool_for() -> Iterator[Callable[[int], nbddp.Pool]]:
    """A pool of so many workers, made when a program first asks for it."""
    pools: dict[int, nbddp.Pool] = {}
    with ExitStack() as stack:

        def pool_for(world: int) -> nbddp.Pool:
            if world not in pools:
                pools[world] = stack.enter_context(pool_of(world))
            return pools[world]

        yield pool_for


HANGS_ON_OLD = ("all_gather_into_tensor of 1 GB",)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_healthy_program_is_left_alone(pool_for: Callable[[int], nbddp.Pool], name: str) -> None:
    if name in HANGS_ON_OLD and TorchVersion(torch.__version__) < (2, 7):
        pytest.skip("torch 2.6 hangs in destroy_process_group after a large collective, under torchrun too")
    if "FSDP2" in name and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("torch 2.6 has no fully_shard on CPU")
    world, program = PROGRAMS[name]
    pool = pool_for(world)
    found = pool.run_cell(program + "'done'", want_value=True, hang_after=HANG_AFTER, screen=Silent())
    assert list(found) == ["done"] * world
    assert pool.last_run is not None
    assert pool.last_run.deadlock is None
