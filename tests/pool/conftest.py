"""Fixtures of tests on real ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nbddp.pool.pool import WorkerPool
from tests.unit.test_output import Shown


@pytest.fixture
def shows(pool: WorkerPool) -> Callable[..., list[str]]:
    """Runs a cell; the rows of its block, and what is said after it."""

    def run(code: str, cell: int = 1) -> list[str]:
        screen = Shown()
        pool.run_cell(f"import os, sys, time\n{code}", cell=cell, screen=screen)
        return screen.rows

    return run
