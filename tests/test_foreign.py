"""What libraries look at to know where they are, and what they do that a cell must not."""

from __future__ import annotations

import pytest

import nbddp
from nbddp.run.screen import Silent


def test_nobody_types_at_a_rank(pool: nbddp.Pool) -> None:
    """By this Lightning and Fabric refuse `strategy="ddp"` in notebooks."""
    code = "import sys\n[hasattr(sys, name) for name in ('ps1', 'ps2', 'ps3')], sys.flags.interactive"
    assert list(pool.run_cell(code, want_value=True, screen=Silent())) == [([False] * 3, 0)] * 2


LAUNCHES = """
import torch.multiprocessing
def work(i): pass
__name__ = {name!r}
try: exec("def launch(): mp.start_processes(work, nprocs=1, start_method='fork')\\nlaunch()",
          {{"__name__": __name__, "mp": torch.multiprocessing, "work": work}})
finally: __name__ = "__main__"
"""


def test_a_launcher_that_would_start_ranks_within_ranks_is_told_so(pool: nbddp.Pool) -> None:
    with pytest.raises(nbddp.WorkerFailed, match=r'already runs on every rank.*use strategy="ddp"'):
        pool.run_cell(LAUNCHES.format(name="lightning.pytorch.strategies.launchers.multiprocessing"), screen=Silent())


def test_a_programs_own_processes_are_its_own(pool: nbddp.Pool) -> None:
    pool.run_cell(LAUNCHES.format(name="__main__"), screen=Silent())
