# %% [markdown]
# # One program, many processes
#
# Distributed training in PyTorch runs one program several times at once. Each copy is a separate **process** with its own memory and, on a
# GPU machine, its own GPU. This model is called **SPMD**: single program, multiple data.
#
# **After this lesson you can**
#
# - read a program from the point of view of each of its processes;
# - state what the processes share (nothing);
# - split work among them.

# %%
# %load_ext nbddp

# %% [markdown]
# ## The same lines, four times
#
# A cell that begins with `%%ddp` runs on every worker process, as a script does under `torchrun`. The processes are numbered from 0. A
# process reads its number, its **rank**, from its environment.
#
# Most results are preceded by a question like the next one. Answer it before you run the cell that follows. The notebook then shows your
# prediction next to the result.

# %% tags=["prediction", "hidden"]
from nbddp.teach import predict

predict.lines()

# %%
# %%ddp --nproc 4
import os

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
print("rank", rank, "of", world_size)

# %% [markdown]
# Each process runs every line of the cell. Only `rank`, and what the program computes from it, differs between processes.
#
# ## Nothing is shared
#
# Here each rank counts in steps of 10.

# %% tags=["prediction", "hidden"]
predict.count_on_rank_2()

# %%
# %%ddp
count = 0
for _ in range(rank + 1):
    count += 10
print(count)

# %% [markdown]
# Each process has its own `count`. There is also a fifth Python process, the notebook's kernel. It runs the cells without `%%ddp` and is
# not a rank. It assigns `count` as well.

# %%
count = "the kernel's"

# %% tags=["prediction", "hidden"]
predict.count_after_the_kernel()

# %%
# %%ddp
count

# %% [markdown]
# A variable belongs to one process. If another process needs its value, the program must **send** it. `torch.distributed` does that.
#
# So do not assign a variable on some ranks and use it on all.

# %% tags=["prediction", "hidden"]
predict.ranks_that_fail()

# %% tags=["raises-exception"]
# %%ddp
if rank < 3:
    secret = 42
print(secret + rank)

# %% [markdown]
# The report names the rank that failed and states how the others ended. All four processes are still running, and the next cell can use
# them.
#
# ## In which order?
#
# Processes do not take turns. Each runs as fast as it can, so the order of lines on a shared terminal is random. `%%ddp` sorts its output by
# rank when the cell ends, so that you can read it.
#
# In the explorer each rank prints `before`, works, and prints `after`. At a **barrier** every rank waits until all have arrived.

# %% tags=["prediction", "hidden"]
predict.first_after()
predict.orders()

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.order()

# %% [markdown]
# Choose a slow rank, then add the barrier. Each rank's own lines keep their order. Nothing else is certain unless the program makes ranks wait
# for each other. With the barrier, the slow rank delays all others. Training behaves like this: every step waits for the slowest rank.
#
# You rarely want four copies of a message, so programs let one rank print: `if rank == 0: print(...)`. The same applies to writing a file.
#
# In the next cell the ranks split the numbers 0 to 7, and each adds up its own. Then `all_reduce` adds up the ranks' sums and gives every
# rank the result.

# %% tags=["prediction", "hidden"]
predict.lines_of_the_sum()

# %%
# %%ddp
import torch
import torch.distributed as dist

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
numbers = list(range(8))
each = len(numbers) // world_size
mine = numbers[each * rank : each * (rank + 1)]
total = torch.tensor(sum(mine))
dist.all_reduce(total)
if rank == 0:
    print("the sum of", numbers, "is", total.item())
print("my share was", mine)
dist.destroy_process_group()

# %% [markdown]
# This is the second half of SPMD, multiple data: eight numbers, two per rank, and one `all_reduce` that combines the results.
# `DistributedDataParallel` (DDP) works the same way. Every process has a copy of the model and computes gradients on its own part of each
# batch. Then the processes average their gradients, so the copies stay equal.
#
# ## Exercise: share the work
#
# Eight numbers are easy to split among four ranks. Write the function for any number of items and ranks:
#
# - every item belongs to exactly one rank;
# - no rank has two items more than another.
#
# Each rank calls it with its own number. The check compares the shares of all ranks.


# %% tags=["exercise"]
def share_of(items, rank, world_size):
    """This rank's items, as a list."""
    ...  # your code


# %%
from nbddp.teach import check

check.share_of(share_of)

# %% [markdown]
# Stuck? `check.share_of(share_of, hint=True)` gives a hint, and the next one each time you run it.


# %% tags=["solution"]
def share_of(items, rank, world_size):
    """This rank's items, as a list."""
    return items[rank::world_size]


# %% [markdown]
# ## To remember
#
# - One program runs in many processes. The rank distinguishes them: everything that differs is computed from it.
# - Processes share no variables and take no turns. Send what another process must know; wait for what must come first.
# - Data-parallel training is SPMD: the same model on every rank, a different part of the data on each, and averaged gradients.
#
# **On real GPUs:** save the cell with the sum, without its first line, to a file. Start it with `torchrun --nproc-per-node 2 file.py` a few times. In
# which order do the lines appear?
#
# ## Glossary
#
# - **process**: a running program with its own memory.
# - **SPMD** (single program, multiple data): every process runs the same program on different data.
# - **rank**: the number of a process, from 0 to world size − 1.
# - **world size**: the number of processes.
# - **barrier**: a point that no rank passes before all ranks have reached it.
# - **all-reduce**: combines a value of every rank, by a sum for example, and gives every rank the result.
#
# ## Further reading
#
# - [Distributed communication package, torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html), PyTorch documentation
# - [torchrun (Elastic Launch)](https://docs.pytorch.org/docs/stable/elastic/run.html), PyTorch documentation
# - Darema, [The SPMD Model: Past, Present and Future](https://doi.org/10.1007/3-540-45417-9_1), EuroPVM/MPI 2001

# %%
# %ddp stop
