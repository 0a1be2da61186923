# %% [markdown]
# # When nothing happens
#
# A distributed program that goes wrong often does not stop. It stands still, without a word, until a timeout: half an hour with gloo, ten minutes with NCCL.
# Or worse: it goes on, and its numbers are wrong.
#
# **After this lesson you can** tell a hang from a slow rank, find the rank that the others wait for, catch calls that do not fit together before they do
# harm, and mend the most usual hang of all: ranks with different numbers of batches.

# %%
# %load_ext nbddp

# %% [markdown]
# ## A call that one rank does not make
#
# A collective is a meeting: **every rank of the group must call it, the same calls in the same order.** Here are four ranks, and one of them leaves a call out.

# %%
# %%ddp --nproc 4
import time

import torch
import torch.distributed as dist

dist.init_process_group()
rank = dist.get_rank()

# %% [markdown]
# **Predict:** which ranks come to the end of the next cell?
#
# (`--hang-after 2` says how many seconds a deadlock may stand before it is told; it is 5 if you say nothing.)

# %% tags=["raises-exception"]
# %%ddp --hang-after 2
loss = torch.tensor([float(rank)])
if rank != 2:
    dist.all_reduce(loss)

# %% [markdown]
# Rank 2 alone, and it is the one with the mistake. That is the rule with hangs: **the ranks that stand still are not the ones to look at.** Look for the one that
# they wait for.
#
# The ranks were freed. What was in their memory is still there; only the process group is gone. `%ddp stacks` shows where each rank was, with the Python
# stack down into torch. It works while a cell runs, too: type `python -m nbddp stacks` in a terminal.

# %% tags=["nbval-ignore-output"]
# %ddp stacks

# %% [markdown]
# ## A slow rank is no hang
#
# Rank 2 now sleeps for three seconds before it comes, longer than `--hang-after`.
#
# **Predict:** does the next cell end with an error?

# %%
# %%ddp --hang-after 1
dist.init_process_group()
if rank == 2:
    time.sleep(3)
dist.all_reduce(loss)
dist.get_world_size()

# %% [markdown]
# No. A deadlock is not "it takes long". It is a set of ranks that wait for ranks which **cannot** come: those have ended, failed, or wait themselves. Rank 2 was still
# running, so it could come, and it did. (A timeout cannot tell the two apart. A low one kills slow programs; a high one leaves you waiting.)
#
# ## Two calls the other way round
#
# **Predict:** all four ranks make two calls below. What is said this time: who waits for whom?

# %% tags=["raises-exception"]
# %%ddp --hang-after 2
if rank == 1:
    dist.barrier()
    dist.all_reduce(loss)
else:
    dist.all_reduce(loss)
    dist.barrier()

# %% [markdown]
# Everybody waits for everybody. Ranks do not meet by line or by name but by number: the second collective of one rank meets the second of all others, whatever it is. So
# an `if rank == ...` around a collective is the first place to look at.
#
# The explorer plays such programs move by move. Each row is what a rank has called; the arrows lead from a rank that waits to those it waits for.
#
# **Predict** for "rank 0 alone makes a call" (an evaluation on rank 0, say) and for "a ring, all receive first" which ranks stand still, and then look. Which
# program goes through although it is wrong?

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.collectives()

# %% [markdown]
# ## Exercise: who has not come?
#
# On a cluster you often have no more than a log: what each rank has called, in order. `log` is a dict from rank to list, such as
# `{0: ["broadcast", "all_reduce"], 1: ["broadcast"]}`. Answer with the number of the first collective that not every rank has called (counted from 1) and the ranks, in order,
# that have not: here `(2, [1])`. If all have called as many, the answer is `None`.


# %% tags=["exercise"]
def missing_ranks(log):
    """The number of the collective that holds the ranks up, and the ranks not in it; or None."""
    ...  # your code


# %%
from nbddp.teach import check

check.missing_ranks(missing_ranks)


# %% tags=["solution"]
def missing_ranks(log):
    """The number of the collective that holds the ranks up, and the ranks not in it; or None."""
    calls = {rank: len(names) for rank, names in log.items()}
    fewest = min(calls.values())
    if fewest == max(calls.values()):
        return None
    return fewest + 1, sorted(rank for rank, count in calls.items() if count == fewest)


# %% [markdown]
# ## Wrong, and nobody waits
#
# A hang at least is noticed. Below, rank 3 asks for the maximum where all others ask for the sum of 0…7 plus their rank. The right sums are 6, 10, 14, 18, 22, 26, 30, 34.
#
# PyTorch has a debug mode that has ranks compare their calls, `TORCH_DISTRIBUTED_DEBUG=DETAIL`. This process group is made under it.
#
# **Predict:** does it hang? Do all ranks get the same numbers? And what does the debug mode say?

# %%
# %%ddp
dist.set_debug_level(dist.DebugLevel.DETAIL)  # as TORCH_DISTRIBUTED_DEBUG=DETAIL does for a whole program
dist.init_process_group()
dist.set_debug_level(dist.DebugLevel.OFF)
numbers = torch.arange(8.0) + rank
dist.all_reduce(numbers, op=dist.ReduceOp.MAX if rank == 3 else dist.ReduceOp.SUM)
numbers.tolist()

# %% [markdown]
# No error, the same numbers everywhere, and from the third on they are wrong: each piece was reduced by several ranks in turn, and one of them took the maximum. The debug mode
# compares shapes and types, but not the reduce operation. Other mistakes of this kind, as they behave with gloo on a CPU:
#
# | one rank has | what happens | what `DETAIL` says |
# |---|---|---|
# | another reduce operation | wrong numbers, no error | nothing |
# | int32 for float32 | wrong numbers, no error | before the call, on every rank: `Detected mismatch between collectives`, its own call and another rank's |
# | another number of elements | a process dies, or a wrong sum, or a hang | the same |
# | another collective | a hang | the same |
# | one call fewer | a hang | after the timeout, on rank 0: `Ranks 3 failed to pass monitoredBarrier` |
#
# Set the variable before the processes start: in front of `torchrun`, or with `%env` before the pool's first cell. It says the call's number, not the line of your program.
# (In PyTorch 2.13 with gloo, torchrun and `DETAIL`, a process dies with SIGSEGV where it wraps a model in DDP; other programs are well.)
#
# `--check` compares the reduce operation and the root as well, and in the first four cases says in one sentence what differs on which ranks, **before** each collective that your
# Python code makes. The fifth is a deadlock, told as such in every cell. (It does not see the calls that DDP makes in C++, and it costs some tenths of a millisecond per call,
# so it is for looking, not for training.)
#
# **Predict:** which ranks raise an error? Without the `try` the cell would end with it.

# %%
# %%ddp --check
dist.init_process_group()
numbers = torch.arange(8.0) + rank
try:
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX if rank == 3 else dist.ReduceOp.SUM)
except RuntimeError as error:
    print(type(error).__name__, "·", error)

# %% [markdown]
# ## Exercise: one batch more
#
# DDP's backward is an all-reduce for each bucket. So **every rank must take the same number of steps.** Deal 97 samples out to 3 ranks:
# one has 33, the others 32. In batches of 8 that is 5 batches against 4, and the last step waits for ever. `DistributedSampler` takes care by padding; your own data loader may not.
#
# This loop is right on one rank and hangs on uneven ones. Run the check to see it, then mend the loop. There are two good ways:
#
# - **agree on the count** with a collective of your own before the loop, or
# - **`Join`** from `torch.distributed.algorithms.join`: inside `with Join([model]):` a rank that has run out of batches stands in for its part of the others' collectives.
#
# The check trains for real with three different layouts of batches, and compares the parameters with those of one process that has all shards.


# %% tags=["exercise"]
import torch
import torch.distributed as dist


def train_uneven(model, optimizer, batches):
    """Train the DDP model on this rank's batches: a list of (inputs, targets), longer on some ranks."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


# %%
check.train_uneven(train_uneven)


# %% tags=["solution"]
import torch
import torch.distributed as dist


def train_uneven(model, optimizer, batches):
    """Train the DDP model on this rank's batches: a list of (inputs, targets), longer on some ranks."""
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    for inputs, targets in batches[: int(steps)]:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


# %% [markdown]
# Agreeing on the smallest count leaves some batches out of this epoch; shuffle, and the next epoch has them. `Join` uses all, and in the last steps fewer ranks have a say.
#
# ## To remember
#
# - Ranks meet by number: every rank of a group makes the same collectives in the same order, and `if rank == ...` around one is the usual suspect.
# - In a hang, look for the rank that is *not* there: it has ended, failed, or stands in another call.
# - What does not hang may still be wrong; while you write a program, run it with `--check`.
#
# **On real GPUs:** the calls there are queued, so a rank stands still later than where it went wrong, at the next `.item()` or `synchronize()`. Run the first cells again on GPUs:
# does `%ddp stacks` show the line of the collective, or a later one? And start once with `NCCL_DEBUG=INFO`: every rank then writes NCCL's version, the network interface it has chosen,
# its rings, and by what way it reaches the next GPU: directly (`P2P`, over NVLink or PCIe), by shared memory (`SHM`) or by the network (`NET/IB`, `NET/Socket`). That is for ranks that
# hang in their *first* collective or are far too slow, as with a wrong interface (`NCCL_SOCKET_IFNAME` sets it). Of calls that do not fit together it says nothing.

# %%
# %ddp stop
