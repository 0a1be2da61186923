# %% [markdown]
# # Averaging gradients
#
# Data-parallel training has one idea: every rank holds the same model, works out gradients on its own part of the batch, and the ranks
# average them before they step. All else that DistributedDataParallel does is about doing this fast.
#
# **After this lesson you can** say why the average is right, write it by hand, tell by what a wrong one gives itself away (and by what
# it does not), and say what DDP does when it is made and in every `backward()`.

# %%
# %load_ext nbddp

# %% [markdown]
# ## Four ranks, four shards
#
# A batch of 32 samples; rank *r* takes every fourth, beginning with the *r*-th: the shards are **disjoint**, and together they are the batch.
# The model starts equal on all ranks, because all use one seed. Each rank works out the gradients of the mean loss of its own 8 samples.
#
# **Predict:** how does the mean of the four gradients compare with the gradient that one process gets from all 32 samples?

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
# They are equal. The loss is a mean over samples, so its gradient is a mean of the samples' gradients, and the mean of four means over
# equally many samples is the mean over all. (Shards of different sizes would have to be weighted.) A rank's own gradient may be far from it.
#
# ## What goes wrong without it
#
# The picture has a smaller model, a line *y = wx + b*, so that the parameters can be followed. Every rank sees another part of the points. The
# dots are one process that has all of them.
#
# **Predict** before you move the controls:
#
# 1. All start equal, gradients are not exchanged: does the distance between ranks grow without end?
# 2. Every rank starts from its own random parameters, gradients are averaged: does averaging bring the ranks together?
# 3. All start equal, gradients are summed and not divided: what do you see in the loss, and in the distance?

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.averaging()

# %% [markdown]
# 1. No: each rank goes to the line that fits its own shard. None of them fits all points.
# 2. No: all ranks take the *same step*, so the distance stays what it was at the start. Therefore parameters are **broadcast** once
#    before training.
# 3. Almost nothing: the ranks are equal, and the loss falls, here even faster. A sum is a mean with a learning rate that is 4 times as large.
#    You would notice on the day you change the number of ranks.
#
# So equal ranks and a falling loss prove little. What proves it is the comparison with one process on all the data. That is how the check
# judges your function.
#
# ## Exercise: average the gradients
#
# It is called after `backward()`, on every rank. Whatever it leaves in `p.grad` the optimizer takes.


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
# ## Earlier: averaging during backward
#
# Backward works out gradients from the last layer to the first. A layer's gradient is ready while the layers before it are still being
# computed, so its all-reduce can start. PyTorch calls a function of yours at that moment:
# `p.register_post_accumulate_grad_hook(hook)`.
#
# Here is such an averaging as one finds it in the wild. Training runs, and the loss falls on all ranks.
#
# **Predict:** are the ranks' parameters equal after five steps, as they should be?

# %%
# %%ddp
if not dist.is_initialized():  # an answer that failed has ended the group
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

# %%
# %ddp compare net

# %% [markdown]
# They are not, although there was an all-reduce for every parameter in every step, and the loss falls. `%ddp compare` looks at every
# parameter on every rank.
#
# ## Exercise: find the bug
#
# Mend the function so that `backward()` leaves the mean of the ranks' gradients, and nothing else is changed. First say what is wrong, then
# run the check on it as it is and see whether you were right.


# %% tags=["exercise"]
def attach_averaging(model):
    """From now on every backward leaves the mean of all ranks' gradients in p.grad."""
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
    """From now on every backward leaves the mean of all ranks' gradients in p.grad."""
    import torch.distributed as dist

    def average(p):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(average)


# %% [markdown]
# This kind of hook is handed the *parameter*. (`p.register_hook(hook)` is the other kind: it is handed the gradient before it is added to
# `p.grad`, and may return another.) A broken average of parameters often trains well enough to go unseen; well-known teaching code has
# shipped with it.
#
# ## DDP
#
# DistributedDataParallel does both parts. When it is made it broadcasts rank 0's parameters; and it has hooks like yours, which put
# gradients together into buckets and all-reduce a bucket as soon as it is full.
#
# **Predict:** below every rank makes its model with a seed of its own. After five steps, how far is DDP from one process that started from
# rank 0's seed and had all the data?

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
# Equal to the bit between the ranks: an all-reduce makes each sum in one place and hands it round, as in the lesson before. Equal to one process
# but for rounding: there the sum is made in another order.
#
# ## To remember
#
# - With equal shards the mean of the ranks' gradients is the gradient of the whole batch, so *n* ranks train as one process would with *n*
#   times the batch.
# - Averaging keeps equal ranks equal and does not make them so: parameters are broadcast once, gradients averaged in every step.
# - Equal ranks and a falling loss prove nothing; compare with one process on the union of disjoint shards.
#
# **On real GPUs:** put model and data on `torch.device("cuda", local_rank)`, give DDP `device_ids=[local_rank]`, and time a step of a large
# model with `average_gradients` and with DDP. `%ddp timings` shows the difference: how much of the all-reduce DDP hides behind backward.

# %%
# %ddp stop
