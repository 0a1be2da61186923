"""Every exercise on real ranks: a wrong answer gets its line, a right one passes, an unwritten one is reported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nbddp.launch.options import LaunchSpec
from nbddp.lessons.framework.answer import Answer
from nbddp.pool.pool import WorkerPool
from nbddp.teach import check
from tests.lessons.answers import defined, exercise, solution
from tests.lessons.tables import Table, tables

TABLES = [(lesson, table) for lesson, of in tables().items() for table in of]
WRONG = [
    pytest.param(
        table.nproc, table, row, id=f"{table.name}: {table.says(row)[0]}",
        marks=[getattr(pytest.mark, table.marker)] if number % table.every else [],
    )
    for _, table in TABLES
    for number, row in enumerate(table.wrong)
]  # fmt: skip
RIGHT = [
    pytest.param(
        table.nproc, table, row, id=f"{table.name}-{number}",
        marks=[getattr(pytest.mark, table.marker)] if table.slow and number else [],
    )
    for _, table in TABLES
    for number, row in enumerate(table.right)
]  # fmt: skip


@pytest.fixture(scope="module")
def both(_lessons_pools: dict[int, WorkerPool]) -> dict[int, WorkerPool]:
    for nproc in (2, 4):
        _lessons_pools[nproc].ensure(LaunchSpec(nproc=nproc, fresh=True))
    return _lessons_pools


@pytest.fixture
def pool(request: pytest.FixtureRequest, both: dict[int, WorkerPool]) -> Iterator[WorkerPool]:
    """The pool of as many ranks as the parameter says."""
    with check.on(both[request.param]) as made:
        yield made


def checked(table: Table, handed_in: Any) -> Answer:
    answer: Answer = getattr(check, table.name)(handed_in)
    return answer


@pytest.mark.every(3, "mutants")
@pytest.mark.parametrize(("pool", "table", "row"), WRONG, indirect=["pool"])
def test_a_wrong_answer_gets_its_line(pool: WorkerPool, table: Table, row: str) -> None:
    answer = checked(table, defined(table.source(row), table.name))
    assert not answer.ok
    for says in table.says(row):
        assert says in answer.line
    assert "\n" not in answer.line


@pytest.mark.every(3, "mutants")
@pytest.mark.parametrize(("pool", "table", "row"), RIGHT, indirect=["pool"])
def test_a_right_answer_passes_however_it_is_written(pool: WorkerPool, table: Table, row: str) -> None:
    answer = checked(table, defined(table.source(row), table.name))
    assert answer.ok, answer.line


@pytest.mark.parametrize(
    ("pool", "lesson", "table"),
    [pytest.param(table.nproc, lesson, table, id=table.name) for lesson, table in TABLES],
    indirect=["pool"],
)
def test_the_lessons_solution_passes_and_its_exercise_does_not(pool: WorkerPool, lesson: str, table: Table) -> None:
    pool.push({"kept": 41})
    answer = checked(table, solution(lesson, table.name))
    assert answer.ok, answer.line
    assert table.verified in answer.verified
    unwritten = checked(table, exercise(lesson, table.name))
    assert not unwritten.ok
    assert table.unwritten in unwritten.line
    assert set(pool.pull(["kept"])["kept"]) == {41}, "a check leaves the names on the ranks"


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize(
    ("lesson", "name"),
    [("13", "accumulate"), ("13", "token_weighted_backward"), ("14", "clip_global_norm"), ("14", "step_together")],
)
def test_two_ranks_are_enough(pool: WorkerPool, lesson: str, name: str) -> None:
    assert getattr(check, name)(solution(lesson, name))


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize(("lesson", "name"), [("03", "by_rank"), ("04", "ring_all_reduce"), ("17", "run_stage")])
def test_a_pool_with_too_few_ranks_is_told_what_to_start(pool: WorkerPool, lesson: str, name: str) -> None:
    line = getattr(check, name)(solution(lesson, name)).line
    assert line == "this check needs 4 ranks and the pool has 2; %ddp start --nproc 4 makes them"


def test_every_exercise_has_a_table() -> None:
    exercises = {name for name, value in vars(check).items() if isinstance(value, check.Exercise)}
    assert {table.name for _, table in TABLES} == exercises
