# %% [markdown]
# # Averaging gradients
#
# Data-parallel training has one idea. Every rank has the same model and computes gradients on its own part of the batch. The ranks average
# their gradients before each step. Everything else that DistributedDataParallel (DDP) does makes this fast.
#
# **After this lesson you can**
#
# - say why the average is right;
# - write it by hand;
# - say which tests detect a wrong average, and which do not;
# - say what DDP does when it is constructed and in every `backward()`.

# %%
# %load_ext nbddp

# %% [markdown]
# ## Four ranks, four shards
#
# A rank's part of the data is its **shard**. The batch below has 32 samples, and rank *r* takes every fourth of them, starting with sample *r*.
# The four shards are **disjoint**: no sample is in two of them. Together they are the batch.
#
# All ranks use the same seed, so their models start equal. Each rank computes the gradients of the mean loss over its own 8 samples. Beside it,
# every rank also computes what one process gets from all 32 samples.

# %% tags=["prediction", "hidden"]
from nbddp.teach import predict

predict.mean_of_four()

# %%
# %%ddp --nproc 4
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
x = torch.randn(32, 3)
y = x.sum(1, keepdim=True) + 0.1 * torch.randn(32, 1)
mine = slice(rank, None, world_size)


def new_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


net, whole = new_model(), new_model()
mse_loss(net(x[mine]), y[mine]).backward()
mse_loss(whole(x), y).backward()

own = net[0].weight.grad[0, 0]
mean = own.clone()
dist.all_reduce(mean)
mean /= world_size
print(f"own {own:.3f}, mean of all {mean:.3f}, one process with all the data {whole[0].weight.grad[0, 0]:.3f}")

# %% [markdown]
# The loss is a mean over samples, so its gradient is the mean of the samples' gradients. If shards have different sizes, the mean must be
# weighted by their sizes. A single rank's gradient can be far from the mean.
#
# ## What goes wrong without it
#
# The explorer trains a smaller model, a line *y = wx + b*. Each rank has its own points and, after some steps, its own line. The dotted
# line is one process trained on all points. The lower panels show the loss on all points, and the largest distance of any rank's (*w*, *b*)
# from rank 0's.

# %% tags=["prediction", "hidden"]
predict.distance_without_exchange()
predict.distance_from_own_starts()
predict.summed_gradients()

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.averaging()

# %% [markdown]
# Try the three cases:
#
# - **not exchanged**: each rank moves to the line that fits its own points. None of these lines fits all points.
# - **own starts**: averaging gradients does not make ranks equal. Therefore DDP **broadcasts** rank 0's parameters once before training.
# - **summed**: with four ranks every step is four times as long. You notice it only when you change the number of ranks.
#
# Equal ranks and a falling loss do not show that the average is right. Compare with one process on all the data instead. The check judges
# your function this way.
#
# ## Exercise: average the gradients
#
# The check calls your function on every rank after `backward()`. The optimizer then uses the value of `p.grad`.


# %% tags=["exercise"]
def average_gradients(model):
    """Put into each p.grad the mean of all ranks' p.grad."""
    import torch.distributed as dist

    ...  # your code


# %%
from nbddp.teach import check

check.average_gradients(average_gradients)


# %% tags=["solution"]
def average_gradients(model):
    """Put into each p.grad the mean of all ranks' p.grad."""
    import torch.distributed as dist

    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


# %% [markdown]
# ## Averaging during backward
#
# `backward()` computes gradients from the last layer to the first. When the gradient of a layer is ready, its all-reduce can start, while
# `backward()` still computes the layers before it. A **hook** is a function that PyTorch calls at such a moment. Register one for each parameter
# with `p.register_post_accumulate_grad_hook(hook)`.
#
# The next cell averages in a hook. It contains a bug that has occurred in real programs. Training runs, and the loss falls on all ranks.

# %%
# %%ddp
if not dist.is_initialized():  # an answer that failed ends the group
    dist.init_process_group()


def attach(model):
    def average(p):
        dist.all_reduce(p.data)
        p.data /= world_size

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(average)


net = new_model()
attach(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for _ in range(5):
    optimizer.zero_grad()
    loss = mse_loss(net(x[mine]), y[mine])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("the loss falls:", losses == sorted(losses, reverse=True))

# %% [markdown]
# `%ddp compare` compares every parameter of a model across the ranks.

# %% tags=["prediction", "hidden"]
predict.equal_after_the_hook()

# %%
# %ddp compare net

# %% [markdown]
# The hook ran for every parameter in every step, and the loss fell. Still the average is wrong.
#
# ## Exercise: find the bug
#
# 1. Say what is wrong.
# 2. Run the check on the function as it is, and see whether you were right.
# 3. Fix the function, so that `backward()` leaves the mean of the ranks' gradients in `p.grad` and changes nothing else.


# %% tags=["exercise"]
def attach_averaging(model):
    """Make every backward leave the mean of all ranks' gradients in p.grad."""
    import torch.distributed as dist

    def average(p):
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(average)


# %%
check.attach_averaging(attach_averaging)


# %% tags=["solution"]
def attach_averaging(model):
    """Make every backward leave the mean of all ranks' gradients in p.grad."""
    import torch.distributed as dist

    def average(p):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(average)


# %% [markdown]
# This kind of hook receives the *parameter*. The other kind, `p.register_hook(hook)`, receives the gradient before it is added to `p.grad`, and
# may return a different one. Averaging parameters by mistake often trains well enough to stay unnoticed.
#
# ## DDP
#
# DDP does both parts:
#
# - When it is constructed, it broadcasts rank 0's parameters.
# - In `backward()`, its hooks collect gradients in **buckets** and all-reduce each bucket as soon as it is full.
#
# In the next cell every rank makes its model with its own seed and trains it with DDP for five steps. Beside it, `whole` is one process that
# starts from rank 0's seed and has all the data.

# %% tags=["prediction", "hidden"]
predict.ddp_and_one_process()

# %%
# %%ddp
from torch.nn.parallel import DistributedDataParallel as DDP

if not dist.is_initialized():
    dist.init_process_group()


def train(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()


net = new_model(seed=rank)
train(DDP(net), x[mine], y[mine])

whole = new_model(seed=0)
train(whole, x, y)

pairs = zip(net.parameters(), whole.parameters(), strict=True)
print("equal to one process:", all(torch.allclose(a, b, atol=1e-6) for a, b in pairs))
dist.destroy_process_group()

# %%
# %ddp compare net

# %% [markdown]
# The ranks are equal to the last bit: an all-reduce computes each sum once and passes the result on, as in lesson 04. They equal one process
# only up to rounding, because one process adds up in another order.
#
# ## To remember
#
# - With shards of equal size, the mean of the ranks' gradients is the gradient of the whole batch. So *n* ranks train as one process with *n*
#   times the batch.
# - Averaging keeps equal ranks equal, but it does not make them equal. DDP broadcasts parameters once and averages gradients in every step.
# - Equal ranks and a falling loss do not show that the average is right. Compare with one process that has all the shards.
#
# **On real GPUs:** put model and data on `torch.device("cuda", local_rank)` and give DDP `device_ids=[local_rank]`. Time a step of a large model
# with `average_gradients` and with DDP. `%ddp timings` shows how much of the all-reduce DDP hides behind `backward()`.
#
# ## Glossary
#
# - **data parallel**: every rank has the whole model and computes gradients on a part of each batch.
# - **shard**: a rank's part of the data.
# - **hook**: a function that PyTorch calls when a gradient is ready.
# - **bucket**: gradients of several parameters that DDP all-reduces together.
#
# ## Further reading
#
# - [DistributedDataParallel](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html), PyTorch
#   documentation
# - [Distributed Data Parallel](https://docs.pytorch.org/docs/stable/notes/ddp.html), PyTorch documentation: how DDP works inside
# - Li et al., [PyTorch Distributed: Experiences on Accelerating Data Parallel Training](https://arxiv.org/abs/2006.15704), VLDB 2020

# %%
# %ddp stop
