"""Lesson 17: schedules against closed forms, and the checks of its two exercises on paper and on real ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.lessons.l17_pipelines.exercise import PIPELINES, judge_schedule
from nbddp.lessons.l17_pipelines.figure import draw_pipeline
from nbddp.lessons.l17_pipelines.simulation import (
    GPIPE,
    ONE_F_ONE_B,
    SCHEDULES,
    TICKS,
    bubble,
    gpipe,
    listed,
    most_held,
    one_f_one_b,
    run,
    simulate_pipeline,
)
from nbddp.teach import explore

stages, micro_batches = st.integers(1, 6), st.integers(1, 12)


# -- the explorer ----------------------------------------------------------------------------


@given(p=stages, m=micro_batches, schedule=st.sampled_from(list(SCHEDULES)), back=st.integers(1, 3))
def test_the_bubble_is_the_closed_form_under_both_schedules(p: int, m: int, schedule: str, back: int) -> None:
    made = run([SCHEDULES[schedule](s, p, m) for s in range(p)], {"F": 1, "B": back})
    assert not made.stuck
    assert made.ticks == (m + p - 1) * (1 + back)
    assert made.idle() == pytest.approx(bubble(p, m))


@given(p=stages, m=micro_batches)
def test_gpipe_holds_all_micro_batches_and_1f1b_no_more_than_stages_follow(p: int, m: int) -> None:
    assert [most_held(gpipe(s, p, m)) for s in range(p)] == [m] * p
    assert [most_held(one_f_one_b(s, p, m)) for s in range(p)] == [min(p - s, m) for s in range(p)]
    last = simulate_pipeline(p, m, ONE_F_ONE_B, 999)
    assert [last.most(s) for s in range(p)] == [min(p - s, m) for s in range(p)]


def test_what_the_questions_and_the_text_say() -> None:
    assert bubble(4, 1) == 0.75
    assert next(m for m in range(1, 20) if bubble(4, m) <= 0.25) == 9
    assert "bubble 75.0%" in simulate_pipeline(4, 1, GPIPE, 99).describe()
    assert "bubble 25.0%" in simulate_pipeline(4, 9, GPIPE, 99).describe()
    assert simulate_pipeline(4, 8, GPIPE, 99).run.idle() == simulate_pipeline(4, 8, ONE_F_ONE_B, 99).run.idle()


def test_words_follow_the_ticks() -> None:
    assert simulate_pipeline(2, 2, GPIPE, 4).describe().splitlines() == [
        "GPipe: 2 stages, 2 micro-batches",
        "stage 0: idle, holds 2 · F0–F1",
        "stage 1: B0, holds 2 · F0–F1 B0",
        "after 4 ticks: stages were idle 38% of the time so far",
    ]
    assert simulate_pipeline(2, 2, GPIPE, 0).verdict() == "before the first tick"
    assert listed([("F", 0), ("F", 1), ("B", 0), ("F", 2)]) == "F0–F1 B0 F2"


def test_the_explorers_sliders_reach_the_end_and_its_first_setting_answers_nothing() -> None:
    made = explore.pipeline()
    steps, most = (next(c for c in made.controls if c.name == n) for n in ("time", "micro_batches"))
    assert steps.high == simulate_pipeline(6, most.high, GPIPE, 999).run.ticks
    assert "bubble" not in made.show(**made.settings[0]).words


def test_the_figure_has_a_number_for_each_step_that_has_begun() -> None:
    for shot in (
        simulate_pipeline(2, 2, GPIPE, 3),
        simulate_pipeline(6, 16, GPIPE, 63),
        simulate_pipeline(4, 8, ONE_F_ONE_B, 17),
    ):
        texts = [
            t for t in draw_pipeline(shot).figure.axes[0].texts if t.get_position()[1] > 0.78 and t.get_text().isdigit()
        ]
        assert len(texts) == sum(d.start < shot.time for row in shot.run.done for d in row)


def test_the_order_of_micro_batches_is_free() -> None:
    """A schedule that takes the micro-batches from the last to the first is as good."""
    table = [[(k, m - 1 - i) for k, i in one_f_one_b(s, p, m)] for p, m in PIPELINES for s in range(p)]
    assert judge_schedule([("value", [list(step) for step in steps]) for steps in table]) == "ok"
    assert TICKS == {"F": 1, "B": 2}
