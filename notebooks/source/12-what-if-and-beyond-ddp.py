# %% [markdown]
# # What if, and beyond DDP
#
# DDP keeps a whole model on every rank and exchanges all gradients once a step. How far does that carry, and what comes after it?
#
# **After this lesson you can** say what a step would take on more nodes before you rent them, make ranks exchange
# fewer bytes, work out what a rank must hold in memory, and shard a model over ranks with FSDP2 and
# tensor parallelism.

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
# ## What if?
#
# The same α–β model, now of a machine on paper: nodes of eight GPUs with 150 TFLOP/s each, and 4096 tokens in a micro-batch of a GPU.
#
# **Predict** for a model of 10⁹ parameters on 8 nodes with links of 100 Gb/s: which share of the time do the GPUs compute? Then, which of
# these helps most: half the latency, ten times the parameters, or eight micro-batches to an exchange?

# %% tags=["nbval-ignore-output"]
from nbddp.teach import check, explore

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
# ## What a rank must hold
#
# Adam in mixed precision keeps 16 bytes per parameter: 2 of the parameter, 2 of its gradient, and 12 that only the optimizer reads (a float32
# copy of the parameter, momentum, variance). Under DDP every rank keeps all of them. ZeRO shards them over the ranks in stages: first the optimizer's
# state, then the gradients too, then the parameters too.
#
# **Predict** for 7.5 · 10⁹ parameters on 64 GPUs: what does a rank hold at each stage? And is it less or more in float32?

# %% tags=["nbval-ignore-output"]
explore.zero()

# %% [markdown]
# Without sharding both take 16 bytes. Mixed precision saves nothing there; it moves bytes to the optimizer, the part that stage 1 shards. Stages 1 and 2
# move as many bytes in a step as DDP's all-reduce, which is a reduce-scatter and an all-gather anyway. Stage 3 gathers the parameters in forward and
# again in backward, half as much again.
#
# ### Exercise: bytes per rank
#
# Write the function, for Adam in mixed precision. All sizes divide evenly.


# %% tags=["exercise"]
def bytes_per_rank(stage, parameters, ranks):
    """Bytes of parameters, gradients and optimizer state that one rank holds at a stage of ZeRO, 0 to 3."""
    ...  # your code


# %%
check.bytes_per_rank(bytes_per_rank)


# %% tags=["solution"]
def bytes_per_rank(stage, parameters, ranks):
    """Bytes of parameters, gradients and optimizer state that one rank holds at a stage of ZeRO, 0 to 3."""
    optimizer = 12 * parameters // (ranks if stage >= 1 else 1)
    gradients = 2 * parameters // (ranks if stage >= 2 else 1)
    own = 2 * parameters // (ranks if stage >= 3 else 1)
    return optimizer + gradients + own


# %% [markdown]
# ## FSDP2: stage 3 in PyTorch
#
# `fully_shard` makes every parameter a `DTensor`: one tensor to look at, of which each rank holds its rows. Layers are gathered when they are needed, and
# dropped again. Applied to each layer, and last to the whole, only one layer at a time is there in full. The mesh says among which ranks, and on which kind of
# device: `"cpu"` here.
#
# **Predict:** the first weight below has 64 rows and 32 columns. Which shape has a rank's part of it, on four ranks?

# %%
# %%ddp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    """x + down(relu(up(x))): the feed-forward half of a transformer's layer."""

    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def losses(net, inputs, targets, steps=5):
    """Train; the loss of every step."""
    optimizer, found = torch.optim.Adam(net.parameters(), lr=0.01), []
    for _ in range(steps):
        loss = (net(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found), optimizer


torch.manual_seed(0)
alone, inputs, targets = Block(), torch.randn(16, 32), torch.randn(16, 32)
sharded, everyone = copy.deepcopy(alone), init_device_mesh("cpu", (world_size,))
for layer in (sharded.up, sharded.down, sharded):
    fully_shard(layer, mesh=everyone)

mine = slice(4 * rank, 4 * rank + 4)
found, optimizer = losses(sharded, inputs[mine], targets[mine])
dist.all_reduce(found, dist.ReduceOp.AVG)
expected, _ = losses(copy.deepcopy(alone), inputs, targets)
state = optimizer.state[sharded.up.weight]["exp_avg"]
whole, own = sharded.up.weight, sharded.up.weight.to_local()
print("up.weight", tuple(whole.shape), "· my part", tuple(own.shape), end=" · ")
print("of its momentum", tuple(state.to_local().shape))
if rank == 0:
    print("trained as in one process:", torch.allclose(found, expected, atol=1e-5))

# %% [markdown]
# Sixteen rows each: a quarter of the parameter, and a quarter of its gradient and its momentum.
#
# ## Tensor parallel, and both on a mesh
#
# FSDP gathers a layer's weights before it computes. Tensor parallel never does: every rank multiplies by its own part, and what is exchanged is activations. Of
# two linear layers in a row the first is cut by **columns** of its output, so that each rank has some of the hidden values, and the second by the matching
# inputs, its **rows** in the field's words. Their products are summed by one all-reduce.
#
# That is worth it only over the fast links within a node. So ranks are laid out as a **mesh**: here two by two, rows for data, columns for tensors.
#
# **Predict:** which ranks see the same samples? Which hold the same part of `up.weight`?

# %%
# %%ddp
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
data, tensor = mesh["data"].get_local_rank(), mesh["tensor"].get_local_rank()

both = copy.deepcopy(alone)
parallelize_module(both, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
halves = tuple(both.up.weight.to_local().shape), tuple(both.down.weight.to_local().shape)
fully_shard(both, mesh=mesh["data"])

mine = slice(8 * data, 8 * data + 8)
found, _ = losses(both, inputs[mine], targets[mine])
dist.all_reduce(found, dist.ReduceOp.AVG)
print(f"data {data}, tensor {tensor}: samples {mine.start}–{mine.stop - 1}", end=" · ")
print("up, down cut to", *halves, "· of up kept", tuple(both.up.weight.to_local().shape))
if rank == 0:
    print("trained as in one process:", torch.allclose(found, expected, atol=1e-5))

# %% [markdown]
# Ranks 0 and 1 see the same samples, and hold different halves of `up`. Ranks 0 and 2 belong to the same half of `up`, see different samples, and each keep
# half of that half, since FSDP shards over the other side of the mesh. A real cluster has eight columns, the GPUs of a node, and as many rows as
# nodes.
#
# ## To remember
#
# - A step waits for what backward does not hide of the exchange: bytes by bandwidth, and messages by latency. Forecast it, and look which of the two it is.
# - A comm hook takes the place of the all-reduce: half the bytes, and gradients that are the same on all ranks but rounded.
# - 16 bytes per parameter under Adam: DDP keeps them on every rank, ZeRO and FSDP share them out; tensor parallel cuts the computation itself, within a node.
#
# **On real GPUs:** `%ddp forecast` on one node, then rent two and compare. In the last two cells only `init_device_mesh("cuda", ...)` changes,
# and on which device the tensors are. `%ddp memory` shows what each rank holds under DDP and under `fully_shard`, and `%%ddp --trace` whether gathering is hidden.

# %%
# %ddp stop
