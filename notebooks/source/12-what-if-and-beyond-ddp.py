# %% [markdown]
# # What if, and beyond DDP
#
# DDP keeps a whole model on every rank and exchanges all gradients once a step. How far does that carry, and what comes after it?
#
# **After this lesson you can** estimate the duration of a step on more nodes before you rent them, and make ranks exchange fewer bytes.

# %%
# %load_ext nbddp

# %% [markdown]
# ## The cost of a message
#
# In the α–β model, a message of *m* bytes takes α + *m*/β seconds: a **latency** α that every message pays, and a **bandwidth** β. A ring all-reduce
# on *n* ranks sends 2(*n* − 1) messages one after another, each with 1/*n* of the buffer. So it takes
#
# > 2(*n* − 1)·α + 2(*n* − 1)/*n* · *m*/β
#
# We train a small model on two ranks, so that each rank has a core of its own on a laptop. nbddp records every DDP step; the code needs no change. The function returns the bytes of the
# model's gradients.

# %%
# %%ddp --nproc 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()


def train(samples):
    """Six steps with `samples` samples per rank; returns the bytes of all gradients."""
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    model = DDP(net, bucket_cap_mb=1)
    for _ in range(6):
        model.zero_grad()
        model(torch.randn(samples, 256)).square().mean().backward()
    return sum(p.numel() * p.element_size() for p in net.parameters())


train(samples=8192)

# %% [markdown]
# ## Forecast a step, and check the forecast
#
# `%ddp forecast` measures all-reduces of several sizes on these ranks, fits α and β, and combines them with the computation of the recorded step. You state the link between nodes.
# The numbers are those of this machine at this moment; yours will differ.
#
# Before you trust a forecast, check it where you know the answer: on the two ranks that were recorded. The diamond is the recorded step. The line should pass close to it.

# %% tags=["prediction", "hidden"]
from nbddp.teach import predict

predict.same_batch_on_64_nodes()

# %% tags=["nbval-ignore-output"]
# %ddp forecast --nodes 64 --inter-node 12.5GB/s --latency 10us

# %% [markdown]
# In our runs the forecast is at most 7 % off here. `print(_)` prints the forecast as text, with the difference in percent. Solid lines end where collectives were measured; dashed parts
# are extrapolated. The text ends with the assumptions, and a forecast is only as good as these.
#
# Now the same model with 32 samples per rank. It computes for a few milliseconds and exchanges as many bytes as before. `--timings` shows how long the buckets take.

# %% tags=["nbval-ignore-output"]
# %%ddp --timings
train(samples=32)

# %% tags=["prediction", "hidden"]
predict.grows_with_nodes()

# %% tags=["nbval-ignore-output"]
# %ddp forecast --nodes 64 --inter-node 12.5GB/s --latency 10us

# %% [markdown]
# **Latency grows.** With *n* the factor of *m*/β goes from 1 towards 2, but 2(*n* − 1) has no limit. The buckets are small, so on many nodes the step waits for messages, not for bytes.
#
# Compare the diamond again. For so short a step the forecast may hold, or miss by a factor of two, and the next run differs. These are runs on the two busy cores on which this
# lesson was written, with other programs on them in the slower runs:
#
# | samples per rank | model's step | recorded step | all-reduces by the fit | in the step |
# |---|---|---|---|---|
# | 8192 (10 runs) | 390 to 1100 ms | 1 to 7 % longer | 1 to 3 ms | 7 to 69 ms (9 runs) |
# | 2048 (7 runs) | 60 to 150 ms | 1 to 23 % longer | 1 to 3 ms | 2 to 19 ms (4 runs) |
# | 32 (14 runs) | 3 to 9 ms | 1 to 144 % longer | 1 to 3 ms | 2 to 10 ms |
#
# In all 31 runs the recorded step is the longer one. Two terms are missing in the model:
#
# - **Contention.** The forecast takes the time of an all-reduce from a measurement in which the ranks do nothing else. In the step, gloo's threads need a core while backward,
#   and whatever else runs on the machine, uses it. Compare the column *moves* above with the fit, 2α + *m*/β on two ranks.
# - **Late ranks.** A rank that starts late makes the others wait. The model assumes that all ranks start together.
#
# Both are a few milliseconds, or some tens on a busy machine. They can double a step of 4 ms, and they hardly show in one of 400 ms or more.
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
# The same α–β model now describes a machine on paper. Its nodes have eight GPUs with 150 TFLOP/s each, and a micro-batch has 4096 tokens
# per GPU.
#
# The questions are about a model of 10⁹ parameters on 8 nodes, with links of 100 Gb/s and 10 µs.

# %% tags=["prediction", "hidden"]
predict.share_of_computing()

# %% tags=["prediction", "hidden"]
predict.helps_most()

# %% tags=["nbval-ignore-output"]
explore.what_if()

# %% [markdown]
# - The GPUs compute for 45 % of the time. With eight micro-batches per exchange it is 87 %.
# - Ten times the parameters are ten times the bytes, but also ten times the computation, so the share stays the same.
# - Half the latency saves about 2 % of the exchange: at this size, bytes dominate.
#
# Set the parameters to 10 M, the link to 1600Gb/s and the latency to 250us, and messages dominate.
#
# Several micro-batches per exchange are called gradient accumulation. Lesson 13 explains it, and what goes wrong with it.
#
# ## Exchange fewer bytes: a comm hook
#
# A **communication hook** replaces DDP's all-reduce. DDP calls it with a bucket, and it returns a future of the tensor that every rank should use instead. The hook below sends half
# the bytes, as float16. It divides **before** it converts, so that sums do not overflow. The layer has 50,050 parameters in float32.

# %% tags=["prediction", "hidden"]
predict.bytes_of_half()

# %% tags=["prediction", "hidden"]
predict.hooked_gradients()

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
# All ranks get the same rounded sum, so the replicas stay equal. Whether training tolerates the rounding depends on the model. PyTorch has ready hooks: `fp16_compress_hook`,
# `bf16_compress_hook` and `powerSGD_hook`.
#
# ## To remember
#
# - A step waits for the part of the exchange that backward does not hide: bytes pay for bandwidth, messages for latency. Forecast the step, and find out which of the two dominates.
# - Check a forecast on the ranks you have. It ignores contention and late ranks, which matters most for short steps.
# - A comm hook replaces DDP's all-reduce. All ranks must return the same result, or the replicas diverge.
# - DDP keeps a whole model on every rank. Lesson 15 shards it, and lesson 16 splits the computation itself.
#
# **On real GPUs:** `%ddp forecast` on one node, then rent two and compare.

# %% [markdown]
# ## Glossary
#
# - **latency (α), bandwidth (β)**: the seconds that every message pays, and the bytes per second after that.
# - **weak scaling, strong scaling**: more ranks with the same batch per rank; more ranks that share the same total batch.
# - **efficiency**: the share of the ranks' time that is spent computing.
# - **contention**: two activities slow each other because they need the same core, memory or link.
# - **communication hook**: a function that DDP calls instead of its all-reduce.
#
# ## Further reading
#
# - R. Hockney, [The communication challenge for MPP](https://doi.org/10.1016/S0167-8191%2806%2980021-9), *Parallel Computing* 20, 1994: the α–β model.
# - P. Patarasuk and X. Yuan, [Bandwidth optimal all-reduce algorithms for clusters of workstations](https://doi.org/10.1016/j.jpdc.2008.09.002), *J. Parallel and Distributed Computing* 69, 2009: the ring.
# - [DDP communication hooks](https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html): the interface, and the hooks that come with PyTorch.
# - T. Vogels et al., [PowerSGD](https://arxiv.org/abs/1905.13727), 2019: low-rank compression of gradients.

# %%
# %ddp stop
