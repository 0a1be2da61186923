# %% [markdown]
# # What if, and beyond DDP
#
# DDP keeps a whole model on every rank and exchanges all gradients once a step. How far does that carry, and what comes after it?
#
# **After this lesson you can** say what a step would take on more nodes before you rent them, and make ranks exchange fewer bytes.

# %%
# %load_ext nbddp

# %% [markdown]
# ## What a message costs
#
# In the α–β model a message of *m* bytes takes α + *m*/β seconds: a latency that every message pays, and a bandwidth. A ring all-reduce
# on *n* ranks sends 2(*n* − 1) messages one after another, of 1/*n* of the buffer each, so it takes 2(*n* − 1)·α + 2(*n* − 1)/*n* · *m*/β.
# The second part hardly grows with *n*; the first does.
#
# We train a small model on two ranks, since these times are real and two ranks get a core each. Nothing of the code is special: nbddp records
# every DDP step.

# %%
# %%ddp --nproc 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
model = DDP(net, bucket_cap_mb=1)
for _ in range(6):
    model.zero_grad()
    model(torch.randn(32, 256)).square().mean().backward()

sum(p.numel() * p.element_size() for p in net.parameters())

# %% [markdown]
# `%ddp forecast` measures all-reduces of several sizes on these ranks, fits α and β, and carries the recorded step on to more nodes. What lies
# between nodes is for you to say. Its numbers are those of this machine at this moment; yours will be others.
#
# **Predict:** with more nodes, and as many samples on each rank: which of latency and bandwidth will make the step longer?

# %% tags=["nbval-ignore-output"]
# %ddp forecast --nodes 64 --inter-node 12.5GB/s --latency 10us

# %% [markdown]
# Latency: these buckets are small, and the more ranks, the more messages follow one another. Solid lines end where collectives were measured; what is dashed is
# the model's alone. The diamond is the step as it was recorded: if the line passes far from it, the machine was busy with other things. What the forecast takes
# for granted belongs to its answer: `print(_)` shows the figure in words.
#
# ### Exercise: seconds of an all-reduce
#
# Write the model down: a ring all-reduce, alone on its links.


# %% tags=["exercise"]
def all_reduce_seconds(ranks, size, latency, bandwidth):
    """Seconds of a ring all-reduce of `size` bytes, with a latency in seconds and a bandwidth in bytes per second."""
    ...  # your code


# %%
from nbddp.teach import check, explore

check.all_reduce_seconds(all_reduce_seconds)

# %% [markdown]
# Stuck? `check.all_reduce_seconds(all_reduce_seconds, hint=True)` gives a hint, and another one each time it is run.


# %% tags=["solution"]
def all_reduce_seconds(ranks, size, latency, bandwidth):
    """Seconds of a ring all-reduce of `size` bytes, with a latency in seconds and a bandwidth in bytes per second."""
    messages = 2 * (ranks - 1)
    return messages * (latency + size / ranks / bandwidth)


# %% [markdown]
# ## What if?
#
# The same α–β model, now of a machine on paper: nodes of eight GPUs with 150 TFLOP/s each, and 4096 tokens in a micro-batch of a GPU.
#
# **Predict** for a model of 10⁹ parameters on 8 nodes with links of 100 Gb/s: which share of the time do the GPUs compute? Then, which of
# these helps most: half the latency, ten times the parameters, or eight micro-batches to an exchange?

# %% tags=["nbval-ignore-output"]
explore.what_if()

# %% [markdown]
# The efficiency is 45 %, and with eight micro-batches 87 %. Ten times the parameters are ten times the bytes, but ten times the computation as
# well, so the share stays. Half the latency saves 2 %: at this size it is bytes that count. Set the parameters to 10 M, the link to
# 1600Gb/s and the latency to 250us, and it is messages.
#
# Several micro-batches to an exchange are called gradient accumulation. Lesson 13 is about it, and about what goes wrong with it.
#
# ## Exchange fewer bytes: a comm hook
#
# A communication hook takes the place of DDP's all-reduce. It gets a bucket and returns a future of what every rank shall have instead. This one sends
# half the bytes, as float16, and divides **before** it converts, so that sums do not overflow.
#
# **Predict:** do all ranks still have the same gradients? And are they the ones from before?

# %%
# %%ddp --nproc 4
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
sent = []


def half(state, bucket):
    whole = bucket.buffer()
    small = whole.div(world_size).half()
    sent.append(small.numel() * small.element_size())
    future = dist.all_reduce(small, async_op=True).get_future()
    return future.then(lambda done: whole.copy_(done.value()[0]))


torch.manual_seed(0)
plain = DDP(nn.Linear(1000, 50))
hooked = DDP(copy.deepcopy(plain.module))
hooked.register_comm_hook(None, half)
inputs = torch.randn(8, 1000, generator=torch.Generator().manual_seed(rank))
for model in (plain, hooked):
    model(inputs).square().mean().backward()

mine, right = (m.module.weight.grad for m in (hooked, plain))
low, high = mine.clone(), mine.clone()
dist.all_reduce(low, dist.ReduceOp.MIN)
dist.all_reduce(high, dist.ReduceOp.MAX)
if rank == 0:
    print("bytes sent:", sum(sent), "instead of", sum(4 * p.numel() for p in plain.parameters()))
    print("the same on all ranks:", torch.equal(low, high))
    print("the same as before:", torch.equal(mine, right))
    print("within a thousandth of the largest:", bool((mine - right).abs().max() < 1e-3 * right.abs().max()))

# %% [markdown]
# All ranks get the same sum, so the replicas stay together; but it has been rounded. Whether training bears that is a matter of the model. PyTorch
# has such hooks ready (`fp16_compress_hook`, `bf16_compress_hook`, `powerSGD_hook`).
#
# ## To remember
#
# - A step waits for what backward does not hide of the exchange: bytes by bandwidth, and messages by latency. Forecast it, and look which of the two it is.
# - A comm hook takes the place of the all-reduce: half the bytes, and gradients that are the same on all ranks but rounded.
# - DDP keeps a whole model on every rank. Lesson 15 shards it, and lesson 16 splits the computation itself.
#
# **On real GPUs:** `%ddp forecast` on one node, then rent two and compare.

# %%
# %ddp stop
