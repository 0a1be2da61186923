"""Lesson 09: programs played against the judgement of real deadlocks, and the checks of its two exercises."""

from __future__ import annotations

import pytest

import nbddp
from nbddp.lessons.l09_hangs.exercise import missing
from nbddp.lessons.l09_hangs.figure import draw_collectives
from nbddp.lessons.l09_hangs.simulation import Action, log, play
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.teach import check, explore
from tests.kernels import Kernel
from tests.lessons.answers import cells, solution
from tests.unit.test_hangs import MANY

REAL = """
import torch, torch.distributed as dist
if not dist.is_initialized(): dist.init_process_group()
rank = dist.get_rank()
t = torch.ones(4)
"""


@pytest.mark.parametrize(
    ("code", "programs"),
    [
        ("\ndist.all_reduce(t)\nif rank == 0: dist.broadcast(t, 0)",
         [[Action("all_reduce", 7, "float[4]"), *[Action("broadcast", 8, "float[4]")] * (r == 0)] for r in (0, 1)]),
        ("\n(dist.barrier if rank else dist.all_reduce)(*[t] * (1 - rank))",
         [[Action("all_reduce", 7, "float[4]")], [Action("barrier", 7)]]),
        ("\ndist.recv(t, 1 - rank)\ndist.send(t, 1 - rank)",
         [[Action("recv", 7, peer=1 - r), Action("send", 8, peer=1 - r)] for r in (0, 1)]),
    ],
    ids=["alone", "another", "crossed"],
)  # fmt: skip
def test_the_played_deadlock_is_worded_as_the_real_one(
    pool: WorkerPool, code: str, programs: list[list[Action]]
) -> None:
    with pytest.raises(nbddp.RunHung) as caught:
        pool.run_cell(REAL + code, hang_after=0.5, screen=NullScreen())
    played = play(programs, MANY)
    assert played.deadlock is not None
    assert str(caught.value) == f"deadlock: {'; '.join(played.deadlock.words)}"


UNDER_DETAIL = """
dist.destroy_process_group()
dist.set_debug_level(dist.DebugLevel.DETAIL)
dist.init_process_group()
dist.set_debug_level(dist.DebugLevel.OFF)
try:
    {}
    said = ""
except RuntimeError as error:
    said = str(error)
dist.destroy_process_group()
said
"""


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("dist.all_reduce(t, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)", False),
        ("dist.all_reduce(t.int() if rank else t)", True),
        ("dist.all_reduce(t[:2] if rank else t)", True),
        ("dist.broadcast(t, 0) if rank else dist.all_reduce(t)", True),
    ],
    ids=["operation", "type", "shape", "collective"],
)
def test_what_torchs_debug_mode_tells_and_what_not(pool: WorkerPool, call: str, told: bool) -> None:
    """The lesson's table."""
    said = pool.run_cell(REAL + UNDER_DETAIL.format(call), want_value=True, screen=NullScreen())
    assert ["Detected mismatch between collectives" in text for text in said] == [told, told]


def test_the_figure_shows_calls_and_arrows() -> None:
    shown = draw_collectives(log("one batch fewer on the last rank", 4, 3))
    table, graph = shown.figure.axes
    texts = [t.get_text() for t in table.texts]
    assert texts.count("backward #3") == 3
    assert texts.count("for rank 3") == 3
    assert sum(type(p).__name__ == "FancyArrowPatch" for p in graph.patches) == 3
    first, second = (explore.collectives().show(**s).words for s in explore.collectives().settings)
    assert "no deadlock" in first
    assert "deadlock: ranks 0–2 wait in backward" in second


def test_the_demonstrations_end_in_the_same_deadlock_when_they_are_run_twice(four: Kernel) -> None:
    code = [c.text for c in cells("09") if c.kind == "code"]
    (start,) = [text for text in code if text.startswith("%%ddp --nproc 4")]
    demonstrations = [text.replace("--hang-after 2", "--hang-after 0.5") for text in code if "--hang-after 2" in text]
    assert len(demonstrations) == 2
    assert four.run(start).ok
    for text in demonstrations:
        first, second = (four.run(text) for _ in range(2))
        assert "deadlock: " in first.evalue
        assert first.evalue == second.evalue


def test_the_example_in_the_lesson_is_right() -> None:
    prose = "\n".join(c.text for c in cells("09") if c.kind == "markdown")
    assert '`{0: ["broadcast", "all_reduce"], 1: ["broadcast"]}`' in prose
    assert "`(2, [1])`" in prose
    assert missing({0: ["broadcast", "all_reduce"], 1: ["broadcast"]}) == [2, [1]]


def test_the_check_leaves_the_process_group_as_it_was(pool: WorkerPool) -> None:
    is_there = "import torch.distributed as dist\ndist.is_initialized()"
    pool.run_cell("import torch.distributed as dist\nif dist.is_initialized(): dist.destroy_process_group()",
                  screen=NullScreen())  # fmt: skip
    assert check.train_uneven(solution("09", "train_uneven"))
    assert list(pool.run_cell(is_there, want_value=True, screen=NullScreen())) == [False, False]
    pool.run_cell("dist.init_process_group()", screen=NullScreen())
    assert check.train_uneven(solution("09", "train_uneven"))
    assert list(pool.run_cell(is_there, want_value=True, screen=NullScreen())) == [True, True]
