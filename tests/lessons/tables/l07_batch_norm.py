"""Lesson 07: answers to its exercises, wrong and right."""

from __future__ import annotations

from tests.lessons.tables import Table, within

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
BATCH_STATISTICS = Table("batch_statistics", within(HEAD + "        ...\n"), every=3, wrong={
    "return own, own_var": "rank 0, mean of feature 0, expected",
    "return total(own) / world(), var": "so it is not the mean of the ranks' means",
    "return s / own_n, var": "is divided by the rank's own count; add up the counts too",
    "return s / (own_n * world()), var": "world size × the rank's own count",
    "return s, var": "is not divided by the number of samples",
    "return mean, total(own_var) / world()": "the variances are averaged: that leaves",
    "return mean, var * n / (n - 1)": "it divides by n − 1, but batch norm divides by n",
    "return mean, total(x.var(0)) / world()": "and n − 1 is for estimates",
    "return mean, q / n": "subtract the square of the mean from",
    "return mean, total(((x - mean)**2).sum(0)) / own_n": "the sum of squares over all",
    "return mean, var.sqrt()": "that is the standard deviation; return its square",
    "return mean, total(own_var)": "the ranks' variances are added up",
    "return mean, total(x.sum(0) ** 2) / n - mean**2": "each rank's sum is squared instead",
    "return mean, q / n - s / n**2": "the square of the mean is (sum / n) ** 2, not",
    "return mean, mean**2 - q / n": "variance of feature 0, expected",
    "return var, mean": "that is the variance; return the mean first",
    "return s / total(x.numel()), var": "the count is the number of values (samples × features)",
    "return s / total(x.shape[1]), var": "the count is the number of features;",
    "return s / world(), var": "divided by the number of ranks, not of samples",
    "return mean, ((x - mean)**2).mean(0)": "though around the mean of all",
    "return mean, total(((x - mean)**2).sum(0))": "squared distances is not divided by the number",
    "return mean, total(((x - mean)**2).mean(0)) / world()": "the ranks' mean squares are",
    "return mean": "rank 0 returned [1.550, 0.585]; return a pair",
    "return mean.mean(), var.mean()": "return a pair, means and variances, each of shape",
    "return (mean, var) if rank() == 0 else None": "rank 1 returned None; return a pair",
    "if rank() == 0: total(0)\n        return mean, var": "deadlock: rank 0 waits in all_reduce",
    "return s / 20, var": "the sum of all samples is divided by 20, and there are 8",
}, right=[
    "return mean, total(((x - mean)**2).sum(0)) / n",
    """
        everyone = [None] * world()
        dist.all_gather_object(everyone, x)
        whole = torch.cat(everyone)
        return whole.mean(0), whole.var(0, unbiased=False)
    """,
    """
        everyone = [None] * world()
        dist.all_gather_object(everyone, (own_n, own, own_var))
        na, ma, va = everyone[0]
        for nb, mb, vb in everyone[1:]:
            va = (na * va + nb * vb) / (na + nb) + na * nb / (na + nb) ** 2 * (mb - ma) ** 2
            ma, na = (na * ma + nb * mb) / (na + nb), na + nb
        return ma, va
    """,
])  # fmt: skip

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
SYNC_BATCH_NORM = Table("sync_batch_norm", within(NORM + "        ...\n"), every=3, wrong={
    "return torch.nn.functional.batch_norm(x, None, None, training=True, eps=eps)":
        "the mean: it is of the rank's own samples; add up sums and counts over all ranks; the variance: it is of",
    "return (x - mean) / (reduced(own_var) / world() + eps).sqrt()":
        ("shards of 3 and 5 samples: rank 0, output of sample 0, feature 0: expected", "; the variance: the "
        "variances are averaged: that omits the distance between the ranks' means"),
    "return (x - reduced(own) / world()) / (reduced(own_var) / world() + eps).sqrt()":
        "the mean: ranks have different numbers of samples",
    "return (x - mean * n / len(x)) / (var + eps).sqrt()": "is divided by the rank's own count",
    "return (x - mean) / (var * n / (n - 1) + eps).sqrt()": "the variance: it divides by n − 1",
    "return (x - mean) / (var.sqrt() + eps)": "the scale: eps belongs under the root",
    "return (x - mean) / (var + 1e-5).sqrt()": "the scale: eps is missing or is not the argument",
    "return (x - mean) / (var + eps)": "it is divided by the variance; divide by its",
    "return x / (var + eps).sqrt()": "the mean: it is taken as 0",
    "return x - mean": "; the scale: divide by sqrt(variance + eps)",
    "return (x - mean) / (var + eps).sqrt()":
        "the gradient must go through the statistics too: here mean and variance are constants",
    "return normal(x, eps, reduced)":
        "it contains only this rank's outputs, not the other ranks'; autograd does not see",
    "return normal(x, eps, summed(lambda g: reduced(g) / world()))":
        "is divided by the world size: in backward the gradients of all ranks are added up, not averaged",
    "return normal(x, eps, summed(lambda g: g / world()))": "is the rank's own, over the world size",
    "return normal(x, eps, summed(lambda g: reduced(reduced(g))))": "it is summed twice",
    "return normal(x, eps, summed(lambda g: g * world()))": "own times the world size",
    "return normal(x, eps, right, variance_too=False)": "through the variance is missing",
    "v = right(((x - mean) ** 2).sum(0)) / n; return (x - mean) / (v + eps).sqrt()":
        "the contribution through the mean is missing",
    "class F(torch.autograd.Function):\n            @staticmethod\n            def forward(ctx, x):\n"
    "                ctx.y, ctx.s = (x - mean) / (var + eps).sqrt(), (var + eps).sqrt()\n"
    "                return ctx.y\n            @staticmethod\n            def backward(ctx, g):\n"
    "                k = len(g)\n                return (g - reduced(g.sum(0)) / k - ctx.y * reduced((g * "
    "ctx.y).sum(0)) / k) / ctx.s\n        return F.apply(x)":
        "the sums over all ranks are divided by the rank's own count, not by the whole batch's",
    "class F(torch.autograd.Function):\n            @staticmethod\n            def forward(ctx, x):\n"
    "                ctx.y, ctx.s = (x - mean) / (var + eps).sqrt(), (var + eps).sqrt()\n"
    "                return ctx.y\n            @staticmethod\n            def backward(ctx, g):\n"
    "                return (g - g.mean(0) - ctx.y * (g * ctx.y).mean(0)) / ctx.s\n        return F.apply(x)":
        "it treats the rank's own samples as the whole batch",
    "return ((x - mean) / (var + eps).sqrt()).detach()": "rank 0, x gets no gradient: is it detached",
    "y = normal(x, eps, right); return y.detach() + (y - y.detach()) / 2":
        "all gradients are 0.50 × the right ones",
    "return normal(x, eps, right).detach().numpy()": "outputs are right; rank 0 does not return",
    "return normal(x, eps, right.__self__.forward)": "an autograd Function is called by its .apply",
    "m, q = right(x.sum(0)) / n, reduced((x * x).sum(0)) / n; return (x - m) / (q - m**2 + eps).sqrt()":
        "check the backward of each sum",
    "x -= mean; return x": "in-place operation; make a new tensor, such as x - m",
    "k = len(x); m, q = right(x.sum(0)) / k, right((x * x).sum(0)) / k; return (x - m) / (q - m**2 - 9).sqrt()":
        "that is the root of a negative variance",
    "return mean": "rank 0: return a tensor of the shape of x, (3, 2)",
    "return torch.nn.SyncBatchNorm(2, affine=False)(x)": "SyncBatchNorm expected input tensor to be",
    "return normal(x, eps, summed(lambda g: reduced(g) if dist.get_rank() else g))":
        "deadlock: rank 1 waits in all_reduce",
    "return normal(x, eps, summed(reduced and (lambda g: None)))": "backward returns",
}, right=[
    "return normal(x, eps, right)",
    """
        import torch.distributed._functional_collectives as fc
        return normal(x, eps, lambda t: fc.all_reduce(t, "sum", dist.group.WORLD))
    """,
    """
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
])  # fmt: skip
