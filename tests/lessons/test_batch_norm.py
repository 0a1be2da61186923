"""Lesson 07: merged moments and the listed ways to normalise against closed forms and PyTorch, and the checks of its
two exercises on real ranks with unequal shards."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import batch_norm

import nbddp
from nbddp.lessons.l07_batch_norm import norms
from nbddp.lessons.l07_batch_norm.figure import draw_moments
from nbddp.lessons.l07_batch_norm.simulation import UNEQUAL, sharded, two
from nbddp.teach import check, explore, predict
from tests.kernels import Kernel
from tests.lessons.answers import Mutant, builder, cells, defined, exercise, solution


def test_words_say_what_averaging_variances_lacks() -> None:
    made = sharded(8, 2, 20, UNEQUAL)
    assert made.head() == "2 ranks with 8 and 4 samples"
    assert sharded(4, 4).head() == "4 ranks with 4 samples each"
    assert sharded(4, 1).head() == "1 rank with 4 samples"
    assert made.verdict().startswith("mean of the variances: 0.96, 47 % less than the variance of the whole\n")
    assert made.verdict().endswith("with the ranks' own: +0.78, -1.27")
    assert sharded(4, 1).verdict() == "one rank has the whole batch: nothing to merge"
    assert two(-0.001) == "0.00"


def test_two_samples_per_rank_are_further_off_than_thirty_two() -> None:
    few, many = (max(abs(made.becomes(r)) for r in range(4)) for made in (sharded(2, 4), sharded(32, 4)))
    assert few > 2 * many
    assert predict.worse_number_of_samples.question.came == "2"
    alone, apart = (explore.statistics().show(**s).words for s in explore.statistics().settings)
    assert "nothing to merge" in alone
    assert "47 % less than the variance of the whole" in apart


def test_the_figure_has_a_row_for_each_rank_and_two_for_the_whole() -> None:
    made = sharded(4, 4)
    shown = draw_moments(made)
    texts = [t.get_text() for t in shown.figure.axes[0].texts]
    assert [t for t in texts if t.startswith("rank ")] == [f"rank {r}" for r in range(4)]
    assert "variance 0.76" in texts
    assert "mean −0.69 · variance 0.20" in texts
    assert shown.words == made.words()
    assert all(t.get_fontsize() >= 6.5 for t in shown.figure.axes[0].texts)


# -- the reference, and that no two ways look alike -------------------------------------------


@pytest.mark.parametrize("ranks", range(2, 9))
def test_the_reference_is_pytorchs_batch_norm_of_the_whole_batch(ranks: int) -> None:
    shards, weights = norms.shards_for(ranks), norms.shards_for(ranks, seed=1)
    assert len({len(s) for s in shards}) > 1
    whole = torch.tensor([row for s in shards for row in s], dtype=torch.float64, requires_grad=True)
    w = torch.tensor([row for s in weights for row in s], dtype=torch.float64)
    y = batch_norm(whole, None, None, training=True, eps=norms.EPS)
    (y * w).sum().backward()  # type: ignore[no-untyped-call]
    assert whole.grad is not None
    for f in range(norms.FEATURES):
        columns = norms.feature(shards, f)
        mine = norms.forward(columns, norms.MEANS[0], norms.VARIANCES[0], norms.SCALES[0][1])
        slopes = norms.gradients(columns, norms.feature(weights, f), norms.GRADIENTS[0])
        assert [v for rank in mine for v in rank] == pytest.approx(y[:, f].tolist(), abs=1e-9)
        assert [v for rank in slopes for v in rank] == pytest.approx(whole.grad[:, f].tolist(), abs=1e-9)


# -- batch_statistics ------------------------------------------------------------------------

HEAD = """
    import torch, torch.distributed as dist
    rank = lambda: dist.get_rank()
    world = lambda: dist.get_world_size()
    def total(t):
        t = torch.as_tensor(t, dtype=torch.float32).clone(); dist.all_reduce(t); return t
    def batch_statistics(x):
        n, own_n = total(len(x)), len(x)
        s, q = total(x.sum(0)), total((x * x).sum(0))
        mean = s / n
        var = q / n - mean**2
        own, own_var = x.mean(0), x.var(0, unbiased=False)
"""
WRONG_STATISTICS = [
    Mutant("own", "return own, own_var", "rank 0, mean of feature 0: expected"),
    Mutant("own words", "return own, own_var", "it is of the rank's own samples; add up sums and counts"),
    Mutant("means averaged", "return total(own) / world(), var", "so it is not the mean of the ranks' means"),
    Mutant("own count", "return s / own_n, var", "is divided by the rank's own count; add up the counts too"),
    Mutant("equal counts", "return s / (own_n * world()), var", "world size × the rank's own count"),
    Mutant("sums", "return s, var", "is not divided by the number of samples"),
    Mutant("variances averaged", "return mean, total(own_var) / world()", "the variances are averaged: that leaves"),
    Mutant("variances weighed", "return mean, total(own_var * own_n) / n", "the variances are averaged: that leaves"),
    Mutant("own variance", "return mean, own_var", "variance of feature 0: expected"),
    Mutant("unbiased", "return mean, var * n / (n - 1)", "it divides by n − 1, but batch norm divides by n"),
    Mutant("averaged unbiased", "return mean, total(x.var(0)) / world()", "and n − 1 is for estimates"),
    Mutant("squares", "return mean, q / n", "subtract the square of the mean from"),
    Mutant("squares by own count", "return mean, q / own_n - mean**2", "the sum of squares over all ranks is divided"),
    Mutant("centred by own count", "return mean, total(((x - mean)**2).sum(0)) / own_n", "the sum of squares over all"),
    Mutant("deviation", "return mean, var.sqrt()", "that is the standard deviation; return its square"),
    Mutant("variances added", "return mean, total(own_var)", "the ranks' variances are added up"),
    Mutant("sums squared", "return mean, total(x.sum(0) ** 2) / n - mean**2", "each rank's sum is squared instead"),
    Mutant("misplaced bracket", "return mean, q / n - s / n**2", "the square of the mean is (sum / n) ** 2, not"),
    Mutant("turned", "return mean, mean**2 - q / n", "variance of feature 0: expected"),
    Mutant("swapped", "return var, mean", "that is the variance; return the mean first"),
    Mutant("all numbers", "return s / total(x.numel()), var", "the count is the number of values (samples × features)"),
    Mutant("features", "return s / total(x.shape[1]), var", "the count is the number of features;"),
    Mutant("by ranks", "return s / world(), var", "divided by the number of ranks, not of samples"),
    Mutant("by 16", "return s / 20, var", "the sum of all samples is divided by 20, and there are 8"),
    Mutant("own around all", "return mean, ((x - mean)**2).mean(0)", "though around the mean of all"),
    Mutant("distances", "return mean, total(((x - mean)**2).sum(0))", "squared distances is not divided by the number"),
    Mutant("mean distances", "return mean, total(((x - mean)**2).mean(0)) / world()", "the ranks' mean squares are"),
    Mutant("one number", "return mean", "rank 0 returned [1.550, 0.585]; return a pair"),
    Mutant("over features", "return mean.mean(), var.mean()", "return a pair, means and variances, each of shape"),
    Mutant("one rank", "return (mean, var) if rank() == 0 else None", "rank 1 returned None; return a pair"),
    Mutant("alone", "if rank() == 0: total(0)\n        return mean, var", "deadlock: rank 0 waits in all_reduce"),
    Mutant("unwritten", "...", "still to be written"),
]  # fmt: skip
RIGHT_STATISTICS = [
    HEAD + "        return mean, total(((x - mean)**2).sum(0)) / n\n",
    HEAD + """
        everyone = [None] * world()
        dist.all_gather_object(everyone, x)
        whole = torch.cat(everyone)
        return whole.mean(0), whole.var(0, unbiased=False)
    """,
    HEAD + """
        everyone = [None] * world()
        dist.all_gather_object(everyone, (own_n, own, own_var))
        na, ma, va = everyone[0]
        for nb, mb, vb in everyone[1:]:
            va = (na * va + nb * vb) / (na + nb) + na * nb / (na + nb) ** 2 * (mb - ma) ** 2
            ma, na = (na * ma + nb * mb) / (na + nb), na + nb
        return ma, va
    """,
]  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize("mutant", WRONG_STATISTICS, ids=str)
def test_wrong_statistics_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    Mutant(mutant.name, HEAD + "        " + mutant.source + "\n", mutant.says).meets(check.batch_statistics)


def test_right_statistics_pass(pool: nbddp.Pool) -> None:
    assert check.batch_statistics(solution("07", "batch_statistics"))
    for source in RIGHT_STATISTICS:
        assert check.batch_statistics(defined(source, "batch_statistics")), source
    assert "still to be written" in check.batch_statistics(exercise("07", "batch_statistics")).line


# -- sync_batch_norm -------------------------------------------------------------------------

NORM = """
    import warnings
    import torch, torch.distributed as dist
    warnings.simplefilter("ignore")
    world = lambda: dist.get_world_size()
    def reduced(t):
        t = torch.as_tensor(t, dtype=torch.float32).clone(); dist.all_reduce(t); return t
    def summed(back):
        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx, t): return reduced(t)
            @staticmethod
            def backward(ctx, g): return back(g)
        return Sum.apply
    right = summed(reduced)
    def normal(x, eps, total, variance_too=True):
        n = reduced(len(x))
        mean = total(x.sum(0)) / n
        var = total((x * x).sum(0)) / n - mean**2 if variance_too else (
            reduced((x.detach() ** 2).sum(0)) / n - mean.detach() ** 2)
        return (x - mean) / torch.sqrt(var + eps)
    def sync_batch_norm(x, eps):
        n = reduced(len(x))
        with torch.no_grad():
            mean = reduced(x.sum(0)) / n
            var = reduced((x * x).sum(0)) / n - mean**2
        own, own_var = x.mean(0), x.var(0, unbiased=False)
"""
THROUGH = "outputs are right; rank 0, gradient of sample 0, feature 0: expected"
WRONG_NORMS = [
    Mutant("plain batch norm", "return torch.nn.functional.batch_norm(x, None, None, training=True, eps=eps)",
           "the mean: it is of the rank's own samples; add up sums and counts over all ranks; the variance: it is of"),
    Mutant("variances averaged", "return (x - mean) / (reduced(own_var) / world() + eps).sqrt()",
           "shards of 3 and 5 samples: rank 0, output of sample 0, feature 0: expected"),
    Mutant("variances averaged, why", "return (x - mean) / (reduced(own_var) / world() + eps).sqrt()",
           "; the variance: the variances are averaged: that leaves out the distance between the ranks' means"),
    Mutant("all averaged", "return (x - reduced(own) / world()) / (reduced(own_var) / world() + eps).sqrt()",
           "the mean: ranks have different numbers of samples"),
    Mutant("own count", "return (x - mean * n / len(x)) / (var + eps).sqrt()", "is divided by the rank's own count"),
    Mutant("unbiased", "return (x - mean) / (var * n / (n - 1) + eps).sqrt()", "the variance: it divides by n − 1"),
    Mutant("eps outside", "return (x - mean) / (var.sqrt() + eps)", "the scale: eps belongs under the root"),
    Mutant("own eps", "return (x - mean) / (var + 1e-5).sqrt()", "the scale: eps is left out or is not the argument"),
    Mutant("variance for root", "return (x - mean) / (var + eps)", "it is divided by the variance; divide by its"),
    Mutant("not centred", "return x / (var + eps).sqrt()", "the mean: it is taken as 0"),
    Mutant("not scaled", "return x - mean", "; the scale: divide by sqrt(variance + eps)"),
    Mutant("constants", "return (x - mean) / (var + eps).sqrt()",
           "the gradient must go through the statistics too: here mean and variance are constants"),
    Mutant("constants, where", "return (x - mean) / (var + eps).sqrt()", THROUGH),
    Mutant("plain all_reduce", "return normal(x, eps, reduced)",
           "it contains only this rank's outputs, not the other ranks'; autograd does not see"),
    Mutant("identity backward", "return normal(x, eps, summed(lambda g: g))", "it contains only this rank's outputs"),
    Mutant("averaged backward", "return normal(x, eps, summed(lambda g: reduced(g) / world()))",
           "is divided by the world size: in backward the gradients of all ranks are added up, not averaged"),
    Mutant("own part averaged", "return normal(x, eps, summed(lambda g: g / world()))",
           "is the rank's own, over the world size"),
    Mutant("twice", "return normal(x, eps, summed(lambda g: reduced(reduced(g))))", "it is summed twice"),
    Mutant("own part scaled", "return normal(x, eps, summed(lambda g: g * world()))", "own times the world size"),
    Mutant("no variance", "return normal(x, eps, right, variance_too=False)", "through the variance is missing"),
    Mutant("no mean", "v = right(((x - mean) ** 2).sum(0)) / n; return (x - mean) / (v + eps).sqrt()",
           "the contribution through the mean is missing"),
    Mutant("divided by own count in backward",
           "class F(torch.autograd.Function):\n"
           "            @staticmethod\n"
           "            def forward(ctx, x):\n"
           "                ctx.y, ctx.s = (x - mean) / (var + eps).sqrt(), (var + eps).sqrt()\n"
           "                return ctx.y\n"
           "            @staticmethod\n"
           "            def backward(ctx, g):\n"
           "                k = len(g)\n"
           "                return (g - reduced(g.sum(0)) / k - ctx.y * reduced((g * ctx.y).sum(0)) / k) / ctx.s\n"
           "        return F.apply(x)",
           "the sums over all ranks are divided by the rank's own count, not by the whole batch's"),
    Mutant("torch's backward of the own batch",
           "class F(torch.autograd.Function):\n"
           "            @staticmethod\n"
           "            def forward(ctx, x):\n"
           "                ctx.y, ctx.s = (x - mean) / (var + eps).sqrt(), (var + eps).sqrt()\n"
           "                return ctx.y\n"
           "            @staticmethod\n"
           "            def backward(ctx, g):\n"
           "                return (g - g.mean(0) - ctx.y * (g * ctx.y).mean(0)) / ctx.s\n"
           "        return F.apply(x)",
           "it treats the rank's own samples as the whole batch"),
    Mutant("detached", "return ((x - mean) / (var + eps).sqrt()).detach()",
           "rank 0, x gets no gradient: is it detached"),
    Mutant("halved", "y = normal(x, eps, right); return y.detach() + (y - y.detach()) / 2",
           "all gradients are 0.50 × the right ones"),
    Mutant("numpy", "return normal(x, eps, right).detach().numpy()", "outputs are right; rank 0 does not return"),
    Mutant("nothing returned", "return normal(x, eps, summed(reduced and (lambda g: None)))", "backward returns"),
    Mutant("forward", "return normal(x, eps, right.__self__.forward)", "an autograd Function is called by its .apply"),
    Mutant("one sum plain", "m, q = right(x.sum(0)) / n, reduced((x * x).sum(0)) / n; "
           "return (x - m) / (q - m**2 + eps).sqrt()", "look at the backward of each sum"),
    Mutant("in place", "x -= mean; return x", "in-place operation; make a new tensor, such as x - m"),
    Mutant("own count alone", "k = len(x); m, q = right(x.sum(0)) / k, right((x * x).sum(0)) / k; "
           "return (x - m) / (q - m**2 - 9).sqrt()", "that is the root of a negative variance"),
    Mutant("mean alone", "return mean", "rank 0: return a tensor of the shape of x, (3, 2)"),
    Mutant("layer", "return torch.nn.SyncBatchNorm(2, affine=False)(x)", "SyncBatchNorm expected input tensor to be"),
    Mutant("one rank's backward", "return normal(x, eps, summed(lambda g: reduced(g) if dist.get_rank() else g))",
           "deadlock: rank 1 waits in all_reduce"),
    Mutant("unwritten", "...", "still to be written"),
]  # fmt: skip
RIGHT_NORMS = [
    NORM + "        return normal(x, eps, right)\n",
    NORM + """
        import torch.distributed._functional_collectives as fc
        return normal(x, eps, lambda t: fc.all_reduce(t, "sum", dist.group.WORLD))
    """,
    NORM + """
        class F(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.y, ctx.s = (x - mean) / (var + eps).sqrt(), (var + eps).sqrt()
                return ctx.y
            @staticmethod
            def backward(ctx, g):
                return (g - reduced(g.sum(0)) / n - ctx.y * reduced((g * ctx.y).sum(0)) / n) / ctx.s
        return F.apply(x)
    """,
]  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize("mutant", WRONG_NORMS, ids=str)
def test_wrong_norms_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    Mutant(mutant.name, NORM + "        " + mutant.source + "\n", mutant.says).meets(check.sync_batch_norm)


def test_right_norms_pass(pool: nbddp.Pool) -> None:
    assert check.sync_batch_norm(solution("07", "sync_batch_norm"))
    for source in RIGHT_NORMS:
        assert check.sync_batch_norm(defined(source, "sync_batch_norm")), source
    assert "still to be written" in check.sync_batch_norm(exercise("07", "sync_batch_norm")).line


# -- the lesson ------------------------------------------------------------------------------

HANGS = """
def hangs(*args):
    import torch.distributed as dist
    dist.get_rank() and dist.barrier()
check.{}(hangs)
"""


@pytest.mark.more
def test_after_an_answer_that_hangs_the_rest_of_the_lesson_works(four: Kernel) -> None:
    for cell in builder().solved(cells("07")):
        if cell.kind == "markdown" or cell.text.startswith(("%load_ext", "%ddp stop")):
            continue
        shown = four.run(cell.text)
        assert shown.ok != ("raises-exception" in cell.tags), f"{cell.text}\n{shown.error or shown.text()}"
        if cell.text.startswith("check.") or "\ncheck." in cell.text:
            name = cell.text.split("check.")[1].partition("(")[0]
            assert "deadlock: " in four.run(HANGS.format(name)).text()
