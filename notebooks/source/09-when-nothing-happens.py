# %% [markdown]
# # When nothing happens
#
# A distributed program with a mistake often does not stop with an error. It waits in silence until a timeout: half an hour with Gloo, ten minutes with NCCL. Or
# it continues, and its numbers are wrong.
#
# **After this lesson you can**
#
# - tell a hang from a slow rank;
# - find the rank that the others wait for;
# - detect mismatched calls before they cause damage;
# - fix the most common hang: ranks with different numbers of batches.

# %%
# %load_ext nbddp

# %% [markdown]
# ## A call that one rank does not make
#
# **Every rank of a group must make the same collective calls in the same order.** Here are four ranks, and one of them omits a call.

# %%
# %%ddp --nproc 4
import time

import torch
import torch.distributed as dist

dist.init_process_group()
rank = dist.get_rank()

# %% [markdown]
# `--hang-after 2` reports a deadlock after two seconds (the default is 5).

# %% tags=["prediction", "hidden"]
from nbddp.teach import predict

predict.ranks_that_finish()

# %% tags=["raises-exception"]
# %%ddp --hang-after 2
dist.init_process_group()
loss = torch.tensor([float(rank)])
if rank != 2:
    dist.all_reduce(loss)

# %% [markdown]
# Only rank 2 finishes, and rank 2 has the mistake. This is typical: **the ranks that hang are not the ones to check.** Look for the rank that they wait for.
#
# nbddp unblocked the ranks. Their names are still there; only the process group is gone, so each cell below creates a new one. `%ddp
# stacks` shows where each rank was, with the Python stack down into torch. It also works while a cell runs: type `python -m nbddp stacks`
# in a terminal.

# %% tags=["nbval-ignore-output"]
# %ddp stacks

# %% [markdown]
# ## A slow rank is not a hang
#
# Rank 2 now sleeps for three seconds before its call. That is longer than `--hang-after`.

# %% tags=["prediction", "hidden"]
predict.end_with_a_slow_rank()

# %%
# %%ddp --hang-after 1
dist.init_process_group()
if rank == 2:
    time.sleep(3)
dist.all_reduce(loss)
dist.get_world_size()

# %% [markdown]
# A deadlock is not "it takes long". It is a set of ranks that wait for ranks that **cannot** arrive, because those have finished, have failed, or wait themselves. Rank 2 was still
# running, so it could arrive, and it did. A timeout cannot tell the two cases apart: a short one kills slow programs, and a long one makes you wait.
#
# ## Two calls in a different order
#
# All four ranks make two calls below. Rank 1 makes them in the other order.

# %% tags=["prediction", "hidden"]
predict.waits_for_whom()

# %% tags=["raises-exception"]
# %%ddp --hang-after 2
dist.init_process_group()
if rank == 1:
    dist.barrier()
    dist.all_reduce(loss)
else:
    dist.all_reduce(loss)
    dist.barrier()

# %% [markdown]
# Every rank waits for another one. Collectives are matched **by number**, not by line or by name. Each rank's first collective is matched
# with every other rank's first collective, even if they are different operations. So `if rank == ...` around a collective is the first
# place to check.
#
# The explorer plays such programs move by move. A row shows the calls of a rank. Arrows lead from a rank that waits to the ranks it waits
# for.
#
# - In "rank 0 alone makes a call", rank 0 broadcasts after two all-reduces that all ranks make. An evaluation on rank 0 is a typical case.
# - In "a ring, all receive first", each rank receives from the rank before it, and then sends to the next one.

# %% tags=["prediction", "hidden"]
predict.waits_when_rank_0_is_alone()

# %% tags=["prediction", "hidden"]
predict.waits_in_the_ring()

# %% tags=["prediction", "hidden"]
predict.wrong_but_finishes()

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.collectives()

# %% [markdown]
# - The extra call blocks only rank 0. The others finish, so it is easy to suspect the wrong rank.
# - In the ring every rank waits for a rank that waits. If one rank sends first, the ring works.
# - One of the programs finishes although it is wrong. That is the worst case, and the subject of the section after the exercise.
#
# ## Exercise: who is missing?
#
# On a cluster you often have only a log of what each rank has called, in order. `log` is a dict from rank to list, such as
# `{0: ["broadcast", "all_reduce"], 1: ["broadcast"]}`. Return the number of the first collective that not every rank has called, counted from 1.
# Return the sorted list of the ranks that have not called it, too: here `(2, [1])`. If all ranks have made the same number of calls, return
# `None`.


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
# ## Different reduce operations
#
# Below, rank 3 asks for the maximum, while all others ask for the sum of 0…7 plus their rank. The right sums are 6, 10, 14, 18, 22, 26, 30, 34.
#
# PyTorch has a debug mode in which ranks compare their calls, `TORCH_DISTRIBUTED_DEBUG=DETAIL`. The cell creates its process group in this mode.

# %% tags=["prediction", "hidden"]
predict.numbers_with_one_max()

# %% tags=["prediction", "hidden"]
predict.debug_mode_and_one_max()

# %%
# %%ddp
dist.set_debug_level(dist.DebugLevel.DETAIL)  # as TORCH_DISTRIBUTED_DEBUG=DETAIL does for a whole program
dist.init_process_group()
dist.set_debug_level(dist.DebugLevel.OFF)
numbers = torch.arange(8.0) + rank
dist.all_reduce(numbers, op=dist.ReduceOp.MAX if rank == 3 else dist.ReduceOp.SUM)
numbers.tolist()

# %% [markdown]
# You notice a hang, but not this: there is no error, all ranks have the same numbers, and from the third on they are wrong. Gloo reduces each piece of the tensor on several ranks
# in turn, and one of them took the maximum. The debug mode compares shapes and types, but not the reduce operation. These are other mistakes of this kind, as they behave with Gloo
# on a CPU:
#
# | one rank has | what happens | what `DETAIL` reports |
# |---|---|---|
# | another reduce operation | wrong numbers, no error | nothing |
# | int32 instead of float32 | wrong numbers, no error | before the call, on every rank: `Detected mismatch between collectives`, with its own call and another rank's |
# | another number of elements | a process dies, or a wrong sum, or a hang | the same |
# | another collective | a hang | the same |
# | one call fewer | a hang | after the timeout, on rank 0: `Ranks 3 failed to pass monitoredBarrier` |
#
# Set the variable before the processes start: before `torchrun`, or with `%env` before the pool's first cell. The report has the number of the call, not the line of your program.
# (In PyTorch 2.13 with Gloo, torchrun and `DETAIL`, a process that wraps a model in DDP dies with SIGSEGV. Other programs are not affected.)
#
# `%%ddp --check` also compares the reduce operation and the root. In the first four cases it reports in one sentence what differs on which
# ranks, **before** each collective that your Python code calls. The fifth case is a deadlock, which every cell reports. `--check` has two
# limits: it does not see the collectives that DDP calls in C++, and it costs a few tenths of a millisecond per call. Use it to debug, not
# to train.
#
# The next cell makes the same mistake with `--check`. Without the `try`, the cell would end with the error.

# %% tags=["prediction", "hidden"]
predict.ranks_with_an_error()

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
# In `backward()`, DDP calls one all-reduce per bucket. So **every rank must take the same number of steps.** Distribute 97 samples over 3
# ranks: one rank has 33, the others 32. With a batch size of 8, one rank has 5 batches and the others have 4, so the first rank's last step
# waits forever. `DistributedSampler` prevents this by padding. Your own data loader may not.
#
# The loop below works on one rank and hangs on ranks with different numbers of batches. Run the check to see it, then fix the loop. There are two good ways:
#
# - **Agree on the number** with a collective of your own before the loop.
# - Use **`Join`** from `torch.distributed.algorithms.join`. Inside `with Join([model]):`, a rank that has no batches left takes part in the others' collectives.
#
# The check trains on real ranks with four distributions of batches, and compares the parameters with those of one process that has all shards.


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
# With the smallest number, this epoch omits some batches. If you shuffle, the next epoch has them. `Join` uses all batches, and fewer ranks
# contribute to the last steps.
#
# ## To remember
#
# - Collectives are matched by number. Every rank of a group makes the same collectives in the same order, and `if rank == ...` around one is the usual suspect.
# - In a hang, look for the rank that is *missing*: it has finished, has failed, or waits in another call.
# - A program that does not hang may still be wrong. Use `--check` during development.
#
# ## On real GPUs
#
# NCCL's calls are queued, so a rank hangs later than at its mistake: at the next `.item()` or `synchronize()`. Run the first cells again on GPUs. Does `%ddp stacks` show the line of
# the collective, or a later one?
#
# Also start once with `NCCL_DEBUG=INFO`. Every rank then logs NCCL's version, the network interface it chose, its rings, and its way to the
# next GPU. The way is direct (`P2P`, over NVLink or PCIe), through shared memory (`SHM`), or over the network (`NET/IB`, `NET/Socket`).
# This helps if ranks hang in their *first* collective or are far too slow, as with a wrong interface (`NCCL_SOCKET_IFNAME` sets it). It
# does not report mismatched calls.
#
# ## Glossary
#
# - **hang**: a program that makes no progress and does not end.
# - **deadlock**: a set of ranks that wait for ranks that cannot arrive.
# - **mismatch**: ranks meet in a collective with different operations, shapes, types or arguments.
# - **timeout**: the time after which a process group gives up waiting.
# - **`Join`**: a context manager for ranks with different numbers of batches.
#
# ## Further reading
#
# - [torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html): collectives, timeouts, `monitored_barrier`, and `TORCH_DISTRIBUTED_DEBUG`.
# - [Distributed Training with Uneven Inputs Using the Join Context Manager](https://docs.pytorch.org/tutorials/advanced/generic_join.html).
# - [NCCL environment variables](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html): `NCCL_DEBUG`, `NCCL_SOCKET_IFNAME`.

# %%
# %ddp stop
