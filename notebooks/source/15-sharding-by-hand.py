# %% [markdown]
# # Sharding by hand
#
# DDP keeps the whole model, all gradients and all of the optimizer's state on every rank. **Sharding** gives each rank a part of them, its **shard**,
# and sends the missing parts when they are needed.
#
# **After this lesson you can**
#
# - calculate the memory of a rank and the bytes sent per step at each stage of ZeRO;
# - write a sharded optimizer step with `reduce_scatter_tensor` and `all_gather_into_tensor`;
# - say when FSDP gathers a layer and frees it, and what prefetching hides;
# - save a sharded checkpoint and resume from it on a different number of ranks, at the right sample.

# %%
# %load_ext nbddp
import tempfile

checkpoints = tempfile.TemporaryDirectory()  # for the end of the lesson

# %% [markdown]
# ## The memory of a rank
#
# Adam in mixed precision keeps 16 bytes per parameter:
#
# - 2 bytes for the parameter and 2 for its gradient, in bfloat16 or float16;
# - 12 bytes that only the optimizer reads: a float32 copy of the parameter, momentum and variance.
#
# Under DDP every rank keeps all 16. **ZeRO** (Zero Redundancy Optimizer) shards them in stages: stage 1 shards the optimizer's state,
# stage 2 the gradients too, stage 3 the parameters too.

# %% tags=["prediction", "hidden"]
from nbddp.teach import predict

predict.zero_stage_3()

# %% [markdown]
# The explorer opens on one rank, which has nothing to shard. Set 64 ranks. Then try float32.

# %% tags=["nbval-ignore-output"]
from nbddp.teach import check, explore

explore.zero()

# %% [markdown]
# In float32 a parameter takes 16 bytes too, 4 + 4 + 8. Mixed precision does not save memory here; it moves bytes to the optimizer's state,
# the part that stage 1 shards. Activations are not counted: sharding does not change them.
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

# %% [markdown]
# Stuck? `check.bytes_per_rank(bytes_per_rank, hint=True)` gives a hint, and another one each time it is run.


# %% tags=["solution"]
def bytes_per_rank(stage, parameters, ranks):
    """Bytes of parameters, gradients and optimizer state that one rank holds at a stage of ZeRO, 0 to 3."""
    optimizer = 12 * parameters // (ranks if stage >= 1 else 1)
    gradients = 2 * parameters // (ranks if stage >= 2 else 1)
    own = 2 * parameters // (ranks if stage >= 3 else 1)
    return optimizer + gradients + own


# %% [markdown]
# ## The communication of a step
#
# Two collectives are enough. Both work on **flat** tensors, of one dimension, cut into one shard per rank:
#
# | call | afterwards rank *r* has |
# |---|---|
# | `dist.reduce_scatter_tensor(shard, whole)` | in `shard`: part *r* of the **sum** of all ranks' `whole` |
# | `dist.all_gather_into_tensor(whole, shard)` | in `whole`: all ranks' `shard`, in rank order |
#
# `whole` has exactly world size × as many numbers as `shard`. A flat tensor whose length the world size does not divide is **padded** with zeros.
# (PyTorch 2.13 has new names for both, `reduce_scatter_single` and `all_gather_single`, and warns about the old ones.)

# %% tags=["prediction", "hidden"]
predict.bytes_moved()

# %%
# %%ddp --nproc 4
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

warnings.filterwarnings("ignore", category=FutureWarning)  # newer names: reduce_scatter_single, all_gather_single
dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()

gradients = torch.arange(10.0) * 10**rank
count, size = len(gradients), -(-len(gradients) // world_size)  # size: 10 / 4, rounded up
shard, whole = torch.empty(size), torch.empty(size * world_size)
dist.reduce_scatter_tensor(shard, pad(gradients, (0, size * world_size - count)))
dist.all_gather_into_tensor(whole, shard)
dist.all_reduce(gradients)
print("my shard of the sum:", shard.tolist(), "· side by side they are the all-reduce:", whole[:count].equal(gradients))

if rank == 0:
    scatter = gather = (world_size - 1) * size * 4  # bytes that a rank sends, by a ring: one shard in each step
    moved = {"DDP": scatter + gather, "stages 1 and 2": scatter + gather, "stage 3": gather + gather + scatter}
    for name, count in moved.items():
        print(f"{name}: {count / moved['DDP']:.2f} × the bytes of DDP's all-reduce")

# %% [markdown]
# - **DDP**: an all-reduce of gradients, which is a reduce-scatter and an all-gather.
# - **Stages 1 and 2**: reduce-scatter gradients, update the rank's own shard, all-gather parameters.
# - **Stage 3**: all-gather parameters in forward and again in backward, reduce-scatter gradients: 1.5 times the bytes.
#
# ### Exercise: a sharded step
#
# Write one step of SGD with momentum as stage 2 does it. Each rank keeps momentum for its own shard only:
#
# - *gradient* = the mean of all ranks' gradients,
# - *momentum* = 0.9 × *momentum* + *gradient*,
# - *parameter* = *parameter* − `lr` × *momentum*.
#
# Afterwards all ranks have the same parameters. The check makes three steps, on all ranks and on one rank fewer, with 25 numbers.


# %% tags=["exercise"]
def sharded_step(parameters, momentum, lr):
    """parameters: a list of tensors, each with this rank's own gradient in .grad; change them in place.
    momentum: a flat tensor for this rank's shard, padding included, zeros before the first step; change it in place."""
    import torch
    import torch.distributed as dist

    ...  # your code


# %%
check.sharded_step(sharded_step)


# %% tags=["solution"]
def sharded_step(parameters, momentum, lr):
    """parameters: a list of tensors, each with this rank's own gradient in .grad; change them in place.
    momentum: a flat tensor for this rank's shard, padding included, zeros before the first step; change it in place."""
    import torch
    import torch.distributed as dist

    rank, world_size, size = dist.get_rank(), dist.get_world_size(), len(momentum)

    def flat(tensors):
        joined = torch.cat([t.flatten() for t in tensors])
        return torch.nn.functional.pad(joined, (0, size * world_size - len(joined)))

    gradient, whole = torch.empty_like(momentum), torch.empty(size * world_size)
    dist.reduce_scatter_tensor(gradient, flat([p.grad for p in parameters]))
    momentum.mul_(0.9).add_(gradient / world_size)
    own = flat([p.detach() for p in parameters])[rank * size : (rank + 1) * size] - lr * momentum
    dist.all_gather_into_tensor(whole, own)
    sizes = [p.numel() for p in parameters]
    for p, piece in zip(parameters, whole[: sum(sizes)].split(sizes), strict=True):
        p.data.copy_(piece.view_as(p))


# %% [markdown]
# ## Stage 3 by hand
#
# At stage 3 a rank keeps its rows of each weight. Before a layer computes, its rows are gathered; afterwards the whole weight is released.
# An autograd Function implements both directions. `events` records the order of the calls on this rank.

# %% tags=["prediction", "hidden"]
predict.times_gathered()


# %%
# %%ddp
def gather(rows, name):
    """All ranks' rows: the whole weight, freed when the last reference is dropped."""
    events.append(f"gather {name}")
    whole = torch.empty(world_size * len(rows), rows.shape[1])
    dist.all_gather_into_tensor(whole, rows)
    return whole


class Sharded(torch.autograd.Function):
    """x @ weight.T, where this rank keeps `rows` of the weight."""

    @staticmethod
    def forward(ctx, x, rows, name):
        ctx.save_for_backward(x, rows)  # not the whole weight
        ctx.name = name
        return x @ gather(rows.detach(), name).T

    @staticmethod
    def backward(ctx, upstream):
        x, rows = ctx.saved_tensors
        whole, mine = gather(rows, ctx.name), torch.empty_like(rows)
        dist.reduce_scatter_tensor(mine, upstream.T @ x)
        events.append(f"reduce-scatter {ctx.name}")
        return upstream @ whole, mine / world_size, None


events = []
torch.manual_seed(0)  # all ranks make the same weights and samples
weights, inputs = [torch.randn(8, 8) for _ in range(3)], torch.randn(16, 8)
layers = [nn.Parameter(w.chunk(world_size)[rank].clone()) for w in weights]
x = inputs.chunk(world_size)[rank]
for name, rows in enumerate(layers):
    x = torch.tanh(Sharded.apply(x, rows, name))
x.square().mean().backward()

alone = [nn.Parameter(w) for w in weights]  # the same in one process, with all samples
y = inputs
for w in alone:
    y = torch.tanh(y @ w.T)
y.square().mean().backward()
pairs = zip(layers, alone, strict=True)
right = all(torch.allclose(p.grad, w.grad.chunk(world_size)[rank], atol=1e-6) for p, w in pairs)
print("I keep", tuple(layers[0].shape), "of", tuple(weights[0].shape), "· right gradients:", right)
if rank == 0:
    print(" · ".join(events))

# %% [markdown]
# ## Gather ahead
#
# If a layer is gathered when it is needed, the GPU and the link take turns waiting for each other. **Prefetching** issues the next layer's all-gather
# before the current layer computes. The time in which a rank computes nothing is **exposed**.

# %% tags=["prediction", "hidden"]
predict.layers_in_full()

# %% [markdown]
# The explorer opens without prefetching. Gather one layer ahead, then two. Make the link faster and slower, keep layers after forward, and make
# one rank slow.

# %% tags=["nbval-ignore-output"]
explore.gathers()

# %% [markdown]
# - One layer ahead hides all but the first all-gather and the last reduce-scatter, if a collective takes no longer than a forward. Gathering a second
#   layer ahead takes memory and saves no time.
# - Without prefetching, an all-gather of backward also waits behind a reduce-scatter. That is why the order in which collectives are issued matters.
# - Keeping layers after forward saves the second all-gather, but needs the memory of a whole model.
# - A slow rank delays all others: an all-gather ends only after every rank has called it.
#
# ## FSDP2: stage 3 in PyTorch
#
# `fully_shard` does all of this. It turns every parameter into a **DTensor**, which is used as one tensor although each rank holds only its
# rows. Apply it to each layer, then to the whole model: parameters that one call shards are gathered and released together. The mesh names
# the ranks and the kind of device. `reshard_after_forward=False` keeps layers until backward. Prefetching is automatic.

# %% tags=["prediction", "hidden"]
predict.rows_of_the_momentum()

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


def sharded_block():
    """The same block on every rank, sharded over all of them, and its optimizer."""
    torch.manual_seed(0)
    net, mesh = Block(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (net.up, net.down, net):
        fully_shard(layer, mesh=mesh)
    return net, torch.optim.Adam(net.parameters(), lr=0.01)


def train(net, optimizer, seen, until, rank, ranks):
    """Train on batches of 8 samples, shared by all ranks, from sample `seen` to `until`."""
    for first in range(seen, until, 8):
        mine = order[first : first + 8][rank::ranks]
        loss = (net(inputs[mine]) - targets[mine]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def as_alone(net, until):
    """Whether one process, trained on the same samples, has the same parameters."""
    torch.manual_seed(0)
    alone = Block()
    train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), 0, until, 0, 1)
    pairs = zip(net.parameters(), alone.parameters(), strict=True)
    return all(torch.allclose(p.full_tensor(), q, atol=1e-5) for p, q in pairs)


torch.manual_seed(1)
inputs, targets, order = torch.randn(48, 32), torch.randn(48, 32), torch.randperm(48)
net, optimizer = sharded_block()
train(net, optimizer, 0, 24, rank, world_size)
whole, state = net.up.weight, optimizer.state[net.up.weight]["exp_avg"]
print("up.weight", tuple(whole.shape), "· my part", tuple(whole.to_local().shape), end=" · ")
print("of its momentum", tuple(state.to_local().shape), "· trained as in one process:", as_alone(net, 24))

# %% [markdown]
# Sixteen of 64 rows each: a quarter of the parameter, of its gradient and of its momentum.
#
# ## The position in the data
#
# The run above has read 24 of 48 samples. A checkpoint that can resume on a different number of ranks must not store anything per rank. A number of
# **steps** depends on the world size: a step of four ranks reads more samples than a step of two. A number of **samples**, counted over all ranks, has
# the same meaning on any number of ranks.
#
# ### Exercise: the rest of the epoch
#
# `order` is the epoch's shuffled list of samples, the same on all ranks. Its first `seen` samples have been read, on any number of ranks. Distribute
# the remaining samples. Together, the ranks read each one exactly once and in order, so that one number also describes the next checkpoint. Do not pad.


# %% tags=["exercise"]
def rest_of_epoch(order, seen, rank, world_size):
    """The samples that this rank reads, in order."""
    ...  # your code


# %%
check.rest_of_epoch(rest_of_epoch)


# %% tags=["solution"]
def rest_of_epoch(order, seen, rank, world_size):
    """The samples that this rank reads, in order."""
    return order[seen + rank :: world_size]


# %% [markdown]
# ## A checkpoint for any number of ranks
#
# `torch.distributed.checkpoint` (**DCP**) writes one file per rank, with that rank's shards, and an index with the position of each shard in the whole
# tensor. First, four ranks save a checkpoint.

# %% tags=["prediction", "hidden"]
predict.read_again()

# %%
# %%ddp -- {checkpoints.name}
import os
import sys

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

model_state, optimizer_state = get_state_dict(net, optimizer)
state = {"model": model_state, "optimizer": optimizer_state, "seen": 24}
dcp.save(state, checkpoint_id=sys.argv[1])
if rank == 0:
    print("files:", len(os.listdir(sys.argv[1])), "· one per rank, and the index")
    seen, steps = state["seen"], state["seen"] // (2 * world_size)
    again = seen - steps * 2 * 2
    print(f"{seen} samples were read; {steps} steps of 2 ranks are {steps * 2 * 2}, so {again} would be read again")

# %% [markdown]
# Now two ranks create the model and the optimizer again, sharded over two ranks. DCP loads the shards, and training continues at sample `seen`. The
# last line compares with one process that was never interrupted.

# %%
# %%ddp --nproc 2 -- {checkpoints.name}
dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
net, optimizer = sharded_block()
model_state, optimizer_state = get_state_dict(net, optimizer)
state = {"model": model_state, "optimizer": optimizer_state, "seen": 0}
dcp.load(state, checkpoint_id=sys.argv[1])
set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
before = as_alone(net, 24)
train(net, optimizer, state["seen"], 48, rank, world_size)
print("my part", tuple(net.up.weight.to_local().shape), "· resumed at sample", state["seen"], end=" · ")
print("loaded as saved:", before, "· at the end as in one process:", as_alone(net, 48))

# %% [markdown]
# A batch still has 8 samples, four per rank now. With 2 per rank the batch would be half as large, and the result would differ.
#
# ## To remember
#
# - Adam needs 16 bytes per parameter: stage 1 shards 12 of them, stage 2 two more, stage 3 all.
# - A sharded step: reduce-scatter gradients, update the rank's own shard, all-gather parameters. It moves as many bytes as an all-reduce. Stage 3 moves
#   1.5 times as many.
# - FSDP gathers a layer, computes, and frees the layer. Prefetching one layer ahead hides the link, as long as the link is fast enough.
# - In a checkpoint, store the number of samples, not steps, and nothing per rank.
#
# **On real GPUs:** write `init_device_mesh("cuda", ...)`, and move the tensors. `%ddp memory` shows what each rank holds under DDP and under
# `fully_shard`, and `%%ddp --trace` shows whether all-gathers are hidden. Compare `reshard_after_forward=True` and `False`.
#
# ## Glossary
#
# - **all-gather**: every rank gets all ranks' shards, side by side.
# - **DCP**: torch.distributed.checkpoint, which saves and loads sharded tensors on any number of ranks.
# - **DTensor**: a tensor whose parts are on several ranks and that is used as one.
# - **exposed time**: time in which a rank waits for communication and computes nothing.
# - **FSDP**: Fully Sharded Data Parallel, stage 3 in PyTorch; FSDP2 is `fully_shard`.
# - **prefetch**: issue the all-gather of a layer before it is needed.
# - **reduce-scatter**: every rank gets its shard of the sum of all ranks' tensors.
# - **ZeRO**: Zero Redundancy Optimizer; its stages shard optimizer state, gradients, parameters.
#
# ## Further reading
#
# - S. Rajbhandari, J. Rasley, O. Ruwase, Y. He: [ZeRO: Memory Optimizations Toward Training Trillion Parameter Models](https://arxiv.org/abs/1910.02054), 2020.
# - Y. Zhao and others: [PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel](https://arxiv.org/abs/2304.11277), 2023.
# - PyTorch: [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) and
#   [torch.distributed.checkpoint](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html).

# %%
# %ddp stop
