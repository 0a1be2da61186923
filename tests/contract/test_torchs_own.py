"""torch's own tests of torch.distributed, a cell each on a standing pool, end as they end under torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nbddp.errors import NbddpError
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.contract import torchs_own

NPROC = torchs_own.RANKS
SOURCE = Path(torchs_own.__file__)


def in_a_cell(pool: WorkerPool, name: str, folder: str) -> list[str]:
    """How a test ended on each rank; or how its cell did, where that is another way."""
    try:
        return list(pool.run_cell(f"outcome({name!r}, {folder!r})", want_value=True, screen=NullScreen()))
    except NbddpError as e:
        return [f"the cell ended: {e}"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("nth", [9, pytest.param(1, marks=pytest.mark.torchrun)])
def test_torchs_own_tests_end_as_under_torchrun(pool: WorkerPool, tmp_path: Path, nth: int) -> None:
    """Each ninth one always, all by -m torchrun."""
    known = json.loads(SOURCE.with_suffix(".json").read_text()).get(torchs_own.facts())
    (tmp_path / "torchrun").mkdir()
    expected = known or torchs_own.under_torchrun(str(tmp_path / "torchrun"))
    folder = str(tmp_path / "cells")
    pool.run_cell(SOURCE.read_text(), screen=NullScreen())
    names = pool.run_cell(f"names({folder!r})", want_value=True, screen=NullScreen())[0]
    assert names == list(expected)
    found = {name: in_a_cell(pool, name, folder) for name in names[::nth]}
    assert {n: (ranks, expected[n]) for n, ranks in found.items() if ranks != expected[n]} == {}
    assert sum(ranks == ["ok"] * NPROC for ranks in found.values()) > 60 // nth, "and not because all are skipped"
