# %% [markdown]
# # Pipelines by hand
#
# A model that is too large for one device can be cut between its layers. Each rank holds some layers, a **stage**, and sends its results to the next
# rank. This is **pipeline parallelism**. Its price is idle time. The schedule decides how much time is idle and how much memory a stage needs.
#
# **After this lesson you can** run a model that is split over ranks with only `send` and `recv`, gradients included; calculate the bubble; write the
# 1F1B schedule; and use `torch.distributed.pipelining`.

# %%
# %load_ext nbddp

# %% [markdown]
# ## A batch through four stages
#
# Four layers, one per rank. In forward, rank *r* receives the **activations** of the layer before, computes, and sends its own. Autograd does not see
# messages: on each rank it sees one layer, from the received tensor to the sent one. So backward needs messages too.

# %% tags=["prediction", "hidden"]
from nbddp.teach import predict

predict.sent_back()

# %%
# %%ddp --nproc 4
import torch
import torch.distributed as dist
from torch import nn

if not dist.is_initialized():
    dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
last = world_size - 1

torch.manual_seed(0)  # all ranks make the same layers, and each keeps its own
layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(world_size)]
stage, inputs, targets = layers[rank], torch.randn(24, 16), torch.randn(24, 16)
mse = nn.functional.mse_loss

if rank == 0:
    x = inputs
else:
    dist.recv(x := torch.empty(24, 16), rank - 1)
    x.requires_grad_()  # so that backward leaves x.grad
y = stage(x)
if rank < last:
    dist.send(y.detach(), rank + 1)

if rank == last:
    loss = mse(y, targets)
    loss.backward()
else:
    dist.recv(gradient := torch.empty(24, 16), rank + 1)
    y.backward(gradient)
if rank > 0:
    dist.send(x.grad, rank - 1)
print(f"parameters {tuple(stage[0].weight.grad.shape)}", end=" · ")
print(f"sent back {tuple(x.grad.shape)}" if rank > 0 else "sent back nothing")

# %% [markdown]
# Rank 3 sends the gradient of the loss with respect to its input: `x.grad`, of the activations' shape. For rank 2 this is the gradient of its output,
# and `y.backward(gradient)` continues from there. The gradients of parameters never leave their rank.
#
# Are they the right ones? Every rank has made all layers, so each can compare with one process that runs the whole model.

# %%
# %%ddp
torch.manual_seed(0)
alone = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(world_size)))
whole = mse(alone(inputs), targets)
whole.backward()
expected = alone[rank][0].weight.grad
print("gradients of one process:", torch.allclose(stage[0].weight.grad, expected, atol=1e-6))

# %% [markdown]
# ## Micro-batches and the bubble
#
# That was correct, but slow: rank 3 cannot begin before ranks 0 to 2 have finished, and then they wait for rank 3. The remedy is to split the batch
# into **micro-batches**. While rank 1 works on the first one, rank 0 starts the second. The remaining idle time, while the pipeline fills and drains,
# is the **bubble**. With *p* stages and *m* micro-batches its share of the time is (*p* − 1)/(*m* + *p* − 1).
#
# In the picture a forward pass takes one tick and a backward pass two. Numbers denote micro-batches. "held" counts the micro-batches whose activations
# a stage keeps until their backward pass. **GPipe** does all forward passes, then all backward passes. **1F1B** ("one forward, one backward") starts
# each backward pass as early as it can. Press Play, or step through the ticks.

# %% tags=["prediction", "hidden"]
predict.one_micro_batch()

# %% tags=["prediction", "hidden"]
predict.a_quarter()

# %% tags=["prediction", "hidden"]
predict.what_1f1b_saves()

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.pipeline()

# %% [markdown]
# - With one micro-batch, each of four stages is idle for 3/4 of the time. With nine micro-batches, it is idle for a quarter.
# - More micro-batches shrink the bubble. But under GPipe every stage holds the activations of all of them.
# - 1F1B has the same bubble. Stage *s* holds at most *p* − *s* micro-batches, whatever *m* is, so *m* can be large.
#
# ## Exercise: 1F1B
#
# Write the list of one stage: pairs `("F", i)` and `("B", i)` for the forward and backward pass of micro-batch *i*, counted from 0. The check runs the
# lists of all stages together. It accepts any schedule that finishes, holds at most *p* − *s* micro-batches on stage *s*, and takes no longer than
# 1F1B.


# %% tags=["exercise"]
def schedule_1f1b(stage, stages, micro_batches):
    """The steps of one stage, in order: a list of ("F", i) and ("B", i)."""
    ...  # your code


# %%
from nbddp.teach import check

check.schedule_1f1b(schedule_1f1b)

# %% [markdown]
# Stuck? `check.schedule_1f1b(schedule_1f1b, hint=True)` gives a hint, and another one each time it is run.


# %% tags=["solution"]
def schedule_1f1b(stage, stages, micro_batches):
    """The steps of one stage, in order: a list of ("F", i) and ("B", i)."""
    ahead = min(stages - 1 - stage, micro_batches)
    steps = [("F", i) for i in range(ahead)]
    for i in range(ahead, micro_batches):
        steps += [("F", i), ("B", i - ahead)]
    return steps + [("B", i) for i in range(micro_batches - ahead, micro_batches)]


# %% [markdown]
# ## Messages that cross
#
# Now real ranks follow the lists. To show only the messages, the stages below compute nothing: they receive a number and send it on. Under GPipe, this
# finishes.

# %%
# %%ddp --hang-after 1
if not dist.is_initialized():
    dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
last = world_size - 1


def pass_on(steps):
    """Run this rank's steps with blocking sends; return the number of messages received."""
    received, token = 0, torch.zeros(1)
    for kind, _ in steps:
        before, after = (rank - 1, rank + 1) if kind == "F" else (rank + 1, rank - 1)
        if 0 <= before <= last:
            dist.recv(token, before)
            received += 1
        if 0 <= after <= last:
            dist.send(token, after)
    return received


gpipe = [("F", i) for i in range(6)] + [("B", i) for i in range(6)]
print("received", pass_on(gpipe))

# %% tags=["prediction", "hidden"]
predict.blocking_1f1b()

# %% tags=["raises-exception"]
# %%ddp --hang-after 1
if not dist.is_initialized():
    dist.init_process_group()
ahead = last - rank
one_f_one_b = [("F", i) for i in range(ahead)]
for i in range(ahead, 6):
    one_f_one_b += [("F", i), ("B", i - ahead)]
one_f_one_b += [("B", i) for i in range(6 - ahead, 6)]
print("received", pass_on(one_f_one_b))

# %% [markdown]
# The schedule is right, but the blocking sends are not. Rank 0 sends an activation while rank 1 sends a gradient back to it. `send` returns only when
# the other side receives, and neither does. Under GPipe this cannot happen, since first all messages go forward, and then all go back.
#
# `isend` starts a send and returns at once with a `Work`. Keep it, or the send may be dropped, and call `wait()` on it later.
#
# ## Exercise: the training step of a stage
#
# Write the training step of one stage. The function gets its list of steps and follows it. The check runs it on four and on three ranks, under GPipe
# and under 1F1B. Afterwards each stage's gradients must be those of one process for the **mean** loss of the whole batch.
#
# - `inputs` is the list of micro-batches on rank 0, and `None` on the others.
# - `targets` is the list of targets on the last rank, and `None` on the others.
# - All activations, and their gradients, have the shape `shape`.


# %% tags=["exercise"]
def run_stage(steps, stage, inputs, targets, loss_of, shape):
    """One training step of this rank's stage; on the last rank, returns the mean loss of the whole batch.
    loss_of(outputs, targets): the mean loss of one micro-batch."""
    import torch
    import torch.distributed as dist

    ...  # your code


# %%
check.run_stage(run_stage)


# %% tags=["solution"]
def run_stage(steps, stage, inputs, targets, loss_of, shape):
    """One training step of this rank's stage; on the last rank, returns the mean loss of the whole batch.
    loss_of(outputs, targets): the mean loss of one micro-batch."""
    import torch
    import torch.distributed as dist

    rank, last = dist.get_rank(), dist.get_world_size() - 1
    count = sum(kind == "F" for kind, _ in steps)
    kept, sends, total = {}, [], 0.0
    for kind, i in steps:
        if kind == "F":
            if rank == 0:
                x = inputs[i]
            else:
                dist.recv(x := torch.empty(shape), rank - 1)
                x.requires_grad_()
            y = stage(x)
            if rank == last:
                y = loss_of(y, targets[i]) / count
                total += y.item()
            else:
                sends.append(dist.isend(y.detach(), rank + 1))
            kept[i] = x, y
        else:
            x, y = kept.pop(i)
            gradient = None
            if rank < last:
                dist.recv(gradient := torch.empty(shape), rank + 1)
            y.backward(gradient)
            if rank > 0:
                sends.append(dist.isend(x.grad, rank - 1))
    for send in sends:
        send.wait()
    return total


# %% [markdown]
# ## In PyTorch
#
# `torch.distributed.pipelining` provides this. A `PipelineStage` wraps this rank's layers; a schedule splits the batch into micro-batches and runs its
# list in `step`. The first rank passes the inputs, the last one the targets and a list for the losses. The first `step` also sends the shapes of
# activations from stage to stage, so that each stage can allocate its buffers.

# %% tags=["prediction", "hidden"]
predict.schedules_of_torch()

# %%
# %%ddp
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

if not dist.is_initialized():
    dist.init_process_group()
for schedule in (ScheduleGPipe, Schedule1F1B):
    stage.zero_grad()
    wrapped = PipelineStage(stage, rank, world_size, torch.device("cpu"))
    pipeline, losses = schedule(wrapped, 6, loss_fn=mse), []
    if rank == 0:
        pipeline.step(inputs)
    else:
        pipeline.step(**({"target": targets, "losses": losses} if rank == last else {}))
    same = torch.allclose(stage[0].weight.grad, expected, atol=1e-6)
    print(f"{schedule.__name__}: gradients of one process: {same}", end=" · " if rank == last else "\n")
    if rank == last:
        print("loss of one process:", torch.allclose(torch.stack(losses).mean(), whole, atol=1e-6))

# %% [markdown]
# Both give the gradients and the loss of one process. The schedule divides the gradients by the number of micro-batches (`scale_grads`). In PyTorch 2.6
# it does not, and 1F1B hangs with gloo.
#
# ## Cost
#
# A pipeline sends few bytes: for each micro-batch, one activation and one gradient between two neighbouring stages. Take a transformer of width 8192
# with sequences of 4096 tokens in bfloat16, one sequence in a micro-batch, on eight stages.

# %%
megabytes = 4096 * 8192 * 2 / 1e6
print(f"per boundary and micro-batch: {megabytes:.0f} MB forward and {megabytes:.0f} MB back")
print("micro-batches   bubble   held by stage 0: GPipe   1F1B")
for m in (1, 8, 32, 128):
    print(f"{m:13}   {7 / (m + 7):6.0%}   {m:22}   {min(8, m):4}")

# %% [markdown]
# More micro-batches make the bubble smaller, and only 1F1B has the memory for them. Interleaved schedules give each rank several short stages: the
# bubble becomes smaller still, and there are more messages. Zero-bubble schedules split the backward pass in two and fill the gaps with the half on
# which no other stage depends.
#
# ## To remember
#
# - A stage sends activations forward and the gradients of its inputs back. Gradients of parameters stay where they are.
# - The bubble takes (*p* − 1)/(*m* + *p* − 1) of the time, under GPipe and 1F1B alike.
# - GPipe holds *m* micro-batches on every stage. 1F1B holds at most *p* − *s* on stage *s*.
# - In 1F1B messages cross, so start sends with `isend` and wait for them later.
#
# **On real GPUs:** take `torch.device("cuda", local_rank)` for the stage and its tensors, and run the PyTorch cell with more micro-batches. `%%ddp
# --trace` shows the bubble as idle time. NCCL requires crossing sends and receives to be in one `dist.batch_isend_irecv`, as
# `torch.distributed.pipelining` does.
#
# ## Glossary
#
# - **activations**: the output of a layer or stage for a batch; backward needs them.
# - **bubble**: the share of the time in which a stage is idle because the pipeline fills or drains.
# - **GPipe**: the schedule with all forward passes before all backward passes.
# - **micro-batch**: a part of the batch that goes through the pipeline at once.
# - **1F1B**: the schedule that alternates one forward and one backward pass as soon as the first gradient is back.
# - **schedule**: for each stage, the order of its forward and backward passes.
# - **stage**: the layers that one rank holds.
#
# ## Further reading
#
# - Huang et al., [GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism](https://arxiv.org/abs/1811.06965), 2019.
# - Narayanan et al., [Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM](https://arxiv.org/abs/2104.04473), 2021: 1F1B
#   with a flush, and interleaved stages.
# - Qi et al., [Zero Bubble Pipeline Parallelism](https://arxiv.org/abs/2401.10241), 2023.
# - PyTorch, [Pipeline Parallelism](https://pytorch.org/docs/stable/distributed.pipelining.html): `torch.distributed.pipelining`.

# %%
# %ddp stop
