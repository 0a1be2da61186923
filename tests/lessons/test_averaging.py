"""Lesson 05: the fitted line against closed forms, and the checks of its two exercises on real ranks."""

from __future__ import annotations

import itertools
import math

import pytest

import nbddp
from nbddp.lessons.l05_averaging_gradients.figure import draw_averaging
from nbddp.lessons.l05_averaging_gradients.simulation import MEAN, NOTHING, OWN, SAME, SUM, shards, simulate_averaging
from nbddp.teach import check, explore
from tests.lessons.answers import Mutant, defined, exercise, solution


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
    assert fit.verdict() in fit.words()
    shown = draw_averaging(fit)
    texts = [t.get_text() for axes in shown.figure.axes for t in axes.texts]
    assert ("ranks 0–3" in texts) == (begin == SAME and exchange != NOTHING)
    assert "one process (dots)" in texts
    fitted, losses, distances = shown.figure.axes
    for axes in (fitted, losses):
        heights = sorted(t.get_position()[1] for t in axes.texts)
        assert all(b - a > 0.07 for a, b in itertools.pairwise(heights)), "labels do not lie on each other"
    assert all(t.get_fontsize() >= 6.5 for axes in shown.figure.axes for t in axes.texts)
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


# -- average_gradients -----------------------------------------------------------------------

AFTER = """
def average_gradients(model):
    import torch, torch.distributed as dist
    n = dist.get_world_size()
    for {each} in {all}:
        {body}
"""


def after(body: str, each: str = "p", over: str = "model.parameters()") -> str:
    return AFTER.format(each=each, all=over, body=body.replace("\n", "\n        "))


MEAN_OF = "dist.all_reduce(p.grad); p.grad /= n"
AVERAGE_PARAMETERS = "with torch.no_grad():\n    dist.all_reduce(p); p /= n"
WRONG_AFTER = [
    Mutant("no wait", after("dist.all_reduce(p.grad, async_op=True); p.grad /= n"),
           "all_reduce was started with async_op=True and nothing waits for it: the answer differs from run to run"),
    Mutant("the pool's size, written", after("dist.all_reduce(p.grad); p.grad /= 2"),
           "on 1 rank: rank 0, layer 0.weight: yours is 0.50 × the reference: the sum is divided by 2, but the world"),
    Mutant("unwritten", after("..."), "rank 0, layer 0.weight: yours is this rank's own gradient: nothing was"),
    Mutant("sum only", after("dist.all_reduce(p.grad)"),
           "layer 0.weight: yours is 2.00 × the reference: you summed but did not divide by the world size"),
    Mutant("parameters", after(AVERAGE_PARAMETERS), "own gradient: you averaged the parameters; average p.grad, not p"),
    Mutant("skips the last", after(MEAN_OF, over="list(model.parameters())[:-1]"),
           "rank 0, layer 2.bias: yours is this rank's own gradient: 0.weight, 0.bias, 2.weight are right, but this"),
    Mutant("rank 0's", after("dist.broadcast(p.grad, 0)"), "all ranks have rank 0's gradient: broadcast copies"),
    Mutant("zero", after("p.grad.zero_()"), "the gradient is all zeros"),
    Mutant("divides only", after("p.grad /= n"), "0.50 × this rank's own gradient: you divided but did not sum"),
    Mutant("twice divided", after(MEAN_OF + "; p.grad /= n"), "yours is 0.50 × the reference: you divided by"),
    Mutant("twice summed", after("dist.all_reduce(p.grad); dist.all_reduce(p.grad)"), "4.00 × the reference: it was"),
    Mutant("the largest", after("dist.all_reduce(p.grad, op=dist.ReduceOp.MAX)"), "has the largest of the ranks'"),
    Mutant("the smallest", after("dist.all_reduce(p.grad, op=dist.ReduceOp.MIN)"), "has the smallest of the ranks'"),
    Mutant("on rank 0 alone", after("dist.reduce(p.grad, 0)\nif dist.get_rank() == 0: p.grad /= n"),
           "rank 1, layer 0.weight: only rank 0 has the mean; reduce leaves"),
    Mutant("a copy", after("g = p.grad.clone(); dist.all_reduce(g); g /= n"), "the result was not put into p.grad"),
    Mutant("downhill", after(MEAN_OF + "; p.grad.neg_()"), "yours is -1.00 × the reference: the sign"),
    Mutant("rounded", after(MEAN_OF + "; p.grad = p.grad.round()"), "differs from the reference by up to"),
    Mutant("None", after("p.grad = None"), "p.grad is None now"),
    Mutant("nan", after("p.grad /= 0 * p.grad"), "is not finite"),
    Mutant("both", after(MEAN_OF + "\n" + AVERAGE_PARAMETERS), "gradients are right, but you averaged the parameters"),
    Mutant("steps too", after(MEAN_OF + "\np.data -= 0.1 * p.grad"), "the second step, rank 0, layer 0.weight: yours"),
    Mutant("broadcasts too", after(MEAN_OF + "\ndist.broadcast(p.data, 0)"), "but the parameters were changed too"),
    Mutant("rank 0 waits", after("if dist.get_rank() == 0: dist.all_reduce(p.grad)"), "must call the same collectives"),
    Mutant("raises", after("raise ValueError('no idea')"), "a rank raised ValueError: no idea"),
    Mutant("not implemented", after("raise NotImplementedError"), "average_gradients is still to be written"),
    Mutant("eight", after("dist.all_reduce(p.grad); p.grad /= 8"),
           "0.25 × the reference: the sum is divided by 8, but the world size is 2: dist.get_world_size()"),
    Mutant("by rank", after("dist.all_reduce(p.grad); p.grad /= dist.get_rank()"), "did you divide by 0, such as rank"),
    Mutant("by rank + 1", after("dist.all_reduce(p.grad); p.grad /= dist.get_rank() + 1"),
           "the ranks divide the sum by 1, 2; every rank must divide by the world size"),
    Mutant("its own mean", after(MEAN_OF + "; p.grad.fill_(p.grad.mean())"), "yours is the same number everywhere"),
    Mutant("returned", after("p.grad = dist.all_reduce(p.grad) / n"), "in place and return None"),
    Mutant("not imported", "def average_gradients(model):\n    dist.barrier()", "not the names of %%ddp cells"),
    Mutant("a number", after("dist.all_reduce(p.grad.sum().item())"), "takes a tensor, not a number or None"),
    Mutant("a word as op", after("dist.all_reduce(p.grad, op='mean')"),
           "a rank raised TypeError: incompatible function arguments; an argument has a type that the function"),
    Mutant("in another order", after(MEAN_OF, over="sorted(model.parameters(), key=len, reverse=n * dist.get_rank())"),
           "all ranks call the same collectives in the same order"),
    Mutant("inits", after("dist.init_process_group()"), "the check has made the process group; leave that out"),
    Mutant("asks", after("input()"), "input() does not work on a rank"),
    Mutant("leaves", after("raise SystemExit"), "called sys.exit()"),
]  # fmt: skip
ONE_FLAT = """
def average_gradients(model):
    import torch, torch.distributed as dist
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    for g, piece in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(piece.view_as(g))
"""
RIGHT_AFTER = [
    ONE_FLAT,
    after("got = [torch.empty_like(p.grad) for _ in range(n)]; dist.all_gather(got, p.grad)\np.grad = sum(got) / n"),
    after("dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)"),
]


@pytest.mark.every(3)
@pytest.mark.parametrize("mutant", WRONG_AFTER, ids=str)
def test_wrong_averages_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.average_gradients)


def test_right_averages_pass(pool: nbddp.Pool) -> None:
    assert check.average_gradients(solution("05", "average_gradients"))
    for source in RIGHT_AFTER:
        assert check.average_gradients(defined(source, "average_gradients")), source
    assert "nothing was exchanged" in check.average_gradients(exercise("05", "average_gradients")).line


# -- attach_averaging ------------------------------------------------------------------------

HOOKS = """
def attach_averaging(model):
    import torch, torch.distributed as dist
    n = dist.get_world_size()
    def average(p):
        {body}
    for p in model.parameters():
        p.{register}(average)
"""


def hooks(body: str, register: str = "register_post_accumulate_grad_hook") -> str:
    return HOOKS.format(body=body, register=register)


WRONG_HOOKS = [
    Mutant("as it is", hooks("dist.all_reduce(p.data); p.data /= n"),
           "rank 0, layer 0.weight: yours is this rank's own gradient: you averaged the parameters: this hook"),
    Mutant("a copy", hooks("g = p.grad.clone(); dist.all_reduce(g); g /= n"), "nothing was exchanged: is the"),
    Mutant("sum only", hooks("dist.all_reduce(p.grad)"), "2.00 × the reference: you summed but did not divide"),
    Mutant("none", hooks("pass"), "nothing was exchanged: is the hook there?"),
    Mutant("divides only", hooks("p.grad /= n"), "you divided but did not sum"),
    Mutant("the last only", hooks(MEAN_OF).replace("        p.reg", "        pass\n    p.reg"),
           "rank 0, layer 0.weight: yours is this rank's own gradient: 2.bias is right, but this layer was left out"),
    Mutant("the loop's own p", hooks(MEAN_OF).replace("average(p):", "average(_):"),
           "2.bias is right, but this layer was left out; use the parameter that the hook receives"),
    Mutant("returns", hooks("return p.grad / n"), "hooks should return None; change p.grad in place instead"),
    Mutant("too often", hooks("[dist.all_reduce(p.grad) for _ in range(n + 1)]; p.grad /= n"), "it was summed more"),
    Mutant("at once", hooks(MEAN_OF).replace("(average)", "(average(p))"), ".grad is None before backward"),
    Mutant("both", hooks(MEAN_OF + "; dist.all_reduce(p.data); p.data /= n"),
           "gradients are right, but you averaged the parameters"),
    Mutant("not implemented", "def attach_averaging(model):\n    raise NotImplementedError", "is still to be written"),
]  # fmt: skip
RIGHT_HOOKS = [
    hooks("g = p.clone(); dist.all_reduce(g); return g / n", "register_hook"),
    hooks("p.grad.div_(n); dist.all_reduce(p.grad)"),
]


@pytest.mark.parametrize("mutant", WRONG_HOOKS, ids=str)
def test_wrong_hooks_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.attach_averaging)


def test_right_hooks_pass(pool: nbddp.Pool) -> None:
    assert check.attach_averaging(solution("05", "attach_averaging"))
    for source in RIGHT_HOOKS:
        assert check.attach_averaging(defined(source, "attach_averaging")), source
    assert "this hook receives the parameter" in check.attach_averaging(exercise("05", "attach_averaging")).line


def test_the_line_does_not_depend_on_who_is_first(pool: nbddp.Pool) -> None:
    """Where all ranks fail, which is first is by chance; one that is done early breaks no connection."""
    lines = {check.average_gradients(defined(WRONG_AFTER[-3].source, "average_gradients")).line for _ in range(4)}
    assert len(lines) == 1
    early = after("if dist.get_rank(): dist.all_reduce(p.grad)")
    assert check.average_gradients(defined(early, "average_gradients")).line.startswith("deadlock: rank 1 waits in")
