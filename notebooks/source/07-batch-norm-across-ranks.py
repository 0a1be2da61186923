# %% [markdown]
# # Batch norm across ranks
#
# Most layers treat each sample by itself, so it does not matter to them on which rank a sample lies. Batch norm looks at the batch as a
# whole. With DDP no rank has that.
#
# **After this lesson you can** say what batch norm computes under DDP, when that does harm, and write a synchronised batch norm
# whose outputs and gradients are those of one process with the whole batch.

# %%
# %load_ext nbddp

# %% [markdown]
# ## Every rank has its own statistics
#
# In training, batch norm subtracts a feature's mean over the batch and divides by its standard deviation. We give each of four ranks four samples of
# a batch of sixteen, and compare with one process that has all sixteen.
#
# **Predict:** DDP gives the gradients of the whole batch. Does it give the outputs of the whole batch, too?

# %%
# %%ddp --nproc 4
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
batch = torch.randn(16, 2, generator=torch.Generator().manual_seed(7))  # the same on every rank
mine = batch[rank::world_size]

model = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(2))
whole = nn.BatchNorm1d(2)(batch)[rank::world_size]
off = (model(mine) - whole).abs().max().item()
print(f"mean of my samples {mine.mean(0)[0]:+.2f} · outputs differ by up to {off:.2f}")

# %% [markdown]
# No. Each rank normalised by the four samples that it had. Nothing is broken: gradients are averaged as always. But it is another computation than that
# of one process, and it changes with the number of GPUs.
#
# How much does it matter? **Predict:** two samples per rank or thirty-two, which is worse? And what if each rank reads another kind of data?

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.statistics()

# %% [markdown]
# Move the sliders (without a mouse: Tab, then ← and →). With few samples per rank the statistics are noise: the last line says what ranks make of one and the
# same value. With many samples of the same kind they agree, and each rank's own statistics do well. That is the
# usual case in image classification, and why DDP leaves batch norm alone. In detection, segmentation or video a GPU
# often holds only two or four samples.
#
# The dashed band is what comes of averaging the variances. It is too narrow, because it does not know how far apart the means lie. The merged variance
# has that part too. For two shards of *n*₁ and *n*₂ samples, with means *m*₁ and *m*₂, variances *v*₁ and *v*₂, and *n* = *n*₁ + *n*₂ (Chan, Golub and
# LeVeque, 1979):
#
# > *v* = (*n*₁ *v*₁ + *n*₂ *v*₂) / *n* + *n*₁ *n*₂ / *n*² × (*m*₂ − *m*₁)²
#
# ## SyncBatchNorm, and where it does not run
#
# PyTorch has a layer that merges. One line puts it in the place of every batch norm of a model. **Predict** whether it runs on a CPU.

# %% tags=["raises-exception"]
# %%ddp --show 0
synced = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
print(type(synced[1]).__name__)
if rank == 0:
    synced(mine)

# %% [markdown]
# The model is converted, and its forward refuses: the kernels are written for GPUs. So we write it ourselves, which is how one learns what it does.
#
# ## Exercise: the statistics of the whole batch
#
# `x` has this rank's samples, shape (samples, features); ranks may have different numbers of samples. Every rank is to return the mean and the variance of
# each feature over the samples of all ranks. The variance divides by *n*, as batch norm's does. The process group is there.


# %% tags=["exercise"]
def batch_statistics(x):
    """Mean and variance of each feature over all samples of all ranks, both of shape (features,)."""
    ...  # your code


# %%
from nbddp.teach import check

check.batch_statistics(batch_statistics)

# %% [markdown]
# Stuck? `check.batch_statistics(batch_statistics, hint=True)` gives a hint, and another one each time it is run.


# %% tags=["solution"]
def batch_statistics(x):
    """Mean and variance of each feature over all samples of all ranks, both of shape (features,)."""
    import torch
    import torch.distributed as dist

    sums = torch.cat([x.sum(0), (x * x).sum(0), x.new_tensor([len(x)])])
    dist.all_reduce(sums)
    features, n = x.shape[1], sums[-1]
    mean = sums[:features] / n
    return mean, sums[features:-1] / n - mean**2


# %% [markdown]
# ## What autograd does not see
#
# Mean and variance depend on every sample. So a sample's gradient comes through its own output, and through mean and variance also from all other outputs,
# those on *other ranks* too.
#
# Here each rank has a number `x`, and `total` is the sum over the four ranks. Rank *r*'s loss is (*r* + 1) × total. All losses together are
# (1 + 2 + 3 + 4) × total, so the gradient of each `x` is 10.
#
# **Predict** what autograd says.

# %%
# %%ddp
import warnings

warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered")
x = torch.ones(1, requires_grad=True)
total = x.clone()
dist.all_reduce(total)
((rank + 1) * total).backward()
print(f"total {total.item():.0f}, gradient {x.grad.item():.0f}")

# %% [markdown]
# The total is right and the gradient is wrong. `all_reduce` writes into a tensor's memory and autograd does not see it, so each rank got the
# gradient of its own loss alone. There is no error. PyTorch 2.13 gives a warning, once per process and easily lost among others: that no autograd kernel is
# registered for `allreduce_`, and that this "may lead to silently incorrect behavior". It does.
#
# What should happen in backward? Each rank holds the gradient of its own loss with respect to `total`. The gradient of all losses is the sum of these, so
# **the backward of an all-reduce that sums is an all-reduce that sums**. A `torch.autograd.Function` can say so: a static `forward(ctx, t)` with the one, a
# static `backward(ctx, grad)` with the other, and `.apply` to call it.
#
# ## Exercise: synchronised batch norm
#
# Return (x − mean) / √(variance + eps) with the statistics of the whole batch. The check compares outputs with one process that has the whole
# batch. Then it calls `backward` on all ranks and compares the gradients of `x`, for the sum of all ranks' losses.


# %% tags=["exercise"]
def sync_batch_norm(x, eps):
    """x of shape (samples, features), normalised by the statistics of all ranks' samples; differentiable."""
    ...  # your code


# %%
check.sync_batch_norm(sync_batch_norm)


# %% tags=["solution"]
def sync_batch_norm(x, eps):
    """x of shape (samples, features), normalised by the statistics of all ranks' samples; differentiable."""
    import torch
    import torch.distributed as dist

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            t = t.clone()
            dist.all_reduce(t)
            return t

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            dist.all_reduce(grad)
            return grad

    sums = Sum.apply(torch.cat([x.sum(0), (x * x).sum(0), x.new_tensor([len(x)])]))
    features, n = x.shape[1], sums[-1]
    mean = sums[:features] / n
    variance = sums[features:-1] / n - mean**2
    return (x - mean) / torch.sqrt(variance + eps)


# %% [markdown]
# Three things a full layer adds. It scales and shifts its output by a weight and a bias; these are ordinary parameters, whose gradients DDP averages. It keeps running
# statistics for evaluation, merged ones, the same on all ranks. And it merges means and variances by the formula above instead of
# subtracting squares, which loses digits where the mean is large.
#
# Running statistics are the one trap of the *plain* layer under DDP: they are buffers, and DDP copies rank 0's to all ranks at every forward of training. **Predict** what
# part of the data an evaluation of the model from the first cell would go by.

# %%
# %%ddp
before = model.module.running_mean[0].item()
model.eval()(mine)
print(f"running mean {before:+.3f}, after the next forward {model.module.running_mean[0].item():+.3f}")

# %% [markdown]
# Rank 0's. What the other ranks had gathered is overwritten.
#
# ## To remember
#
# - Under DDP batch norm uses each rank's own samples, so a model with it depends on the number of samples *per rank*; its running statistics are rank 0's.
# - Variances are merged, not averaged, because what lies between the means belongs to them: add up counts, sums and sums of squares.
# - `dist.all_reduce` is invisible to autograd; what a gradient must pass through needs a function whose backward is an all-reduce as well.
#
# **On real GPUs:** put `nn.SyncBatchNorm.convert_sync_batchnorm(model)` before the wrapping in DDP, and compare its output and gradients with your function's. Then
# measure a step with and without it: every batch norm is now a collective in forward and one in backward, and
# the layer after it has to wait for each.

# %%
# %ddp stop
