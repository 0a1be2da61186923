"""Healthy programs that look odd (`tests/data/odd.txt`): no finding of `--sanitize`, and no line without it."""

from __future__ import annotations

import pytest

from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.places import ROOT
from tests.pool.silent import HELPERS, RUN, define, programs
from tests.pool.test_hints import said

ODD = {each.name: each.body for each in programs(ROOT / "tests/data/odd.txt")}
SETTINGS = (
    "torch.set_default_dtype(torch.float32); torch.set_float32_matmul_precision('highest')\n"
    "torch.use_deterministic_algorithms(False)\n"
)


@pytest.fixture(scope="module")
def ready(pool: WorkerPool) -> WorkerPool:
    pool.run_cell(HELPERS, cell=1, screen=NullScreen())
    return pool


@pytest.mark.every(8)
@pytest.mark.parametrize("name", ODD)
def test_a_healthy_program_that_looks_odd_is_not_accused(ready: WorkerPool, name: str) -> None:
    define(ready, ODD[name], name)
    code = SETTINGS + RUN.format(name=name, bad=False)
    ready.run_cell(code, cell=3, sanitize=True, screen=NullScreen())
    found = ready.findings()
    assert not found, str(found)
    assert "recording stopped" not in str(found)
    assert said(ready, code) == []
