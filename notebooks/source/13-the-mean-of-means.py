# %% [markdown]
# # The mean of means
#
# A loss is usually the mean over a batch, and DDP averages the ranks' gradients. If batches differ in size, the mean of their means is not
# the mean over all samples. Language models are trained on sentences of unequal length, so this happens there in every step. Several
# training frameworks shipped with this bug for years: training ran, and the only symptom was a slightly wrong loss.
#
# **After this lesson you can**
#
# - state the weight of each token in a step, and choose the right divisor for its loss;
# - compute the gradient of the mean over all tokens of all ranks and micro-batches, with one exchange of gradients;
# - choose a learning rate for a larger batch.

# %%
# %load_ext nbddp
from nbddp.teach import check, explore, predict

# %% [markdown]
# ## The weight of a token
#
# A **token** is a word or a part of one. Here we measure the weight of a token in a step. The model has a single parameter with an entry for each token
# of the step, and the loss of token *i* is entry *i*. The derivative of entry *i* by itself is 1, so its gradient after the step's `backward()` is
# exactly the **weight** of token *i*.
#
# Four ranks have batches of 1, 2, 3 and 6 tokens, 12 in all. In the mean over all tokens, each token has weight 1/12.

# %% tags=["prediction", "hidden"]
predict.token_weights()

# %%
# %%ddp --nproc 4
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()


class Ruler(nn.Module):
    """The gradient of its parameter is the weight of each token."""

    def __init__(self, tokens):
        super().__init__()
        self.entries = nn.Parameter(torch.zeros(tokens))

    def forward(self, tokens):
        return self.entries[tokens]


lengths = [1, 2, 3, 6]
begin = sum(lengths[:rank])
mine = torch.arange(begin, begin + lengths[rank])
model = DDP(Ruler(sum(lengths)))
model(mine).mean().backward()

weights = model.module.entries.grad
print(
    f"tokens here: {lengths[rank]}, each counts 1/{1 / weights[begin]:.0f}; all weights add up to {weights.sum():.0f}"
)

# %% [markdown]
# Each rank's batch has weight 1/4, whatever its size. On rank 0 one token has this weight alone; on rank 3 six tokens share it.
#
# The loss that you print has the same error. The mean over the ranks of their mean losses is not the mean loss.
#
# ## Micro-batches and `no_sync`
#
# A batch that is too large for the memory of a rank is split into **micro-batches**. `backward()` *adds* to `.grad`, so they go forward and
# backward one after another, and then the optimizer takes one step. This is **gradient accumulation**. DDP would still exchange gradients in
# every `backward()`. Inside `model.no_sync()` it does not.
#
# Below, each rank has two micro-batches of one token. The first is inside `no_sync`, the second is not.

# %% tags=["prediction", "hidden"]
predict.after_no_sync()

# %%
# %%ddp
first, second = torch.tensor([2 * rank]), torch.tensor([2 * rank + 1])
model = DDP(Ruler(2 * world_size))
with model.no_sync():
    (model(first).mean() / 2).backward()
print("inside no_sync", model.module.entries.grad.tolist())

(model(second).mean() / 2).backward()
print("afterwards    ", model.module.entries.grad.tolist())

# %% [markdown]
# After the first `backward()`, a rank has the gradient of its own token only. The second `backward()` exchanges the accumulated sum, because DDP fills
# a bucket from `.grad` after the micro-batch's gradient has been added to it. So each of the 8 tokens has weight 1/8, and there was one exchange.
#
# Two details matter:
#
# - Each loss is divided by 2, the number of micro-batches, because `backward()` adds.
# - DDP decides in **forward** whether `backward()` will exchange, so forward belongs inside `no_sync` too.
#
# ### Exercise: the gradients of the large batch
#
# Write `accumulate` for micro-batches of equal size. Afterwards, every parameter's `.grad` is the gradient of the mean loss over all samples of all
# ranks, and gradients have been exchanged **once**. The check gives each rank different samples, compares with one process that sees all samples, and
# counts the exchanges.


# %% tags=["exercise"]
def accumulate(model, micro_batches, loss_of):
    """model: a DDP without gradients; micro_batches: a list of (inputs, targets), all of one size;
    loss_of(outputs, targets): the mean loss of a micro-batch."""
    ...  # your code


# %%
check.accumulate(accumulate)

# %% [markdown]
# Stuck? `check.accumulate(accumulate, hint=True)` gives a hint, and another one each time it is run.


# %% tags=["solution"]
def accumulate(model, micro_batches, loss_of):
    """model: a DDP without gradients; micro_batches: a list of (inputs, targets), all of one size;
    loss_of(outputs, targets): the mean loss of a micro-batch."""
    *early, last = micro_batches
    with model.no_sync():
        for inputs, targets in early:
            (loss_of(model(inputs), targets) / len(micro_batches)).backward()
    inputs, targets = last
    (loss_of(model(inputs), targets) / len(micro_batches)).backward()


# %% [markdown]
# ## Unequal micro-batches
#
# Now sizes differ, between micro-batches and between ranks. The explorer shows two ranks with two micro-batches each. Every token is a square: its area
# is the token's weight, and the dashed frame is the correct weight.
#
# The last control chooses the divisor of a micro-batch's summed loss. DDP then averages over the two ranks.

# %% tags=["prediction", "hidden"]
predict.own_tokens()

# %% tags=["nbval-ignore-output"]
explore.weights()

# %% [markdown]
# Try 12, 4, 2 and 6 tokens with each divisor:
#
# - *Tokens of the micro-batch × micro-batches* is the mean of means. A token of the shortest micro-batch counts 6 times as much as one of the longest.
#   The weighted mean is noisier, too: its 24 tokens reduce noise only as much as 16 equally weighted tokens would.
# - *Tokens of the rank* corrects the weights within a rank, but not between ranks. A rank with 8 tokens still counts as much as one with 16.
# - *Tokens of all ranks / world size* gives every token the same weight.
#
# No rank knows the total number of tokens, so a small all-reduce is needed. It must happen **before** the first `backward()`.
#
# ### Exercise: the gradient of the mean over all tokens
#
# Write `token_weighted_backward`. The targets of a micro-batch are token ids; **−100** marks padding, which is no token. `loss_sum` gives the
# **sum** of the losses over the tokens of a micro-batch. Afterwards `.grad` is the gradient of the mean loss over all tokens of all ranks and micro-batches, and
# gradients have been exchanged once. Ranks may have unequal numbers of micro-batches, and a micro-batch may be all padding.


# %% tags=["exercise"]
def token_weighted_backward(model, micro_batches, loss_sum):
    """model: a DDP without gradients; micro_batches: a list of (inputs, targets) of token ids, targets of -100 are
    padding; loss_sum(outputs, targets): the sum of the losses over the tokens of a micro-batch."""
    import torch.distributed as dist

    ...  # your code


# %%
check.token_weighted_backward(token_weighted_backward)


# %% tags=["solution"]
def token_weighted_backward(model, micro_batches, loss_sum):
    """model: a DDP without gradients; micro_batches: a list of (inputs, targets) of token ids, targets of -100 are
    padding; loss_sum(outputs, targets): the sum of the losses over the tokens of a micro-batch."""
    import torch.distributed as dist

    tokens = sum((targets != -100).sum() for _, targets in micro_batches)
    dist.all_reduce(tokens)
    scale = dist.get_world_size() / tokens
    *early, last = micro_batches
    with model.no_sync():
        for inputs, targets in early:
            (scale * loss_sum(model(inputs), targets)).backward()
    inputs, targets = last
    (scale * loss_sum(model(inputs), targets)).backward()


# %% [markdown]
# `tokens` stays a tensor on the device of the targets, so NCCL can all-reduce it, and the CPU does not wait for its value.
#
# ## Larger batches and the learning rate
#
# The **effective batch** of a step is the number of samples over which its gradient is averaged: ranks × micro-batches × samples per micro-batch. With
# more ranks and the same batch per rank, an epoch has fewer steps.
#
# Below a small network reads 2048 samples twice. First, one process uses 8 samples per step, with a learning rate of 0.025: 512 steps. Then four ranks
# use 8 samples each: 128 steps.

# %% tags=["prediction", "hidden"]
predict.larger_batch()

# %%
# %%ddp
torch.manual_seed(5)
teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).requires_grad_(False)
inputs = torch.randn(2048, 16, generator=torch.Generator().manual_seed(0))
targets = teacher(inputs)
targets = (targets - targets.mean(0)) / targets.std(0)
loss_of = nn.MSELoss()


def fresh():
    """The initial network, the same on every rank, with He initialization."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def train(ranks, batch, rate, start=1.0, warmup=1):
    """Each of `ranks` uses `batch` samples per step. The learning rate begins at start × rate and reaches rate after
    `warmup` steps. Returns the loss over all samples at the beginning, after the first step, and after two epochs."""
    net, losses = fresh(), []
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=start, total_iters=warmup)
    for step in range(2 * len(inputs) // (ranks * batch)):
        if step < 2:
            losses.append(loss_of(net(inputs), targets).item())
        begin = (step * ranks + rank % ranks) * batch % len(inputs)
        mine = slice(begin, begin + batch)
        optimizer.zero_grad()
        loss_of(model(inputs[mine]), targets[mine]).backward()
        optimizer.step()
        schedule.step()
    return [*losses, loss_of(net(inputs), targets).item()]


for ranks, rate in ((1, 0.025), (4, 0.025), (4, 0.05), (4, 0.1)):
    losses = train(ranks, 8, rate)
    if rank == 0:
        print(f"{ranks} × 8 samples per step, learning rate {rate:5}: loss {losses[-1]:.2f}")

# %% [markdown]
# With four times the learning rate the loss is nearly that of the single process again. This is the **linear scaling rule**: multiply the batch by *k*,
# multiply the learning rate by *k*. The reason: as long as the gradient changes little, one step of length *k* has nearly the same effect as *k* steps
# of length 1.
#
# At the beginning of training the gradient changes fast. Now a step uses 4 × 32 samples, 16 times as many as in the first run, so the linear rule gives
# 0.4. A **warm-up** begins at the learning rate of the small batch and raises it step by step.

# %% tags=["prediction", "hidden"]
predict.warm_up()

# %%
# %%ddp
for words, start, warmup in (("at once", 1.0, 1), ("after 8 steps of warm-up", 1 / 16, 8)):
    losses = train(4, 32, 0.4, start, warmup)
    if rank == 0:
        first, second, last = losses
        print(f"0.4 {words}: loss {first:.2f}, after the first step {second:.2f}, in the end {last:.2f}")

# %% [markdown]
# The first step at 0.4 is so long that the loss rises from 2.7 to 20. With a warm-up, the first step is a sixteenth as long. It is not a guarantee: of
# 20 random starts, 18 end with a lower loss, and none reaches the loss of 512 small steps. The linear rule holds only up to a batch size that depends
# on the task. For Adam, the square root of *k* is often used instead.
#
# ### Exercise: the learning rate of a step
#
# Write the schedule: `base` at step 0, the linear rule's rate from step `warmup` on, and equal increments between them.


# %% tags=["exercise"]
def learning_rate(step, warmup, base, base_batch, ranks, batch, micro_batches):
    """base: the learning rate for an effective batch of `base_batch` samples. Now each of `ranks` uses
    `micro_batches` micro-batches of `batch` samples per step. warmup: number of warm-up steps, may be 0; step: from 0."""
    ...  # your code


# %%
check.learning_rate(learning_rate)


# %% tags=["solution"]
def learning_rate(step, warmup, base, base_batch, ranks, batch, micro_batches):
    """base: the learning rate for an effective batch of `base_batch` samples. Now each of `ranks` uses
    `micro_batches` micro-batches of `batch` samples per step. warmup: number of warm-up steps, may be 0; step: from 0."""
    target = base * ranks * batch * micro_batches / base_batch
    if step >= warmup:
        return target
    return base + (target - base) * step / warmup


# %% [markdown]
# ## To remember
#
# - DDP averages ranks. If ranks or micro-batches differ in size, sum the losses, divide by the number of tokens of **all** ranks, and multiply by the
#   world size.
# - Accumulating *k* micro-batches under `no_sync` costs one exchange for *k* times the computation. Keep the last micro-batch outside `no_sync`.
# - The effective batch counts ranks and micro-batches. For a batch *k* times as large, use *k* times the learning rate, after a warm-up. This holds
#   only up to some batch size.
#
# **On real GPUs:** count the tokens of each rank in a step of your own training, and print the smallest and the largest number. If you
# average means, their ratio shows how unequal the weights of tokens are. With `%ddp timings` compare steps with and without `no_sync`.
#
# ## Glossary
#
# - **Micro-batch:** the samples that go forward and backward at once on one rank.
# - **Gradient accumulation:** adding up the gradients of several micro-batches before the optimizer's step.
# - **`no_sync`:** DDP's context manager in which `backward()` does not exchange gradients.
# - **Effective batch:** the samples of all ranks and micro-batches in one step of the optimizer.
# - **Linear scaling rule:** *k* times the batch, *k* times the learning rate.
# - **Warm-up:** the first steps of training, in which the learning rate rises.
#
# ## Further reading
#
# - [Goyal et al., *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*](https://arxiv.org/abs/1706.02677), 2017: the linear rule, warm-up, and
#   the pitfalls of averaging the loss on each worker.
# - [McCandlish et al., *An Empirical Model of Large-Batch Training*](https://arxiv.org/abs/1812.06162), 2018: up to which size a larger batch pays off.
# - [*Fixing Gradient Accumulation*](https://huggingface.co/blog/gradient_accumulation) and [*Bugs in LLM Training: Gradient Accumulation
#   Fix*](https://unsloth.ai/blog/gradient), 2024: the bug of this lesson in the wild.
# - PyTorch: [`DistributedDataParallel.no_sync`](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html),
#   [`LinearLR`](https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.LinearLR.html).

# %%
# %ddp stop
