"""What libraries look at to know where they are, and what they do that a cell must not."""

from __future__ import annotations

from pathlib import Path

import pytest

import nbddp
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.screens import Hearing


def test_nobody_types_at_a_rank(pool: WorkerPool) -> None:
    """By this Lightning and Fabric refuse `strategy="ddp"` in notebooks."""
    code = "import sys\n[hasattr(sys, name) for name in ('ps1', 'ps2', 'ps3')], sys.flags.interactive"
    assert list(pool.run_cell(code, want_value=True, screen=NullScreen())) == [([False] * 3, 0)] * 2


LAUNCHES = """
import torch.multiprocessing
def work(i): pass
__name__ = {name!r}
try: exec("def launch(): mp.start_processes(work, nprocs=1, start_method='fork')\\nlaunch()",
          {{"__name__": __name__, "mp": torch.multiprocessing, "work": work}})
finally: __name__ = "__main__"
"""


def test_a_launcher_that_would_start_ranks_within_ranks_is_told_so(pool: WorkerPool) -> None:
    with pytest.raises(nbddp.WorkerFailed, match=r'already runs on every rank.*use strategy="ddp"'):
        pool.run_cell(
            LAUNCHES.format(name="lightning.pytorch.strategies.launchers.multiprocessing"), screen=NullScreen()
        )


def test_a_programs_own_processes_are_its_own(pool: WorkerPool) -> None:
    pool.run_cell(LAUNCHES.format(name="__main__"), screen=NullScreen())


# -- what libraries keep of a group -------------------------------------------------------------

HOLDS = """
import os, sys, types, torch, torch.distributed as dist
for name in ("deepspeed", "deepspeed.utils", "deepspeed.utils.groups", "deepspeed.comm", "deepspeed.comm.comm"):
    sys.modules.setdefault(name, types.ModuleType(name))
groups, comm = sys.modules["deepspeed.utils.groups"], sys.modules["deepspeed.comm.comm"]
if not dist.is_initialized(): dist.init_process_group("gloo")
groups._WORLD_GROUP, groups._ALL_TO_ALL_GROUP, groups.size = dist.group.WORLD, {0: dist.new_group()}, 1
comm.cdb = object()
"""
HELD = "groups._WORLD_GROUP is None, groups._ALL_TO_ALL_GROUP == {}, groups.size, comm.cdb is None"
ENDS = {
    "fails": "if os.environ['RANK'] == '1': raise ValueError('on purpose')\ndist.barrier()",
    "destroys it": "dist.destroy_process_group()",
}


def end_group(pool: WorkerPool, code: str, how: str) -> None:
    if how == "fails":
        with pytest.raises(nbddp.WorkerFailed, match="on purpose"):
            pool.run_cell(code + ENDS[how], screen=NullScreen())
    else:
        pool.run_cell(code + ENDS[how], screen=NullScreen())


@pytest.mark.parametrize("how", ENDS)
def test_deepspeed_keeps_no_group_that_is_gone(pool: WorkerPool, how: str) -> None:
    pool.run_cell(HOLDS, screen=NullScreen())
    assert pool.run_cell(HELD, want_value=True, screen=NullScreen())[0] == (False, False, 1, False), (
        "a living one is kept"
    )
    end_group(pool, HOLDS, how)
    found = pool.run_cell(HELD, want_value=True, screen=NullScreen())
    assert list(found) == [(True, True, 1, True)] * 2


def test_deepspeed_keeps_no_group_that_another_replaces(pool: WorkerPool) -> None:
    pool.run_cell(HOLDS, screen=NullScreen())
    code = f"dist.init_process_group('gloo')\n{HELD}"
    assert list(pool.run_cell(code, want_value=True, screen=NullScreen())) == [(True, True, 1, True)] * 2


ACCELERATE = """
import os, sys, types, torch.distributed as dist
class PartialState:
    _shared_state = {}
    def __init__(self):
        self.__dict__ = self._shared_state
        if not self._shared_state:
            dist.init_process_group("gloo")
            self.backend, self.num_processes, self.process_index = "gloo", dist.get_world_size(), dist.get_rank()
class AcceleratorState:
    @staticmethod
    def _reset_state(reset_partial_state):
        assert reset_partial_state
        PartialState._shared_state.clear()
class GradientState:
    @staticmethod
    def _reset_state(): pass
class Accelerator:
    def __init__(self): self.state = PartialState()
    def reduce(self): dist.barrier(); return self.state.num_processes
module, state = types.ModuleType("accelerate"), types.ModuleType("accelerate.state")
module.Accelerator, module.PartialState = Accelerator, PartialState
state.PartialState, state.AcceleratorState, state.GradientState = PartialState, AcceleratorState, GradientState
sys.modules.update({"accelerate": module, "accelerate.state": state})
"""


@pytest.mark.parametrize("how", ENDS)
def test_accelerate_begins_anew_when_its_group_is_gone(pool: WorkerPool, how: str) -> None:
    pool.run_cell(
        "import torch.distributed as dist\nif dist.is_initialized(): dist.destroy_process_group()", screen=NullScreen()
    )
    pool.run_cell(ACCELERATE, screen=NullScreen())
    for _ in range(2):  # the group of an earlier cell is used as long as it lives
        assert list(pool.run_cell("made = Accelerator(); made.reduce()", want_value=True, screen=NullScreen())) == [
            2,
            2,
        ]
    end_group(pool, "", how)
    rank = pool.run_cell("made.state.process_index", want_value=True, screen=NullScreen())
    assert list(rank) == [0, 1], "an object that is left over still knows its rank"
    for code in ("Accelerator().reduce()", "PartialState().num_processes"):
        assert list(pool.run_cell(code, want_value=True, screen=NullScreen())) == [2, 2]
    pool.run_cell("for name in ('accelerate', 'accelerate.state'): del sys.modules[name]", screen=NullScreen())


def test_accelerate_begins_anew_in_the_cell_that_has_ended_its_group(pool: WorkerPool) -> None:
    pool.run_cell(
        "import torch.distributed as dist\nif dist.is_initialized(): dist.destroy_process_group()", screen=NullScreen()
    )
    twice = "Accelerator().reduce(); dist.destroy_process_group(); Accelerator().reduce()"
    assert list(pool.run_cell(ACCELERATE + twice, want_value=True, screen=NullScreen())) == [2, 2]
    pool.run_cell("for name in ('accelerate', 'accelerate.state'): del sys.modules[name]", screen=NullScreen())


def test_whose_group_is_gone_is_said(pool: WorkerPool, tmp_path: Path) -> None:
    folder = tmp_path / "site-packages" / "holder"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import torch.distributed as dist\ndef wait(): dist.barrier()\n")
    pool.run_cell(
        "import torch.distributed as dist\nif dist.is_initialized(): dist.destroy_process_group()", screen=NullScreen()
    )
    with pytest.raises(nbddp.WorkerFailed) as theirs:
        pool.run_cell(
            f"import sys; sys.path.insert(0, {str(folder.parent)!r})\nimport holder; holder.wait()", screen=NullScreen()
        )
    assert "create holder's objects again, or run the cell with --fresh" in theirs.value.report
    with pytest.raises(nbddp.WorkerFailed) as own:
        pool.run_cell("sys.path.pop(0); dist.barrier()", screen=NullScreen())
    assert "--fresh" not in own.value.report


def test_a_module_of_the_programs_own_that_is_called_as_a_library_is_left_alone(pool: WorkerPool) -> None:
    code = """import sys, types, torch.distributed as dist
sys.modules.update(dict.fromkeys(("accelerate", "accelerate.state", "deepspeed"), types.ModuleType("accelerate")))"""
    pool.run_cell(code, screen=NullScreen())
    screen = Hearing()
    pool.run_cell("dist.init_process_group('gloo')\ndist.destroy_process_group()", screen=screen)
    pool.run_cell("[sys.modules.pop(name) for name in ('accelerate', 'accelerate.state', 'deepspeed')]", screen=screen)
    assert screen.said == []
