"""Lesson 05: the fitted line against closed forms, and the checks of its two exercises on real ranks."""

from __future__ import annotations

import itertools
import math

import pytest

from nbddp.lessons.framework import run_check
from nbddp.lessons.l05_averaging_gradients.figure import draw_averaging
from nbddp.lessons.l05_averaging_gradients.simulation import MEAN, NOTHING, OWN, SAME, SUM, shards, simulate_averaging
from nbddp.pool.pool import WorkerPool
from nbddp.teach import check, explore
from tests.lessons.answers import defined, solution
from tests.lessons.tables.l05_averaging_gradients import after


@pytest.mark.parametrize(
    ("begin", "exchange", "says"),
    [
        (SAME, MEAN, "in every step equal to one process"),
        (SAME, SUM, "not equal to one process: each step is 4 times as long"),
        (SAME, NOTHING, "start equal and drift apart"),
        (OWN, MEAN, "equal steps from different starts"),
        (OWN, NOTHING, "start apart and end apart"),
    ],
)
def test_verdicts_and_figures(begin: str, exchange: str, says: str) -> None:
    fit = simulate_averaging(4, 30, begin, exchange)
    assert says in fit.verdict()
    assert fit.verdict() in fit.describe()
    shown = draw_averaging(fit)
    texts = [t.get_text() for axes in shown.figure.axes for t in axes.texts]
    assert ("ranks 0–3" in texts) == (begin == SAME and exchange != NOTHING)
    assert "one process (dots)" in texts
    fitted, losses, distances = shown.figure.axes
    for axes in (fitted, losses):
        heights = sorted(t.get_position()[1] for t in axes.texts)
        assert all(b - a > 0.07 for a, b in itertools.pairwise(heights)), "labels do not lie on each other"
    assert math.isclose(max(distances.lines[0].get_ydata()), max(fit.distances()), abs_tol=1e-12)


@pytest.mark.parametrize(("begin", "exchange"), [(b, e) for b in (SAME, OWN) for e in (NOTHING, MEAN, SUM)])
def test_the_picture_has_each_ranks_points_and_line(begin: str, exchange: str) -> None:
    fit = simulate_averaging(4, 30, begin, exchange)
    fitted = draw_averaging(fit).figure.axes[0]
    points, lines = fitted.lines[:4], fitted.lines[4:]
    for drawn, shard in zip(points, shards(4), strict=True):
        assert list(zip(drawn.get_xdata(), drawn.get_ydata(), strict=True)) == shard
    assert len({(p.get_color(), p.get_marker()) for p in points}) == 4
    held = [fit.lines[group[0]][-1] for group in fit.groups()] + [fit.alone[-1]]
    assert [tuple(line.get_ydata()) for line in lines] == [(b - w, b + w) for w, b in held]
    low, high = fitted.get_ylim()
    assert all(low < y < high for line in fitted.lines for y in line.get_ydata()), "nothing is cut off"


def test_what_the_lessons_questions_about_the_explorer_say() -> None:
    apart = simulate_averaging(4, 200, SAME, NOTHING).distances()
    assert apart[0] == 0
    assert max(apart[-50:]) - min(apart[-50:]) < 0.05 * max(apart), "it grows, then stays about the same"
    summed = simulate_averaging(4, 30, SAME, SUM)
    assert max(summed.distances()) < 1e-9
    losses = summed.losses(summed.lines[0])
    assert losses == sorted(losses, reverse=True), "the loss falls"
    first, second = explore.averaging().settings
    assert (first["begin"], first["exchange"]) == (SAME, MEAN), "the plain case answers no question"
    assert (second["begin"], second["exchange"]) == (SAME, NOTHING)


# -- the checks ------------------------------------------------------------------------------


def test_the_line_does_not_depend_on_who_is_first(pool: WorkerPool) -> None:
    """Where all ranks fail, which is first is by chance; one that is done early breaks no connection."""
    lines = {
        check.average_gradients(defined(after("dist.init_process_group()"), "average_gradients")).line for _ in range(4)
    }
    assert len(lines) == 1
    early = after("if dist.get_rank(): dist.all_reduce(p.grad)")
    assert check.average_gradients(defined(early, "average_gradients")).line.startswith("deadlock: rank 1 waits in")


def test_an_endless_answer_in_a_group_is_ended_and_spoils_no_later_one(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run_check, "DEADLINE", 1.0)
        assert (
            "no answer after 1 s" in check.average_gradients(defined(after("while n: pass"), "average_gradients")).line
        )
    assert check.average_gradients(solution("05", "average_gradients"))
