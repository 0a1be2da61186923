# %% [markdown]
# # Mixed precision and clipping across ranks
#
# Every training step makes two decisions about the whole gradient: whether to take the step, and by how much to clip the gradient. All ranks must make
# the same decision. This lesson shows when they do and what happens when they do not.
#
# **After this lesson you can**
#
# - train in float16 with autocast and a loss scale, and say what an overflow does to a step;
# - make all ranks take a step, or none;
# - clip by the norm of the whole gradient if each rank has only a shard of it, also on a mesh with replicas.

# %%
# %load_ext nbddp
from nbddp.teach import check, explore, predict

# %% [markdown]
# ## Two bytes for a number
#
# Training in 16 bits halves the bytes of activations, and GPUs multiply matrices of such numbers several times as fast. There are two formats:
#
# | format | bits of exponent, of fraction | largest number | smallest normal number | a step at 1 |
# |---|---|---|---|---|
# | float32 | 8, 23 | 3.4 · 10³⁸ | 1.2 · 10⁻³⁸ | 1.2 · 10⁻⁷ |
# | **bfloat16** | 8, 7 | 3.4 · 10³⁸ | 1.2 · 10⁻³⁸ | 0.0078 |
# | **float16** | 5, 10 | 65504 | 6.1 · 10⁻⁵ | 0.00098 |
#
# Gradients are small, and their sizes differ by many orders of magnitude.

# %% tags=["prediction", "hidden"]
predict.small_gradient()

# %%
# %%ddp --nproc 4
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
for number in (1e-8, 1.0, 1e5):
    short, brain = torch.tensor(number).half(), torch.tensor(number).bfloat16()
    print(f"{number:g} is {short.item():.0e} in float16 and {brain.item():.0e} in bfloat16")

layer = nn.Linear(4, 4)
with torch.autocast("cpu", dtype=torch.float16):
    outputs = layer(torch.ones(2, 4))
    loss = nn.functional.mse_loss(outputs, torch.zeros(2, 4))
loss.backward()
print(
    "weight",
    layer.weight.dtype,
    "· outputs",
    outputs.dtype,
    "· loss",
    loss.dtype,
    "· gradient",
    layer.weight.grad.dtype,
)

# %% [markdown]
# **Autocast** casts the inputs of matrix products to 16 bits and computes losses in float32. Parameters stay in float32, and so do their gradients in
# `.grad`. But backward computes in float16 before it writes them.
#
# So a small gradient can become zero in backward. The remedy is a **loss scale**: multiply the loss by a large number before `backward()`, and divide
# the gradients by it afterwards. Multiplying the loss multiplies all gradients. If the scale is too large, some gradient becomes inf.
#
# `torch.amp.GradScaler` adjusts the scale:
#
# 1. `scaler.scale(loss).backward()` multiplies the loss.
# 2. `scaler.step(optimizer)` divides the gradients, and takes the step only if all are finite.
# 3. `scaler.update()` halves the scale if something was inf or nan, and doubles it after 2000 good steps (`growth_interval`).
#
# bfloat16 has the range of float32 and needs no loss scale. Clipping concerns every format.
#
# ## An overflow on one rank
#
# Below, a model is trained under DDP for four steps, with a `growth_interval` of 2. In step 2, rank 1 has an input so large that its own gradients
# overflow. The gradients of the other ranks do not.

# %% tags=["prediction", "hidden"]
predict.overflow_under_ddp()

# %%
# %%ddp
torch.manual_seed(0)
model = DDP(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=2)
for step in (1, 2, 3, 4):
    inputs = torch.full((1, 2), 1000.0 if (rank, step) == (1, 2) else 1.0)
    before = model.module.weight.detach().clone()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(inputs).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    took = "skipped" if torch.equal(before, model.module.weight) else "taken"
    print(f"step {step} {took}, next scale {scaler.get_scale():.0f}")

# %% [markdown]
# All ranks skip step 2. DDP averages gradients before `GradScaler` checks them, and a mean that contains inf is inf on every rank. The step's samples
# are lost, on all ranks.
#
# ## Which ranks detect an overflow in sharded gradients?
#
# ZeRO and FSDP replace the all-reduce by a **reduce-scatter**: each rank receives the sum of only one part of the gradient. Below, the gradient has
# eight numbers, two on each rank. In step 2 the third number overflows; it does not matter which rank computed it.

# %% tags=["prediction", "hidden"]
predict.overflow_in_a_shard()

# %%
# %%ddp
shard = nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([shard], lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=2)
for step in (1, 2, 3, 4):
    before = shard.detach().clone()
    gradient = torch.ones(8)
    if step == 2:
        gradient[2] = torch.inf
    shard.grad = torch.empty(2)
    dist.reduce_scatter(shard.grad, list(scaler.scale(gradient).chunk(world_size)))
    scaler.step(optimizer)
    scaler.update()
    took = "skipped" if torch.equal(before, shard) else "taken"
    print(f"step {step} {took}, next scale {scaler.get_scale():.0f}")

# %% [markdown]
# Only rank 1 skips the step. Its two parameters stay one step behind the others, and no rank reports an error. The scales differ as well.
# Each rank multiplies its loss by its own scale, and the reduce-scatter adds the scaled gradients. Then each rank divides the sum by its
# own scale.
#
# The explorer shows up to 24 such steps. Each rank overflows in some of them. Choose where ranks look for inf, and press Play.

# %% tags=["prediction", "hidden"]
predict.alone()

# %% tags=["nbval-ignore-output"]
explore.loss_scale()

# %% [markdown]
# With *own shard, alone* a rank that has halved its scale receives sums in which the other ranks used a larger scale. Its gradients are too large, and
# they overflow more easily, so its scale falls further.
#
# ### Exercise: all ranks or none
#
# Write `step_together`: the optimizer has this rank's shards, and their gradients are multiplied by `scale`. If any rank has found inf or nan, no rank takes
# the step and all return half the scale. Otherwise all divide their gradients by the scale, take the step, and return the scale.


# %% tags=["exercise"]
def step_together(optimizer, scale):
    """Takes the step on all ranks or on none, and returns the next scale. Parameters without a gradient have None."""
    import torch
    import torch.distributed as dist

    ...  # your code: optimizer.param_groups[0]["params"] are this rank's parameters


# %%
check.step_together(step_together)

# %% [markdown]
# Stuck? `check.step_together(step_together, hint=True)` gives a hint, and another one each time it is run.


# %% tags=["solution"]
def step_together(optimizer, scale):
    """Takes the step on all ranks or on none, and returns the next scale. Parameters without a gradient have None."""
    import torch
    import torch.distributed as dist

    parameters = optimizer.param_groups[0]["params"]
    gradients = [p.grad for p in parameters if p.grad is not None]
    sound = all(bool(g.isfinite().all()) for g in gradients)
    found = torch.tensor(0.0 if sound else 1.0, device=parameters[0].device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if found > 0:
        return scale / 2
    for g in gradients:
        g /= scale
    optimizer.step()
    return scale


# %% [markdown]
# PyTorch can do this for you. The parameters of FSDP2 are DTensors, and with DTensors, `GradScaler` combines its result over all ranks of
# the mesh. FSDP1 has a `ShardedGradScaler`. Three cases need your own code. They are sharding by hand, pipeline or tensor parallelism with
# loss scaling, and a rank that skips a batch "because its loss is nan".
#
# ## Clipping: before or after the average?
#
# **Clipping by norm** multiplies the gradient by `max_norm / norm` if its norm exceeds `max_norm`. The norm is taken over the gradients of *all*
# parameters together, as one long vector.
#
# Below, the ranks' gradients are (3, 0), (0, 4), (3, 0) and (0, 4). Their mean is (1.5, 2), its norm 2.5. We clip to norm 1 in two ways: after
# averaging, and on each rank before averaging.

# %% tags=["prediction", "hidden"]
predict.clip_first()

# %%
# %%ddp
from torch.nn.utils import clip_grad_norm_


def fresh():
    """A parameter with this rank's own gradient."""
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]][rank % 2])
    return p


after, before = fresh(), fresh()
dist.all_reduce(after.grad, dist.ReduceOp.AVG)
norm = clip_grad_norm_([after], max_norm=1)

clip_grad_norm_([before], max_norm=1)
dist.all_reduce(before.grad, dist.ReduceOp.AVG)
for words, p in (("average, then clip", after), ("clip, then average", before)):
    print(f"{words}: ({p.grad[0]:.2f}, {p.grad[1]:.2f}), norm {p.grad.norm():.2f}")

# %% [markdown]
# Clipping on each rank first changes the direction, not only the length. A rank with a large gradient has no more influence than one with a
# small gradient. The norm is at most `max_norm`, and the more the ranks' gradients differ, the smaller it is. The same holds for
# micro-batches: clip once, after the last one.
#
# With a loss scale the order in a step is:
#
# 1. `scaler.scale(loss).backward()` for each micro-batch; the last one exchanges.
# 2. `scaler.unscale_(optimizer)`, once; otherwise `max_norm` is compared with a norm that is too large by the factor of the scale.
# 3. `clip_grad_norm_(parameters, max_norm)`.
# 4. `scaler.step(optimizer)` and `scaler.update()`.
#
# ## The norm of a sharded gradient
#
# If gradients are sharded, a rank by itself can only compute the norm of its shard. Squares add up: the norm is the root of the sum of the squares over
# all ranks that hold one copy *together*. Large clusters have a **mesh**: shards within a group of ranks, and replicas of the group. Below, ranks 0 and
# 1 together hold one copy of a layer, and ranks 2 and 3 hold a second copy.

# %% tags=["prediction", "hidden"]
predict.over_all_ranks()

# %%
# %%ddp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
alone, sharded = nn.Linear(4, 8), nn.Linear(4, 8)
sharded.load_state_dict(alone.state_dict())
fully_shard(sharded, mesh=mesh)
for net in (alone, sharded):
    net(torch.ones(1, 4)).square().sum().backward()

whole = nn.utils.get_total_norm([p.grad for p in alone.parameters()])
squares = sum(p.grad.to_local().square().sum() for p in sharded.parameters())
own = squares.sqrt() / whole
dist.all_reduce(squares)
everywhere = squares.sqrt() / whole
torchs = nn.utils.get_total_norm([p.grad for p in sharded.parameters()]).full_tensor() / whole
print(
    f"own shard {'below' if own < 0.99 else 'not below'} 1 · over all four ranks {everywhere:.2f} · torch on DTensors {torchs:.2f}"
)

# %% [markdown]
# The sum over all four ranks counts every shard twice, once for each replica. So the norm is √2 times too large, and gradients are clipped too much. torch's own functions
# know from a DTensor over which dimensions of the mesh it is sharded.
#
# ### Exercise: clip by the global norm
#
# Write `clip_global_norm` for plain tensors. The ranks of `shard_group` together hold one copy of the sharded parameters; other groups hold further
# copies. Gradients have been averaged. The check runs it on all meshes that the ranks can form.


# %% tags=["exercise"]
def clip_global_norm(sharded, replicated, max_norm, shard_group):
    """Clips all gradients in place and returns the norm before. sharded: parameters of which this rank has its shard, which
    may be empty; replicated: parameters that every rank holds whole. Some .grad may be None."""
    import torch
    import torch.distributed as dist

    ...  # your code


# %%
check.clip_global_norm(clip_global_norm)


# %% tags=["solution"]
def clip_global_norm(sharded, replicated, max_norm, shard_group):
    """Clips all gradients in place and returns the norm before. sharded: parameters of which this rank has its shard, which
    may be empty; replicated: parameters that every rank holds whole. Some .grad may be None."""
    import torch
    import torch.distributed as dist

    shards = [p.grad for p in sharded if p.grad is not None]
    copies = [p.grad for p in replicated if p.grad is not None]
    squares = sum(g.square().sum() for g in shards)
    dist.all_reduce(squares, group=shard_group)
    norm = torch.sqrt(squares + sum(g.square().sum() for g in copies))
    factor = torch.clamp(max_norm / norm, max=1.0)
    for g in shards + copies:
        g *= factor
    return norm


# %% [markdown]
# `factor` stays a tensor: no rank waits for the value of the norm, which on a GPU would stop the CPU in every step.
#
# ## To remember
#
# - float16 needs a loss scale, bfloat16 does not. An overflow costs one step and halves the scale.
# - Every decision about a step must be the same on all ranks. Under DDP the all-reduce ensures this; with shards you need a separate all-reduce.
# - Clip once: after the last micro-batch, after the exchange, after `unscale_`.
# - Each number of the gradient counts once in the norm. Sum squares over the ranks that share a copy, never over replicas.
#
# **On real GPUs:** run the same cells with `"cuda"` instead of `"cpu"`, and tensors on the rank's device. After 1000 steps of your own float16
# training, run `%ddp compare model`: the parameters must be equal on all ranks.
#
# ## Glossary
#
# - **Mixed precision:** matrix products in 16 bits, parameters and optimizer in 32.
# - **Autocast:** the context manager that chooses the dtype of each operation.
# - **Loss scale:** the factor on the loss that keeps small gradients above float16's smallest numbers.
# - **found_inf:** what `GradScaler` calls the number that is not 0 if a gradient was inf or nan.
# - **Global norm:** the norm of all gradients as one vector, over all parameters and all shards.
# - **Mesh:** ranks laid out in rows and columns; here replicas and shards.
#
# ## Further reading
#
# - [Micikevicius et al., *Mixed Precision Training*](https://arxiv.org/abs/1710.03740), 2017: float32 copies of parameters, and loss scaling.
# - [Kalamkar et al., *A Study of BFLOAT16 for Deep Learning Training*](https://arxiv.org/abs/1905.12322), 2019.
# - [Pascanu, Mikolov and Bengio, *On the difficulty of training recurrent neural networks*](https://arxiv.org/abs/1211.5063), 2012: clipping by norm.
# - PyTorch: [Automatic Mixed Precision package](https://docs.pytorch.org/docs/stable/amp.html), [AMP examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html),
#   [`clip_grad_norm_`](https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html).

# %%
# %ddp stop
