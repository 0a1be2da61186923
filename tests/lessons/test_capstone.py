"""Lesson 18: a training that is marked by a rubric, on real ranks, and how the rubric is shown and graded."""

from __future__ import annotations

from pathlib import Path

import pytest

import nbddp
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
from nbddp.teach import check, explore, grade
from tests.lessons.answers import Mutant, builder, cells, defined, exercise, solution
from tests.unit.test_capstone import all_of, unmet

NPROC = 4  # of the module's pool

(SOLUTION,) = (s for s in builder().solutions(cells("18")) if "def capstone" in s)


def changed(*pairs: tuple[str, str]) -> str:
    """The solution with something replaced."""
    text = str(SOLUTION)
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
SHARE = "t[rank::world_size]"
SAVED = 'torch.save(state, path + ".new")\n                os.replace(path + ".new", path)'
WRONG = [
    Mutant("no DDP", changed(("DDP(model)", "model")),
           "✗ 0/2 the same weights on all ranks: ranks 1–3 and rank 0 end with different weights; train DDP(model)"),
    Mutant("past DDP", changed(("loss_of(parallel, batch", "loss_of(model, batch")),
           "train DDP(model), called as a func"),
    Mutant("the whole batch", changed((SHARE, "t")),
           "✗ 0/3 trains as one process with the whole batch does: step 0: the ranks' forward passes had 48 rows in a"),
    Mutant("the first rows", changed((SHARE, "t[:3]")),
           "the weights are not those of one process; each rank takes its"),
    Mutant("four ranks", changed((SHARE, "t[rank::4]")),
           "✗ 0/2 runs on any number of ranks, as torchrun may start it: on 3 ranks: step 0: the ranks' forward passe"),
    Mutant("float32", changed(("with torch.autocast(device.type, dtype=torch.bfloat16):", "if True:")),
           "✗ 0/1 forward passes in bfloat16: the model is called outside torch.autocast(device.type, dtype="),
    Mutant("float16", changed(("torch.bfloat16", "torch.float16")), "autocast's dtype is float16"),
    Mutant("no clipping", changed((CLIP, "")), "✗ 0/1 gradients clipped: a step was taken with gradients of norm"),
    Mutant("clips before backward",
           changed((CLIP, ""), ("        loss.backward()\n", CLIP + "        loss.backward()\n")),
           "✗ 0/1 gradients clipped: a step was taken"),
    Mutant("clips to half", changed(("(), 1.0)", "(), 0.5)")),
           "clip once, after backward() has averaged the gradients"),
    Mutant("no warm-up", changed((" * min(1, (step + 1) / 10)", "")),
           "✗ 0/1 the learning rate warms up: rank 0, step 0, learning rate: expected 0.001, got 0.01"),
    Mutant("begins with 0", changed(("(step + 1) / 10)", "step / 10)")), "step 0, learning rate: expected 0.001,"),
    Mutant("all ranks log",
           changed(("            if rank == 0:\n", "            print('done')\n            if rank == 0:\n")),
           "✗ 0/1 only rank 0 logs, and logs the loss of the whole batch: ranks 1–3 printed too"),
    Mutant("its own loss", changed(("            dist.all_reduce(mean)\n", "            mean *= world_size\n")),
           "loss printed, loss of the whole batch: "),
    Mutant("another step", changed(("step {step + 1}:", "step {step}:")),
           "steps that rank 0 named: expected 10, 20, got 9, 19"),
    Mutant("silent", changed(("print(f", "str(f")), "that rank 0 printed: expected 2, one every 10 steps, got 0"),
    Mutant("its own rows", changed(("return (sums[0] / sums[1]).item()", "return loss.item()")),
           "✗ 0/2 unbiased evaluation: rank 0, returned loss: expected"),
    Mutant("mean of means", changed(("[loss.item() * rows, rows]", "[loss.item(), 1]")),
           "sum losses × rows and rows over"),
    Mutant("no return", changed(("return (sums[0]", "(sums[0]")), "rank 0 returned None; return the mean loss over"),
    Mutant("no checkpoint", changed((SAVED, "pass")),
           "no file in folder after 13 steps; write a checkpoint after every 10"),
    Mutant("weights alone", changed(('optimizer.load_state_dict(state["optimizer"])', "pass")),
           "✗ 0/3 continues from its checkpoint: the final weights differ from the undisturbed run"),
    Mutant("from the start", changed(('first = state["step"]', "pass")),
           "rank 0 continued at step 0; the last checkpoint"),
    Mutant("the step that was", changed(('"step": step + 1', '"step": step')), "rank 0 continued at step 9; the last"),
    Mutant("in place", changed((SAVED, "torch.save(state, path)")), "the checkpoint is written over the last good one"),
    Mutant("names with module.", changed(('"model": model.state_dict()', '"model": parallel.state_dict()')),
           "✗ 0/3 continues from its checkpoint: restarted: a rank raised RuntimeError: Error(s) in loading"),
    Mutant("raises", changed(("    for step in range", "    raise ValueError('no idea')\n    for step in range")),
           "0 of 16 points | ✗ 0/2 the same weights on all ranks: a rank raised ValueError: no idea"),
    Mutant("one more on rank 0",
           changed(("    return (sums", "    if rank == 0:\n        dist.all_reduce(sums)\n    return (sums")),
           "0 of 16 points | ✗ 0/2 the same weights on all ranks: deadlock: rank 0 waits in all_reduce"),
    Mutant("dies", changed(("    for step in range", "    os.kill(os.getpid(), 9)\n    for step in range")),
           "0 of 16 points"),
    Mutant("not implemented", "def capstone(*args):\n    raise NotImplementedError", "still to be written"),
]  # fmt: skip


ALWAYS = ("no DDP",)


@pytest.mark.parametrize(
    "mutant", [m if m.name in ALWAYS else pytest.param(m, marks=pytest.mark.mutants) for m in WRONG], ids=str
)
def test_what_is_wrong_costs_its_line(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.capstone)


def test_the_solution_has_all_points_and_an_unwritten_one_none(pool: nbddp.Pool) -> None:
    answer = check.capstone(solution("18", "capstone"))
    assert answer, answer.line
    assert answer.verified.startswith("16 of 16 points, on real ranks")
    unwritten = check.capstone(exercise("18", "capstone"))
    assert unwritten.line.startswith("0 of 16 points")
    assert "capstone returned None: it is still to be written" in unwritten.line


def test_one_missing_part_costs_its_own_points_alone(pool: nbddp.Pool) -> None:
    line = check.capstone(defined(changed(("torch.bfloat16", "torch.float16")), "capstone")).line
    assert [part[:5] for part in lines_of(line)[:-1]].count("✗ 0/1") >= 1
    assert "✓ 3/3 continues from its checkpoint" in lines_of(line)


def test_a_checks_words_have_a_line_for_each_mark(pool: nbddp.Pool, capsys: pytest.CaptureFixture[str]) -> None:
    answer = check.capstone(defined(changed(("print(f", "str(f")), "capstone"), hint=True)
    shown = capsys.readouterr().out.splitlines()
    assert shown[: len(ASKS)] == lines_of(answer.line)[:-1]
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
def test_the_check_finds_a_mistake_by_the_lines_by_which_the_explorer_does(pool: nbddp.Pool, mistake: str) -> None:
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
    assert made.words().splitlines()[:3] == [
        "4 ranks, step 22 of 40; mistake: the checkpoint has no optimizer",
        "a rank failed in step 25; the restart began with step 21; 4 steps lost",
        "losses printed: step 10: 1.722, step 20: 1.039",
    ]
    assert simulate_training(2, NONE, 0, 0).words().splitlines()[1:3] == ["no rank fails", "losses printed: none"]
    for ranks, mistake, fails, time in ((1, NONE, 0, 0), (2, ALONE, 35, 38), (3, NO_STEP, 40, 79), (4, MEANS, 0, 40)):
        made = simulate_training(ranks, mistake, fails, time)
        texts = draw_training(made).figure.axes[0].texts
        assert {line.found for line in made.lines()} <= {t.get_text() for t in texts}
        assert all(t.get_fontsize() >= 7.5 for t in texts)


@pytest.mark.more
def test_its_slider_reaches_the_end_and_its_first_setting_answers_nothing() -> None:
    made = explore.training()
    steps = next(c for c in made.controls if c.name == "time")
    assert steps.high == max(len(all_of(m, fails=f).steps) for m in MISTAKES for f in range(STEPS + 1))
    assert "not met" not in made.show(**made.settings[0]).words
