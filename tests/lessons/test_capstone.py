"""Lesson 18: a training that is marked by a rubric, on real ranks, and how the rubric is shown and graded."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbddp.lessons.framework.rubric import lines_of
from nbddp.lessons.l18_capstone.exercise import ASKS
from nbddp.lessons.l18_capstone.figure import draw_training
from nbddp.lessons.l18_capstone.simulation import (
    ALONE,
    EARLY,
    LATE_RATE,
    LIMIT,
    MEANS,
    MISTAKES,
    NO_OPTIMIZER,
    NO_STEP,
    NONE,
    OWN_LOSS,
    STEPS,
    WHOLE,
    first_weights,
    rate,
    rows_of,
    simulate_training,
)
from nbddp.pool.pool import WorkerPool
from nbddp.teach import check, explore, grade
from tests.lessons.answers import defined
from tests.lessons.tables.l18_capstone import CLIP, SHARE, SOLUTION, changed
from tests.unit.test_capstone import all_of, unmet

NPROC = 4  # of the module's pool


def test_one_missing_part_costs_its_own_points_alone_and_each_mark_has_a_line(
    pool: WorkerPool, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = check.capstone(defined(changed(("print(f", "str(f")), "capstone"), hint=True)
    shown = capsys.readouterr().out.splitlines()
    assert shown[: len(ASKS)] == lines_of(answer.line)[:-1]
    assert [mark[0] for mark in shown[: len(ASKS)]].count("✗") == 1
    assert shown[len(ASKS)] == "15 of 16 points"
    assert shown[-1].startswith("hint 1 of 3: ")


@pytest.mark.more
def test_grade_prints_the_rubric(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "ada.py").write_text(SOLUTION, encoding="utf-8")
    (work / "bo.py").write_text(changed((CLIP, "")), encoding="utf-8")
    options = ["--csv", str(tmp_path / "marks.csv"), "--feedback", str(tmp_path / "feedback")]
    assert grade.main([str(work), *options]) == 0
    out = capfd.readouterr().out
    assert "bo, capstone: " in out
    assert "    ✗ 0/1 gradients clipped: a step was taken" in out
    assert "    ✓ 3/3 continues from its checkpoint" in out
    said = (tmp_path / "feedback" / "bo.txt").read_text(encoding="utf-8")
    assert "    ✗ 0/1 gradients clipped" in said
    assert "ok" in (tmp_path / "feedback" / "ada.txt").read_text(encoding="utf-8")


STEP = "loss, _ = loss_of(parallel, batch(step))\n        optimizer.zero_grad()\n        loss.backward()\n"
BY_HAND = (
    "with parallel.no_sync():\n            loss, _ = loss_of(parallel, batch(step))\n"
    f"            optimizer.zero_grad()\n            loss.backward()\n{CLIP}"
    "        for p in model.parameters():\n            dist.all_reduce(p.grad)\n            p.grad /= world_size\n"
)
REAL = {  # the learner's program with each mistake
    NONE: (),
    ALONE: (("DDP(model)", "model"),),
    WHOLE: ((SHARE, "t"),),
    EARLY: ((CLIP, ""), (STEP, BY_HAND)),
    LATE_RATE: (("(step + 1) / 10)", "(step - first + 1) / 10)"),),
    OWN_LOSS: (("            dist.all_reduce(mean)\n", "            mean *= world_size\n"),),
    MEANS: (("[loss.item() * rows, rows]", "[loss.item(), 1.0]"),),
    NO_OPTIMIZER: (('        optimizer.load_state_dict(state["optimizer"])\n', ""),),
    NO_STEP: (('        first = state["step"]\n', ""),),
}
ASKED = {  # a line of the check → of the explorer; those in between are not decided there
    "the same weights on all ranks": "same weights on all ranks",
    "trains as one process with the whole batch does": "as one process",
    "gradients clipped": "clipping",
    "the learning rate warms up": "warm-up",
    "only rank 0 logs, and logs the loss of the whole batch": "logging",
    "unbiased evaluation": "evaluation",
    "continues from its checkpoint": "checkpoint",
}


@pytest.mark.mutants
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_finds_a_mistake_by_the_lines_by_which_the_explorer_does(pool: WorkerPool, mistake: str) -> None:
    said = check.capstone(defined(changed(*REAL[mistake]), "capstone")).line
    found = [name for asks, name in ASKED.items() if f" {asks}: " in said]
    assert found == unmet(all_of(mistake))


def test_the_paper_adamw_and_its_gradient_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    made = all_of(NONE, ranks=1, fails=0)
    weights = torch.nn.Parameter(torch.tensor(first_weights(0)))
    optimizer = torch.optim.AdamW([weights])
    for step, told in enumerate(made.steps):
        inputs, targets = (torch.tensor(t).flatten() for t in rows_of(step, 12))
        scores = 2.0 * weights[inputs]
        rounded = scores + (scores.detach().float().bfloat16().double() - scores.detach())
        loss = torch.nn.functional.cross_entropy(rounded, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([weights], LIMIT)
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        assert told.loss == pytest.approx(loss.item(), abs=1e-9)
        assert torch.allclose(weights.detach(), torch.tensor(told.weights[0]), atol=1e-6)


def test_the_words_follow_the_steps_and_the_figure_shows_them() -> None:
    made = simulate_training(4, NO_OPTIMIZER, 25, 26)
    assert made.describe().splitlines()[:3] == [
        "4 ranks, step 22 of 40; mistake: the checkpoint has no optimizer",
        "a rank failed in step 25; the restart began with step 21; 4 steps lost",
        "losses printed: step 10: 1.722, step 20: 1.039",
    ]
    assert simulate_training(2, NONE, 0, 0).describe().splitlines()[1:3] == ["no rank fails", "losses printed: none"]
    for ranks, mistake, fails, time in ((1, NONE, 0, 0), (2, ALONE, 35, 38), (3, NO_STEP, 40, 79), (4, MEANS, 0, 40)):
        made = simulate_training(ranks, mistake, fails, time)
        texts = draw_training(made).figure.axes[0].texts
        assert {line.found for line in made.lines()} <= {t.get_text() for t in texts}


@pytest.mark.more
def test_its_slider_reaches_the_end_and_its_first_setting_answers_nothing() -> None:
    made = explore.training()
    steps = next(c for c in made.controls if c.name == "time")
    assert steps.high == max(len(all_of(m, fails=f).steps) for m in MISTAKES for f in range(STEPS + 1))
    assert "not met" not in made.show(**made.settings[0]).words
