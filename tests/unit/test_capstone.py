"""Lesson 18: a training that is marked by a rubric, on real ranks, and how the rubric is shown and graded."""

from __future__ import annotations

import pytest

from nbddp.grading import gradebook
from nbddp.lessons.framework.rubric import RubricItem, line_of, lines_of, none_met
from nbddp.lessons.l18_capstone.figure import TOP
from nbddp.lessons.l18_capstone.simulation import (
    ALONE,
    EARLY,
    LATE_RATE,
    MEANS,
    MISTAKES,
    NO_OPTIMIZER,
    NO_STEP,
    NONE,
    OWN_LOSS,
    RANKS,
    STEPS,
    WHOLE,
    CapstoneTraining,
    away,
    simulate_training,
)


def test_a_rubric_is_one_line_and_comes_apart_again() -> None:
    some = [RubricItem("this", 2), RubricItem("that", 3, "a | b")]
    assert line_of(some) == "2 of 5 points | ✓ 2/2 this | ✗ 0/3 that: a / b"
    assert lines_of(line_of(some)) == ["✓ 2/2 this", "✗ 0/3 that: a / b", "2 of 5 points"]
    assert line_of(some[:1]) == "ok"
    assert lines_of("rank 1 raised ValueError: a | b") == []
    assert [m.got for m in none_met(some, "why")] == [0, 0]


def test_marks_show_a_rubrics_sum_in_the_table() -> None:
    row = gradebook.GradeRow(
        "bo", "capstone", "no", "bo.py", line_of([RubricItem("this", 2), RubricItem("that", 3, "it is not")])
    )
    assert row.lines == ["✓ 2/2 this", "✗ 0/3 that: it is not", "2 of 5 points"]
    assert gradebook.rubrics([row]) == "bo, capstone: 2 of 5 points\n    ✓ 2/2 this\n    ✗ 0/3 that: it is not"
    assert gradebook.frequent([row]).rows[0][-1] == "2 of 5 points"


# -- the explorer ----------------------------------------------------------------------------


def all_of(mistake: str, ranks: int = 4, fails: int = 35) -> CapstoneTraining:
    return simulate_training(ranks, mistake, fails, 2 * STEPS)


def unmet(made: CapstoneTraining) -> list[str]:
    return [line.asks.partition(" to ")[0] for line in made.lines() if line.met is False]


@pytest.mark.parametrize("ranks", range(1, RANKS + 1))
@pytest.mark.parametrize("fails", [0, 1, 10, 11, 35, STEPS])
def test_without_a_mistake_all_lines_are_met(ranks: int, fails: int) -> None:
    made = all_of(NONE, ranks, fails)
    assert unmet(made) == []
    assert made.verdict() == "all lines are met"
    assert made.resumed == ((fails - 1) // 10 * 10 + 1 if fails else None)
    kept = [s.number for s in made.steps if s.again or s.number + 1 not in made.lost]
    assert kept == list(range(STEPS))
    assert len(made.steps) == STEPS + len(made.lost)
    assert made.steps[0].loss == pytest.approx(made.right[0].loss, rel=0.01), "the mean of equal shares"


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        (ALONE, ["same weights on all ranks", "as one process", "logging", "evaluation", "checkpoint"]),
        (WHOLE, ["as one process"]),
        (EARLY, ["as one process", "clipping"]),
        (LATE_RATE, ["checkpoint"]),
        (OWN_LOSS, ["logging"]),
        (MEANS, ["evaluation"]),
        (NO_OPTIMIZER, ["checkpoint"]),
        (NO_STEP, ["checkpoint"]),
    ],
)
def test_each_mistake_is_found_by_its_lines(mistake: str, found: list[str]) -> None:
    assert unmet(all_of(mistake)) == found


def test_what_the_questions_and_the_text_of_the_explorer_say() -> None:
    shown = [mistake for mistake in MISTAKES[1:] if unmet(all_of(mistake, ranks=1))]
    assert (len(MISTAKES), shown) == (9, [LATE_RATE, NO_OPTIMIZER, NO_STEP])
    assert [m for m in MISTAKES if unmet(all_of(m)) and not unmet(all_of(m, fails=0))] == shown
    assert unmet(all_of(EARLY, ranks=3)) == ["clipping"]
    whole = all_of(WHOLE)
    assert away(whole.steps[-1].weights[0], whole.right[-1].weights[0], whole.right[0].weights[0]) < 0.01
    for mistake in MISTAKES:
        for ranks in range(1, RANKS + 1):
            for fails in (1, 2, 11, 35):
                made = all_of(mistake, ranks, fails)
                assert made.steps[-1].loss < 0.6 * made.steps[0].loss, "it trains, and its loss falls"
                assert max(max(s.loss, s.said) for s in (*made.steps, *made.right)) < TOP, "all is drawn where it is"
                others = [line for line in unmet(made) if line != "checkpoint"]
                assert others == unmet(all_of(mistake, ranks, 0)), "a failure changes no other line"
    lost = all_of(NO_STEP)
    assert (lost.lost, lost.story().rpartition("; ")[2]) == ([31, 32, 33, 34], "steps 1–30 are taken twice")
