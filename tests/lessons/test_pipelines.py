"""Lesson 17: schedules against closed forms, and the checks of its two exercises on paper and on real ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nbddp
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
from nbddp.teach import check, explore
from tests.lessons.answers import Mutant, defined, exercise, pool_of, solution

NPROC = 4  # of the module's pool

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
    assert "bubble 75.0%" in simulate_pipeline(4, 1, GPIPE, 99).words()
    assert "bubble 25.0%" in simulate_pipeline(4, 9, GPIPE, 99).words()
    assert simulate_pipeline(4, 8, GPIPE, 99).run.idle() == simulate_pipeline(4, 8, ONE_F_ONE_B, 99).run.idle()


def test_words_follow_the_ticks() -> None:
    assert simulate_pipeline(2, 2, GPIPE, 4).words().splitlines() == [
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
        assert all(t.get_fontsize() >= 6.5 for t in draw_pipeline(shot).figure.axes[0].texts)


# -- schedule_1f1b ---------------------------------------------------------------------------

LIST = "def schedule_1f1b(stage, stages, micro_batches):\n    m, ahead = micro_batches, min(stages - 1 - stage, "
LIST += "micro_batches)\n    "
BODY = """steps = [("F", i) for i in range(ahead)]
    for i in range(ahead, m):
        steps += [("F", i), ("B", i - ahead)]
    return steps + [("B", i) for i in range(m - ahead, m)]
"""
WRONG_LISTS = [
    Mutant("GPipe", LIST + "return [(k, i) for k in 'FB' for i in range(m)]",
           "4 stages, 8 micro-batches: stage 0 holds 8 micro-batches at a time, 4 under 1F1B: that is GPipe"),
    Mutant("one at a time", LIST + "return [(k, i) for i in range(m) for k in 'FB']",
           "takes 96 ticks (a forward 1, a backward 2), and 1F1B takes 33: stage 0 has at most 1 micro-batch"),
    Mutant("turned round", LIST + "ahead = min(stage, m)\n    " + BODY,
           "deadlock: stage 0 waits for stage 1 before B0"),
    Mutant("one more", LIST + "ahead = min(stages - stage, m)\n    " + BODY, "stage 0 holds 5 micro-batches at a time"),
    Mutant("one less", LIST + "ahead = max(ahead - 1, 0)\n    " + BODY, "has at most 3 micro-batches in progress"),
    Mutant("all alike", LIST + "ahead = min(stages - 1, m)\n    " + BODY, "stage 1 holds 4 micro-batches at a time, 3"),
    Mutant("more than there are", LIST + "ahead = stages - 1 - stage\n    " + BODY,
           "schedule_1f1b(0, 4, 2) has F2; 2 micro-batches are numbered from 0 to 1"),
    Mutant("not drained", LIST + BODY.replace(' + [("B", i) for i in range(m - ahead, m)]', ""),
           "lacks B5: every micro-batch needs its backward pass on every stage"),
    Mutant("B before F", LIST + BODY.replace('[("F", i), ("B", i - ahead)]', '[("B", i - ahead), ("F", i)]'),
           "stage 3 does B0 before its own F0; a backward pass needs its forward pass"),
    Mutant("its own B", LIST + BODY.replace('("B", i - ahead)', '("B", i)'),
           "lacks B0: every micro-batch needs its backward"),
    Mutant("from 1", LIST + "return [(k, i + 1) for k in 'FB' for i in range(m)]", "has F8; 8 micro-batches are"),
    Mutant("words", LIST + "return [f'F{i}' for i in range(m)]", 'has the step \'F0\'; a step is a pair ("F", i)'),
    Mutant("twice", LIST + "return [('F', 0)] * m", "lacks F1: every micro-batch needs its forward pass"),
    Mutant("a text", LIST + "return 'F0 B0'", "return a list of steps such as"),
    Mutant("half of it", LIST + "if stage: return []", "schedule_1f1b(0, 4, 8) is None; here the function ends"),
    Mutant("raises", LIST + "return steps", "schedule_1f1b(0, 4, 8) raised NameError"),
    Mutant("not implemented", LIST + "raise NotImplementedError", "still to be written"),
]  # fmt: skip
RIGHT_LISTS = [
    LIST + BODY,
    LIST + """steps, f, b = [], 0, 0
    while b < m:
        if f < m and f - b < stages - stage:
            steps.append(("F", f)); f += 1
        else:
            steps.append(["B", b]); b += 1
    return steps
""",
]  # fmt: skip


@pytest.mark.parametrize("mutant", WRONG_LISTS, ids=str)
def test_wrong_schedules_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.schedule_1f1b)


def test_right_schedules_pass(pool: nbddp.Pool) -> None:
    assert check.schedule_1f1b(solution("17", "schedule_1f1b"))
    for source in RIGHT_LISTS:
        assert check.schedule_1f1b(defined(source, "schedule_1f1b")), source
    assert "still to be written" in check.schedule_1f1b(exercise("17", "schedule_1f1b")).line


def test_the_order_of_micro_batches_is_free() -> None:
    """A schedule that takes the micro-batches from the last to the first is as good."""
    table = [[(k, m - 1 - i) for k, i in one_f_one_b(s, p, m)] for p, m in PIPELINES for s in range(p)]
    assert judge_schedule([("value", [list(step) for step in steps]) for steps in table]) == "ok"
    assert TICKS == {"F": 1, "B": 2}


# -- run_stage -------------------------------------------------------------------------------

HEAD = """
def run_stage(steps, stage, inputs, targets, loss_of, shape):
    import torch, torch.distributed as dist
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    count = sum(kind == "F" for kind, _ in steps)
    kept, sends, total = {}, [], 0.0
"""
LOOP = """
    for kind, i in steps:
        if kind == "F":
            x = torch.empty(shape)
            if rank == 0: x = inputs[i]
            else: dist.recv(x, rank - 1); x.requires_grad_()
            y = stage(x)
            if rank == last: y = loss_of(y, targets[i]) / count; total += y.item()
            else: sends.append(dist.isend(y.detach(), rank + 1))
            kept[i] = x, y
        else:
            (x, y), gradient = kept.pop(i), None
            if rank < last: dist.recv(gradient := torch.empty(shape), rank + 1)
            y.backward(gradient)
            if rank: sends.append(dist.isend(x.grad, rank - 1))
    for send in sends: send.wait()
    return total
"""


def changed(*pairs: tuple[str, str]) -> str:
    """The right answer with something replaced."""
    text = LOOP
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return HEAD + text


BLOCKING = (("sends.append(dist.isend(y.detach(), rank + 1))", "dist.send(y.detach(), rank + 1)"),
            ("sends.append(dist.isend(x.grad, rank - 1))", "dist.send(x.grad, rank - 1)"))  # fmt: skip
WRONG_STEPS = [
    Mutant("blocking", changed(*BLOCKING), "1F1B, 4 ranks, 6 micro-batches: deadlock: rank 0 waits in send to rank 1"),
    Mutant("blocking, why", changed(*BLOCKING), "Start sends with isend, keep what it returns, and wait for all of"),
    Mutant("waits at once", changed(*((a, b.replace("dist.send", "dist.isend") + ".wait()") for a, b in BLOCKING)),
           "Start sends with isend, keep what it returns, and wait for all of them at the end"),
    Mutant("sends before it receives", changed(("            y = stage(x)\n", ""),
           ("            if rank == 0: x", "            y = stage(x)\n            if rank == 0: x")), "GPipe, 4 ranks"),
    Mutant("no gradient back", changed(("if rank: sends", "if rank > 1: sends")),
           "ranks 1–3 finished: every send needs its recv on the other side"),
    Mutant("only downwards", changed(("dist.recv(x, rank - 1)", "dist.recv(x, rank + 1)")),
           "names a rank that does not exist; the ranks are 0 to 3, and a stage's neighbours are rank - 1"),
    Mutant("receives from the wrong side", changed(("torch.empty(shape), rank + 1", "torch.empty(shape), rank - 1")),
           "a send or recv names a rank that does not exist"),
    Mutant("no requires_grad_", changed(("; x.requires_grad_()", "")), "unless x.requires_grad_() was called before"),
    Mutant("the sum", changed((" / count; total += y.item()", "; total += y.item() / count")),
           "GPipe, 4 ranks, 3 micro-batches: rank 3, 0.weight: yours is 3.00 × the gradient of one process: you added"),
    Mutant("divided again", changed(("y.backward(gradient)", "y.backward(None if rank == last else gradient / count)")),
           "rank 2, 0.weight: yours is 0.33 × the gradient of one process: you divided by the number of micro-batches"),
    Mutant("zero_grad", changed(("y.backward(gradient)", "stage.zero_grad(); y.backward(gradient)")),
           "yours is of the last micro-batch alone"),
    Mutant("zero at the end", changed(("    return total", "    for p in stage.parameters(): p.grad = p.grad * 0\n"
           "    return total")), "they were set to zero after the last backward pass"),
    Mutant("ones back", changed(("y.backward(gradient)",
           "y.backward(None if rank == last else torch.ones_like(y))")), "rank 3's are right, so a wrong tensor came"),
    Mutant("sends y back", changed(("isend(x.grad,", "isend(x.detach(),")), "rank 2, 0.weight: yours differs"),
    Mutant("backward at once", changed(("kept.pop(i), None", "list(kept.values())[-1], None")),
           "GPipe, 4 ranks, 3 micro-batches: rank 3 raised RuntimeError: "
           "Trying to backward through the graph a second time; each micro-batch goes backward once; keep them apart"),
    Mutant("GPipe always", changed(("in steps:", "in sorted(steps, key=lambda s: s[0] == 'B'):")),
           "1F1B, 4 ranks, 6 micro-batches: rank 0 did F0–F5 B0–B5, its steps were F0–F3 B0 F4 B1"),
    Mutant("all data", changed(("inputs[i]", "torch.cat(inputs)")), "ranks"),
    Mutant("no return", changed(("    return total", "")), "but run_stage returned None on the last stage"),
    Mutant("the loss's sum", changed(("total += y.item()", "total += y.item() * count")),
           "returned the sum of the micro-batches' losses; return their mean"),
    Mutant("not waited for", changed(("    for send in sends: send.wait()\n", "")),
           "a send ends when its Work object is deleted"),
    Mutant("broadcast", changed(("    for send", "    dist.barrier(); dist.all_reduce(torch.ones(1))\n    for send")),
           "the gradients are right, but all_reduce was called"),
    Mutant("inputs everywhere", changed(("if rank == 0: x = inputs[i]", "count = len(inputs)\n"
           "            if rank == 0: x = inputs[i]")), "inputs are on the first stage only"),
    Mutant("a backward on y", changed(("y.backward(gradient)", "y.backward()")), "only the last stage has a loss; the"),
    Mutant("no backward", HEAD + LOOP.replace("            y.backward(gradient)\n            if rank: sends.append("
           "dist.isend(x.grad, rank - 1))\n", "").replace("            if rank < last: dist.recv("
           "gradient := torch.empty(shape), rank + 1)\n", ""),
           "and no backward pass: call backward() on what the forward pass made"),
    Mutant("turned", changed(("loss_of(y, targets[i])", "loss_of(targets[i], y)")), "the wrong arguments or the"),
    Mutant("four ranks", changed(("if rank < last: dist", "if rank < 3: dist")),
           "1F1B, 3 ranks, 5 micro-batches: a send or recv names a rank that does not exist"),
    Mutant("dies", HEAD + "    import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "GPipe, 4 ranks, 3 micro-"),
    Mutant("unwritten", HEAD, "still to be written"),
    Mutant("not implemented", HEAD + "    raise NotImplementedError", "still to be written"),
]  # fmt: skip
RIGHT_STEPS = [
    changed(("torch.empty(shape)\n", "torch.empty(shape, requires_grad=rank > 0)\n"), ("; x.requires_grad_()", "")),
    changed(("total += y.item()", "total = total + y.detach()")),
    changed(("sends.append(dist.isend(x.grad, rank - 1))", "dist.send(x.grad, rank - 1)")),  # one of them may block
]


@pytest.mark.every(4, "mutants")
@pytest.mark.parametrize("mutant", WRONG_STEPS, ids=str)
def test_wrong_steps_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.run_stage)


def test_right_steps_pass(pool: nbddp.Pool) -> None:
    assert check.run_stage(solution("17", "run_stage"))
    for source in RIGHT_STEPS:
        assert check.run_stage(defined(source, "run_stage")), source
    assert "still to be written" in check.run_stage(exercise("17", "run_stage")).line


def test_a_pool_of_two_is_told_what_to_start(pool: nbddp.Pool) -> None:
    with pool_of(2):
        line = check.run_stage(solution("17", "run_stage")).line
    assert line == "this check needs 4 ranks and the pool has 2; %ddp start --nproc 4 makes them"
