"""Questions of the lessons: asked before the answer is seen, kept, and compared with what came, which is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from nbddp.figures.widget_support import WIDGET
from nbddp.lessons.framework.prompt import FAILED, OPEN
from nbddp.teach import predict
from tests.kernels import Kernel
from tests.lessons.answers import SOURCES, builder, text_of

ASK = re.compile(r"predict\.(\w+)\(")


# -- in the lessons --------------------------------------------------------------------------


def cells_asked_about(source: Path) -> list[tuple[Any, list[str]]]:
    """Each cell of the solved lesson that questions are asked before, with the questions' names."""
    saved = nbformat.read(builder().places(source)[1], 4)
    code = [c for c in saved.cells if c.cell_type == "code"]
    found = []
    for i, cell in enumerate(code):
        if "prediction" in cell.metadata.get("tags", ()):
            after = next(c for c in code[i + 1 :] if "prediction" not in c.metadata.get("tags", ()))
            found.append((after, ASK.findall(cell.source)))
    return found


def asked(source: Path) -> dict[str, str]:
    """By question, the text of the next cell's outputs in the solved lesson."""
    return {name: text_of(cell.outputs) for cell, names in cells_asked_about(source) for name in names}


def test_every_question_is_asked_once_and_what_came_is_what_the_solved_lesson_shows() -> None:
    lessons = [asked(source) for source in SOURCES]
    names = [name for lesson in lessons for name in lesson]
    assert sorted(names) == sorted(set(dir(predict)) - {"summary"})
    for lesson in lessons:
        for name, text in lesson.items():
            question = getattr(predict, name).question
            assert re.search(question.seen, text), f"{name}: {question.seen!r} is not in\n{text}"


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_question_names_the_failure_of_its_cell_if_that_cell_fails_on_purpose(source: Path) -> None:
    for cell, names in cells_asked_about(source):
        failures = [f"{o.ename}: {o.evalue}" for o in cell.outputs if o.output_type == "error"]
        for question in (getattr(predict, name).question for name in names):
            assert bool(question.fails) == bool(failures), question.name
            assert all(re.search(question.fails, failure) for failure in failures), failures
            assert not question.meant(NameError("name 'dits' is not defined"))
            assert not question.meant(SyntaxError("invalid syntax"))


# -- in a notebook ---------------------------------------------------------------------------


@pytest.fixture
def asking(kernel: Kernel) -> Kernel:
    assert kernel.run("from nbddp.teach import predict").ok
    return kernel


def test_a_prediction_is_compared_below_the_next_cells_output(asking: Kernel) -> None:
    shown = asking.run("predict.local_rank(0)")
    assert "You predicted: 0. Now run the next cell." in shown.displays[0]["text/plain"]
    after = asking.run("print('rank 2 │ local rank 0')")
    assert after.text() == (
        "rank 2 │ local rank 0\nWhat is rank 2's local rank?\n✓ 0, as you predicted\n"
        "It is the first process on node 1: local ranks begin again at 0 on every node.\n"
    )
    updates = [c for _, kind, c in after.messages if kind == "update_display_data"]
    assert "✓ 0, as you predicted" in updates[-1]["data"]["text/plain"], "the saved question has it too"
    assert "predicted" not in asking.run("1").text()


def test_a_prediction_is_compared_below_what_the_ranks_print(four: Kernel) -> None:
    four.run("from nbddp.teach import predict\npredict.world_size(2)")
    assert four.run("%%ddp\nprint('here')").text() == (
        "ranks 0–3 │ here\nThe same two nodes with two GPUs per process. What is the world size?\n"
        "✗ 4; you predicted 2\n"
        "The world size counts processes, not GPUs.\n"
    )


def test_who_predicts_nothing_is_shown_nothing(asking: Kernel) -> None:
    shown = asking.run("predict.local_rank()")
    assert {"text/plain", "text/html", WIDGET} <= set(shown.displays[0])
    after = asking.run("print('seen')")
    assert after.text() == "seen\n"
    updates = [c for _, kind, c in after.messages if kind == "update_display_data"]
    said = updates[-1]["data"]["text/plain"]
    assert OPEN in said
    assert "predict.local_rank.compare()" in said
    assert "first process on node 1" not in said


WIDGETS = """
import ipywidgets
def of(kind): return [w for w in ipywidgets.widgets.widget._instances.values() if isinstance(w, kind)]
field = of(ipywidgets.{field})[-1]
button = [b for b in of(ipywidgets.Button) if b.description == "Show what came"][-1]
said = lambda: " ".join(w.value for w in of(ipywidgets.HTML))
"""


def test_a_question_that_was_not_answered_can_still_be_answered(asking: Kernel) -> None:
    asking.run("predict.local_rank()")
    asking.run("print('seen')")
    assert asking.run(WIDGETS.format(field="Text")).ok
    assert asking.run("print(field.disabled, button.layout.display == '')").text() == "False True\n"
    late = asking.run("field.value = '0'\nprint(field.disabled, button.layout.display, said())").text()
    assert late.startswith("True none")
    assert "✓ 0; after the cell you answered 0" in late
    table = asking.run("predict.summary()").displays[0]["text/plain"]
    assert re.search(r"What is rank 2's local rank\? +0 \(after the cell\) +0 +✗", table), table


def test_a_question_that_was_not_answered_can_be_shown(asking: Kernel) -> None:
    asking.run("predict.world_size()")
    asking.run("print('seen')")
    assert asking.run(WIDGETS.format(field="RadioButtons" if predict.world_size.question.options else "Text")).ok
    shown = asking.run("button.click()\nprint(field.disabled, button.layout.display, said())").text()
    assert shown.startswith("True none")
    assert f"What came: {predict.world_size.question.came}" in shown


def test_a_cell_that_could_not_be_read_shows_nothing_yet_and_a_second_question_waits_too(asking: Kernel) -> None:
    asking.run("predict.own_gpu(6)")
    asking.run("predict.world_size('8')")
    assert asking.run("1 +").text() == f"{FAILED}\n"
    assert asking.run("1").text().count("; you predicted") == 2


@pytest.mark.parametrize("slip", ["print(rnak)", "print('rank 2'", "predict.world_size('nonsense')"])
def test_after_a_cell_that_fails_by_a_slip_the_question_stays_and_a_line_says_why(asking: Kernel, slip: str) -> None:
    asking.run("predict.local_rank(1)")
    failed = asking.run(slip)
    assert not failed.ok
    assert failed.text() == f"{FAILED}\n"
    assert "✗ 0; you predicted 1" in asking.run("print('rank 2 │ local rank 0')").text()


def test_who_predicts_nothing_is_shown_nothing_after_a_failure_either(asking: Kernel) -> None:
    asking.run("predict.local_rank()")
    assert asking.run("rnak").text() == ""


def test_a_cell_that_fails_on_purpose_shows_the_answer_and_a_slip_in_it_does_not(four: Kernel) -> None:
    four.run("from nbddp.teach import predict\npredict.ranks_that_fail('none')")
    assert FAILED in four.run("%%ddp\nprint(ranks)").text()
    shown = four.run("%%ddp\nimport os\nif os.environ['RANK'] != '3':\n    secret = 42\nprint(secret)")
    assert not shown.ok
    assert "✗ rank 3; you predicted none" in shown.text()


def test_an_explorers_answer_is_behind_a_button(asking: Kernel) -> None:
    asking.run("predict.global_rank_as_device('all of them')")
    shown = asking.run("1")
    (button,) = [d for d in shown.displays if WIDGET in d and "compare()" in d["text/plain"]]
    assert "ranks 0–3" not in shown.text() + button["text/plain"]
    assert "✗ ranks 0–3; you predicted all of them" in asking.run("predict.global_rank_as_device.compare()").text()


def test_the_summary_has_what_was_predicted(asking: Kernel) -> None:
    asking.run("predict.local_rank(1)")
    asking.run("pass")
    table = asking.run("predict.summary()").displays[0]["text/plain"]
    assert re.search(r"What is rank 2's local rank\? +1 +0 +✗", table), table


def test_an_answer_that_is_no_option_is_refused_and_the_next_cell_goes_on(asking: Kernel) -> None:
    refused = asking.run("predict.global_rank_as_device('rank 9')")
    assert "Choose one of 'all of them'" in refused.evalue
    assert asking.run("print(1)").text() == "1\n"
