# %% [markdown]
# # Batch norm across ranks
#
# Most layers treat each sample separately, so it does not matter on which rank a sample is. Batch norm depends on the whole batch, and with DDP no rank has the whole batch.
#
# **After this lesson you can**
#
# - explain what batch norm computes under DDP, and when that is a problem;
# - merge the statistics of several ranks;
# - write a synchronized batch norm whose outputs and gradients equal those of one process with the whole batch.

# %%
# %load_ext nbddp

# %% [markdown]
# ## Statistics per rank
#
# In training, batch norm subtracts a feature's mean over the batch and divides by its standard deviation. Each of four ranks gets four
# samples of a batch of sixteen. We compare its outputs with those of one process that has all sixteen. (For layers that treat each sample
# separately, DDP's gradients are those of the whole batch.)

# %% tags=["prediction", "hidden"]
from nbddp.teach import predict

predict.outputs_of_the_whole_batch()

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
# Each rank normalizes with the four samples it has. Nothing is broken, and DDP averages gradients as always. But the result differs from that of one
# process, and it changes with the number of GPUs.
#
# How much does it matter? The explorer compares the ranks' statistics with those of the whole batch. `shift` moves the values of each rank, as if the ranks read different kinds of data.

# %% tags=["prediction", "hidden"]
predict.worse_number_of_samples()

# %% tags=["prediction", "hidden"]
predict.averaged_variances()

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.statistics()

# %% [markdown]
# Move the sliders (without a mouse: Tab, then ← and →).
#
# - With few samples per rank, the statistics are noise. The last line shows how the ranks normalize one and the same value.
# - With many samples of the same kind, the ranks' statistics agree, and each rank's own are good enough. This is the usual case in image classification, and the reason why DDP does not synchronize
#   batch norm. In detection, segmentation or video, a GPU often has only two or four samples.
# - The dashed band is the result of averaging the variances. It is too narrow, because it ignores the distance between the means.
#
# The merged variance includes this distance. For two shards of *n*₁ and *n*₂ samples, with means *m*₁ and *m*₂, variances *v*₁ and *v*₂, and *n* = *n*₁ + *n*₂:
#
# > *v* = (*n*₁ *v*₁ + *n*₂ *v*₂) / *n* + *n*₁ *n*₂ / *n*² × (*m*₂ − *m*₁)²
#
# ## SyncBatchNorm, and where it runs
#
# PyTorch has a layer that merges the statistics. One line replaces every batch norm of a model with it. Rank 0 then calls its forward, on a CPU.

# %% tags=["prediction", "hidden"]
predict.sync_batch_norm_on_a_cpu()

# %% tags=["raises-exception"]
# %%ddp --show 0
synced = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
print(type(synced[1]).__name__)
if rank == 0:
    synced(mine)

# %% [markdown]
# PyTorch converts the model, but the forward raises an error: it supports only GPUs and a few other accelerators. So we write the layer ourselves, which also shows what it does.
#
# ## Exercise: the statistics of the whole batch
#
# `x` contains this rank's samples and has shape (samples, features). Ranks may have different numbers of samples. Return, on every rank, the mean and the variance of
# each feature over the samples of all ranks. The variance divides by *n*, as in batch norm. The check creates the process group.


# %% tags=["exercise"]
def batch_statistics(x):
    """Mean and variance of each feature over all samples of all ranks, both of shape (features,)."""
    ...  # your code


# %%
from nbddp.teach import check

check.batch_statistics(batch_statistics)

# %% [markdown]
# Stuck? `check.batch_statistics(batch_statistics, hint=True)` gives a hint, and another one each time you run it.


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
# Mean and variance depend on every sample. So a sample's gradient comes through its own output and, through mean and variance, from all other outputs too, including those
# on *other ranks*.
#
# In the next cell each rank has a number `x`, and `total` is the sum over the four ranks. Rank *r*'s loss is (*r* + 1) × total. All losses together are
# (1 + 2 + 3 + 4) × total, so the gradient of each `x` should be 10.

# %% tags=["prediction", "hidden"]
predict.gradient_on_rank_3()

# %%
# %%ddp
import warnings

warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered")
dist.init_process_group()
x = torch.ones(1, requires_grad=True)
total = x.clone()
dist.all_reduce(total)
((rank + 1) * total).backward()
print(f"total {total.item():.0f}, gradient {x.grad.item():.0f}")

# %% [markdown]
# The total is right, and the gradient is wrong. `all_reduce` writes into a tensor's memory, and autograd does not see it. So each rank gets
# the gradient of its own loss alone. There is no error. PyTorch 2.13 warns once per process, and the warning is easily overlooked. No
# autograd kernel is registered for `allreduce_`, which "may lead to silently incorrect behavior".
#
# What should backward do? Each rank has the gradient of its own loss with respect to `total`. The gradient of the sum of all losses is the
# sum of these gradients. So **the backward of an all-reduce that sums is an all-reduce that sums**. You can implement this as a
# `torch.autograd.Function`. Write one as the static method `forward(ctx, t)` and the other as the static method `backward(ctx, grad)`;
# `.apply` calls it.
#
# ## Exercise: synchronized batch norm
#
# Return (x − mean) / √(variance + eps) with the statistics of the whole batch. The check compares the outputs with those of one process that has the whole
# batch. Then it calls `backward` on all ranks, and compares the gradients of `x` for the sum of all ranks' losses.


# %% tags=["exercise"]
def sync_batch_norm(x, eps):
    """x of shape (samples, features), normalized by the statistics of all ranks' samples; differentiable."""
    ...  # your code


# %%
check.sync_batch_norm(sync_batch_norm)


# %% tags=["solution"]
def sync_batch_norm(x, eps):
    """x of shape (samples, features), normalized by the statistics of all ranks' samples; differentiable."""
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
# A complete layer does three more things:
#
# - It scales and shifts its output by a weight and a bias. These are ordinary parameters, whose gradients DDP averages.
# - It keeps running statistics for evaluation. Here they are merged, and equal on all ranks.
# - It merges means and variances by the formula above. Subtracting squares loses digits if the mean is large.
#
# Running statistics are the one trap of the *plain* layer under DDP. They are buffers. The next cell runs one training forward, so each rank updates
# its running mean from its own samples. Then it runs another forward, in evaluation mode.

# %% tags=["prediction", "hidden"]
predict.running_mean_after_the_next_forward()

# %%
# %%ddp
dist.init_process_group()
model = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(2))
model(mine)
before = model.module.running_mean[0].item()
model.eval()(mine)
print(f"running mean {before:+.3f}, after the next forward {model.module.running_mean[0].item():+.3f}")

# %% [markdown]
# DDP copies the buffers of rank 0 to all ranks before a forward. This overwrites the statistics of the other ranks, so an evaluation uses
# those of rank 0's samples alone.
#
# ## To remember
#
# - Under DDP, batch norm uses each rank's own samples. The result depends on the number of samples *per rank*, and the running statistics are rank 0's.
# - Merge variances, do not average them: the distance between the means is part of the variance. Add up counts, sums and sums of squares.
# - Autograd does not see `dist.all_reduce`. If a gradient must pass through it, write a function whose backward is an all-reduce too.
#
# ## On real GPUs
#
# Call `nn.SyncBatchNorm.convert_sync_batchnorm(model)` before you wrap the model in DDP, and compare its outputs and gradients with those of your function. Then measure a step with and without it. Every batch norm is
# now a collective in forward and another in backward, and the next layer waits for it.
#
# ## Glossary
#
# - **batch statistics**: mean and variance of a feature over a batch.
# - **running statistics**: their moving average, which batch norm uses in evaluation.
# - **buffer**: a tensor of a module that is saved with it but not trained.
# - **merge**: to compute the statistics of a whole from those of its parts.
# - **autograd**: PyTorch's automatic differentiation.
#
# ## Further reading
#
# - S. Ioffe and C. Szegedy, [Batch Normalization](https://arxiv.org/abs/1502.03167), 2015.
# - T. F. Chan, G. H. Golub and R. J. LeVeque, [Updating formulae and a pairwise algorithm for computing sample
#   variances](http://i.stanford.edu/TR/CS-TR-79-773.html), Stanford University, 1979: the formula above.
# - [SyncBatchNorm](https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html).
# - [Extending PyTorch](https://docs.pytorch.org/docs/stable/notes/extending.html): how to write a `torch.autograd.Function`.

# %%
# %ddp stop
