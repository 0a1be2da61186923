"""Lesson 10: attempts on paper against closed forms, and checkpoints judged by what a resumed training does."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from nbddp.lessons.l10_restarts.figure import draw_restarts
from nbddp.lessons.l10_restarts.simulation import LOST, simulate_restarts, training
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.teach import predict
from tests.lessons.answers import cells


def test_what_came_of_the_lessons_questions_is_what_happens() -> None:
    four, eight = simulate_restarts(4, 7, 4), simulate_restarts(8, 7, 4)
    assert (four.finished, eight.finished) == (True, False)
    assert predict.better_interval.question.came == "four steps"
    (first, second) = training(12, 5, [7, 12]).attempts
    assert [s for s in range(12) if first.kind(s) == LOST] == [5, 6]
    assert predict.steps_done_twice.question.came == "5 and 6"
    assert str(second.start) == predict.second_attempt_starts.question.came


def test_the_figure_counts_as_the_words_do() -> None:
    made = simulate_restarts(4, 7, 4)
    shown = draw_restarts(made)
    texts = [t.get_text() for t in shown.figure.axes[0].texts]
    assert texts.count("×") == 4
    assert texts.count("7 done, 3 lost") == 4
    assert "4 done" in texts
    assert shown.words == made.describe()


def test_torchrun_reads_the_lessons_elastic_line() -> None:
    from torch.distributed.run import get_args_parser

    (text,) = [c.text for c in cells("10") if "--nnodes=1:4" in c.text]
    line = text.split("```")[1].replace("\\\n", " ")
    found = get_args_parser().parse_args(shlex.split(line)[1:])
    assert (found.nnodes, found.nproc_per_node, found.max_restarts) == ("1:4", "8", 3)
    assert (found.rdzv_id, found.rdzv_backend, found.rdzv_endpoint) == ("run7", "c10d", "node0:29400")


# -- the lesson's claim ----------------------------------------------------------------------


@pytest.mark.more
def test_a_killed_run_equals_the_undisturbed_one(tmp_path: Path) -> None:
    """The lesson's own program, with a real SIGKILL; without the optimizer in the checkpoint it does not."""
    (program,) = [c.text for c in cells("10") if "killed_at=7" in c.text]
    program = program.partition("\n")[2].replace("dist.destroy_process_group()", "dist.destroy_process_group()\nsame")
    forgetful = program.replace('        optimizer.load_state_dict(state["optimizer"])\n', "")
    assert forgetful != program
    with WorkerPool(nproc=4) as pool:
        for name, source, wanted in (("whole", program, True), ("forgetful", forgetful, False)):
            (tmp_path / name).mkdir()
            found = pool.run_cell(
                source, argv=[str(tmp_path / name)], max_restarts=1, want_value=True, screen=NullScreen()
            )
            assert list(found) == [wanted] * 4
            assert (tmp_path / name / "checkpoint.pt").exists()
