"""Lessons' sources become the notebooks that are committed, and what a source may say is told when it is wrong."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from nbddp.figures.table import Table
from nbddp.lessons.framework import folders, run_check
from nbddp.lessons.framework.answer import Exercise, Wrong, mismatch
from nbddp.lessons.framework.on_rank import tabulate
from nbddp.lessons.framework.tables import TableExercise
from tests.lessons.answers import builder, script

build, minutes = builder(), script("minutes")
TABLES = [
    value
    for folder in folders.lessons()
    for part in sorted(folder.glob("*.py"))
    if part.stem not in ("__init__", "figure", "on_rank")
    for value in vars(import_module(f"nbddp.lessons.{folder.name}.{part.stem}")).values()
    if isinstance(value, TableExercise)
]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1\n", "the first line must begin a cell"),
        ("# %% solution\ny = 1\n", "a header has [markdown]"),
        ('# %% tags=["sloution"]\ny = 1\n', "tag 'sloution' is none of"),
        ('# %% tags=["solution", "exercise"]\ny = 1\n', "a cell has one of the tags exercise, solution"),
        ('# %% tags=["exercise"]\nx\n# %% tags=["exercise"]\ny\n', "in pairs"),
        ('# %% tags=["solution"]\nx\n', "in pairs"),
        ('# %% tags=["exercise"]\nx\n', "has no solution"),
    ],
)
def test_a_wrong_source_is_told(source: str, says: str) -> None:
    with pytest.raises(build.BadSource, match=re.escape(says)):
        build.parse(source)


# -- answers ---------------------------------------------------------------------------------


def test_an_exercise_answers_in_one_printed_line(capsys: pytest.CaptureFixture[str]) -> None:
    twice = Exercise("twice", lambda f: "ok" if f(2) == 4 else "not\ntwice", ["first", "second"])
    assert twice(lambda x: 2 * x)
    answer = twice(lambda x: x)
    assert (answer.ok, answer.line) == (False, "not twice")
    assert "without calling it: check.twice(twice)" in twice(4).line
    assert "without calling it" in twice().line
    assert capsys.readouterr().out.count("\n") == 4


def test_every_exercise_has_hints_and_every_hint_is_for_an_exercise() -> None:
    assert folders.hints().keys() == folders.defined("exercise", Exercise).keys()
    assert all(len(some) >= 3 and all(some) for some in folders.hints().values())


def test_hints_come_one_by_one_and_the_last_stays(capsys: pytest.CaptureFixture[str]) -> None:
    def judge(answer: object) -> str:
        raise Wrong("wrong")

    wrong = Exercise("wrong", judge, ["first", "second"])
    given = [wrong(print, hint=True).hint for _ in range(3)]
    assert given == ["hint 1 of 2: first", "hint 2 of 2: second", "hint 2 of 2: second"]
    assert wrong(print).hint == ""
    right = Exercise("right", lambda f: "ok", ["first"])
    assert right(print, hint=True).hint == ""
    capsys.readouterr()


HALF = TableExercise("half", [(2,), (4,)], lambda n: n // 2, {"that is the double": lambda n: 2 * n})


def test_a_table_tells_the_mistake_or_the_first_difference() -> None:
    def judged(function: object) -> str:
        return HALF.judge({0: tabulate(function, HALF.cases)})  # type: ignore[arg-type]

    assert judged(lambda n: n // 2) == "ok"
    assert judged(lambda n: 2 * n) == "half(2): expected 1, got 4; that is the double"
    assert judged(lambda n: 1) == "half(4): expected 2, got 1"
    assert judged(lambda n: n / 2) == "half(2): expected 1, got 1.0"
    assert judged(lambda n: None) == "half returned None: you have not written it yet, or it has no return statement"
    assert judged(lambda n: 1 // 0).startswith("half(2) raised ZeroDivisionError: ")
    both = {0: tabulate(lambda n: n // 2, HALF.cases), 1: tabulate(lambda n: n, HALF.cases)}
    assert "on rank 0 and is 2 on rank 1" in HALF.judge(both)


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_each_known_mistake_is_wrong_and_gets_its_own_words(table: TableExercise) -> None:
    assert table.mistakes
    for words, would in table.mistakes.items():
        outcomes = [("value", would(*case)) for case in table.cases]
        assert table.judge({0: outcomes, 1: outcomes}).endswith(f"; {words}")


def test_heads_of_a_table_stand_over_their_columns() -> None:
    html = Table(["name", "bytes"], [("a<b", 1), ("c", 22)])._repr_html_()
    assert '<th style="text-align: left">name</th><th style="text-align: right">bytes</th>' in html
    assert '<td style="text-align: left">a&lt;b</td><td style="text-align: right">1</td>' in html


def test_no_check_says_that_a_value_is_right_in_another_way_than_expected_and_got() -> None:
    assert mismatch(4, 8, "it is doubled") == "expected 4, got 8; it is doubled"
    lines = [line for path in Path(run_check.__file__).parent.rglob("*.py") for line in path.read_text().splitlines()]
    assert not [line for line in lines if re.search(r"[,;] right is|right is (\{|')", line)]
