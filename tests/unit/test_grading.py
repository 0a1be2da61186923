"""A folder of submissions is graded by the checks that learners had: from pytest, from the command line, in Python."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from nbddp.errors import BadInput
from nbddp.grading import gradebook
from nbddp.grading.definitions import Handed
from nbddp.lessons.l05_averaging_gradients import exercise as averaging_gradients_exercise
from nbddp.lessons.l07_batch_norm import exercise as batch_norm_exercise
from nbddp.teach import grade


def test_submissions_that_python_would_import_are_not_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(RIGHT)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput, match="start from another folder and give the path of this one"):
        grade.found(tmp_path)


# -- attacks -----------------------------------------------------------------------------------------

RIGHT = "def place_of(rank, n):\n    return divmod(rank, n)\n"


@pytest.mark.parametrize(
    ("cell", "made"),
    [("=1+1", "'=1+1"), ("+1", "'+1"), ("-1", "'-1"), ("@a", "'@a"), (" =1", "' =1"), ("\t=1", "'\t=1"),
     ("\uff1d1", "'\uff1d1"), ("'=1", "''=1"), ("'a", "'a"), ("a=1", "a=1"), ("", "")],
)  # fmt: skip
def test_a_cell_is_no_formula_and_can_be_read_back(cell: str, made: str) -> None:
    assert gradebook.defused(cell) == made
    assert gradebook.fused(made) == cell


@pytest.mark.parametrize(
    ("text", "made"),
    [("a\x1b[31mb\x1b[0m", "ab"), ("a\r\n\tb", "a b"), ("a\x9b2Jb", "a2Jb"), ("\ud800", "\\ud800"), ("a\u202eb", "ab"),
     ("é – ü", "é – ü"), ("x" * 3000, "x" * 2400 + "…")],
)  # fmt: skip
def test_text_does_no_harm_to_who_reads_it(text: str, made: str) -> None:
    assert gradebook.clean(text) == made


def test_every_learner_has_a_file_name_that_systems_take() -> None:
    first = gradebook.feedback_name("\u6f22" * 85)
    assert len(os.fsencode(first)) < 255
    assert gradebook.feedback_name("\u6f22" * 85, [first]) == f"{first[:-4]} (2).txt"


def test_an_answer_may_leave_out_nothing_that_is_compared() -> None:
    right = {
        "steps": [{"own": {"w": [1.0]}, "reference": {"w": [2.0]}}] * 2,
        "apart": {"own": {"w": [1.0]}, "before": {"w": [3.0]}},
    }
    empty = {"steps": [{"yours": {}}] * 2, "apart": {"yours": {}, "after": {}}}
    assert (
        averaging_gradients_exercise.judge(
            {0: averaging_gradients_exercise.beside(right, empty)}, "average_gradients", hooks=False
        )
        != "ok"
    )
    assert (
        batch_norm_exercise.judge_norm(
            [[[0.0] * 2]] * 2, [[[0.0] * 2]] * 2, {0: ([[0.0] * 2], []), 1: ([[0.0] * 2], [])}
        )
        != "ok"
    )


def test_a_learners_object_is_none_where_it_is_judged() -> None:
    handed = Handed([("cell 1", "class A:\n    x = 1")], "A", is_class=True)
    with pytest.raises(TypeError, match="only ranks may call it"):
        handed()
    assert pickle.loads(pickle.dumps(handed)).x == 1
