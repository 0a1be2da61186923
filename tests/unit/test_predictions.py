"""Questions of the lessons: asked before the answer is seen, kept, and compared with what came, which is true."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from nbddp.errors import BadInput
from nbddp.lessons.framework import folders
from nbddp.lessons.framework.prompt import AskedQuestion
from nbddp.lessons.framework.question import EXAMPLE, Question, questions
from nbddp.teach import check, explore, predict
from tests.lessons.answers import SOURCES

TYPED = Question("size", "What is the world size?", came="4")
WORD = Question("backend", "Which backend is used?", came="gloo")
CHOSEN = Question("who", "Which ranks start?", came="rank 0", options=("rank 0", "all of them"), because="It is alone.")


def test_answers_are_read_as_they_are_meant() -> None:
    assert CHOSEN.read(" Rank  0 ") == "rank 0"
    assert TYPED.read(4) == "4"
    assert TYPED.met("4.0")
    assert not TYPED.met("5")
    assert WORD.met(WORD.read(" GLOO "))
    assert WORD.read("8") == "8", "text questions stay free"
    assert TYPED.compared("5") == "What is the world size?\n✗ 4; you predicted 5"
    assert CHOSEN.compared("rank 0") == "Which ranks start?\n✓ rank 0, as you predicted\nIt is alone."


@pytest.mark.parametrize(
    ("question", "answer", "says"),
    [
        (CHOSEN, "rank 1", "predict.who('rank 1'): Choose one of 'rank 0', 'all of them'"),
        (TYPED, " ", "Type a number, for example 8"),
        (TYPED, "nonsense", "predict.size('nonsense'): Type a number, for example 8"),
        (TYPED, "4 ranks", "Type a number, for example 8"),
        (TYPED, "nan", "Type a number, for example 8"),
        (WORD, " ", "Type a word"),
    ],
)
def test_an_answer_that_cannot_be_meant_is_refused(question: Question, answer: str, says: str) -> None:
    with pytest.raises(BadInput, match=re.escape(says)):
        question.read(answer)


def test_what_came_is_one_of_the_options() -> None:
    with pytest.raises(ValueError, match="none of the options"):
        Question("who", "Which?", came="rank 2", options=("rank 0",))


def test_a_question_that_is_not_there_is_an_error_that_names_near_ones() -> None:
    with pytest.raises(AttributeError, match="no question 'local_rnk'; did you mean local_rank"):
        predict.local_rnk  # noqa: B018
    assert "local_rank" in dir(predict)
    with pytest.raises(AttributeError, match="check has no exercise 'gpu_of'; did you mean gpus_of"):
        check.gpu_of  # noqa: B018
    with pytest.raises(AttributeError, match="explore has no explorer 'layouts'; did you mean layout"):
        explore.layouts  # noqa: B018


@pytest.mark.parametrize("module", [check, explore, predict], ids=lambda m: m.__name__)
def test_tab_offers_what_a_module_is_for_and_no_more(module: ModuleType) -> None:
    assert dir(module) == sorted(module.__all__)


def test_every_lesson_has_a_folder_with_questions() -> None:
    found = [folder.name[1:3] for folder in folders.lessons()]
    assert found == [source.name[:2] for source in SOURCES]
    assert all(questions(folder / "predictions.ini") for folder in folders.lessons())


def test_what_a_renamed_lesson_leaves_is_no_lesson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LESSONS", tmp_path)
    for made in ("l02_new", "l01_first", "framework"):
        (tmp_path / made).mkdir()
        (tmp_path / made / "__init__.py").touch()
    (tmp_path / "l02_old" / "__pycache__").mkdir(parents=True)
    assert [folder.name for folder in folders.lessons()] == ["l01_first", "l02_new"]


def test_a_section_of_a_file_is_a_question(tmp_path: Path) -> None:
    (tmp_path / "some.ini").write_text(
        "[who]\nasks = Who?\noptions = rank 0 | a = b\ncame = a = b\nexplored = yes\nseen = %d\\n"
    )
    assert questions(tmp_path / "some.ini") == [
        Question("who", "Who?", came="a = b", options=("rank 0", "a = b"), explored=True, seen=r"%d\n")
    ]


def test_a_word_typed_where_a_number_is_asked_for_is_answered_and_the_question_stays_open() -> None:
    made = AskedQuestion(TYPED)
    _, _, field, _, said = made.widget().children
    field.value = "nonsense"
    assert (made.answer, field.disabled) == ("", False)
    assert "Type a number, for example 8." in said.value
    field.value = "3"
    assert made.answer == "3"
    assert "Type" not in said.value
    field.value = "three"
    assert "Type a number, for example 8.<br>You predicted: 3." in said.value, "the last number is kept"
    free = AskedQuestion(WORD)
    _, _, field, _, said = free.widget().children
    field.value = "nonsense"
    assert free.answer == "nonsense"


def test_the_example_of_a_number_answers_no_question() -> None:
    assert str(EXAMPLE) not in {getattr(predict, name).question.came for name in set(dir(predict)) - {"summary"}}
