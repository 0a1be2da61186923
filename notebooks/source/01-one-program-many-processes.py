# %% [markdown]
# # One program, many processes
#
# Distributed training in PyTorch is one program, started several times. Each copy is a **process** of its own, with its own memory and, on a
# GPU machine, its own GPU. This way of working is called **SPMD**: single program, multiple data.
#
# **After this lesson you can** read a program as every one of its processes reads it, tell what they share (nothing), and split work among
# them.

# %%
# %load_ext nbddp

# %% [markdown]
# ## The same lines, four times
#
# A cell that begins with `%%ddp` runs on every worker process, as a script does that `torchrun` has started. The processes are numbered, and
# a process finds its number, the **rank**, in its environment.
#
# **Predict** before you run the cell: how many lines does this print?

# %%
# %%ddp --nproc 4
import os

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
print("rank", rank, "of", world_size)

# %% [markdown]
# Four, one from each. The program is the same to the letter; what differs is `rank`, and all that is worked out from it.
#
# ## Nothing is shared
#
# **Predict:** what is `count` on each rank after this loop?

# %%
# %%ddp
count = 0
for _ in range(rank + 1):
    count += 10
print(count)

# %% [markdown]
# Each process has a `count` of its own. There is a fifth Python here as well, the notebook's kernel, in which cells without `%%ddp` run.
#
# **Predict:** the kernel sets `count`. What do the ranks print then?

# %%
count = "the kernel's"

# %%
# %%ddp
count

# %% [markdown]
# Their own numbers, as before: a name is not a place that processes share. If one process should know what another has worked out, it must be
# **sent**; all of `torch.distributed` is about that.
#
# So a program must not set a name on some ranks and use it on all. **Predict:** which ranks fail here?

# %% tags=["raises-exception"]
# %%ddp
if rank < 3:
    secret = 42
print(secret + rank)

# %% [markdown]
# Rank 3 has no `secret`. The report says which rank failed and how the others ended; all of them live on.
#
# ## In which order?
#
# Processes do not take turns. Each runs as fast as it can, and which line comes first on a shared terminal is a matter of chance. `%%ddp`
# sorts what it shows by rank when the cell has ended, so that you can read it.
#
# **Predict:** each of four ranks prints `before`, works, and prints `after`. In how many orders may the eight lines appear? And if all wait for each other
# after the work, at a **barrier**?

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.order()

# %% [markdown]
# Each rank's own lines keep their order; beyond that nothing is certain, unless the program makes the ranks wait for each other. With the
# barrier the slow rank holds up all others. Training is like this: every step ends with a wait for the slowest.
#
# Four copies of each message are seldom wanted, so programs let one rank speak: `if rank == 0: print(...)`. The same goes for writing a
# file that all could write.
#
# **Predict:** the ranks share the numbers 0 to 7 and add up their own; `all_reduce` then adds up the ranks' sums. What does rank 0 print, and how
# many lines come in all?

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
# There is the second half of SPMD, the multiple data: eight numbers, two for each rank, and one `all_reduce` that adds up what the ranks have worked
# out. `DistributedDataParallel` is built like this. Every process has a copy of the model, works out gradients on its own part of
# each batch, and then all average their gradients, so that the copies stay equal.
#
# ## Exercise: share the work
#
# Eight numbers on four ranks were easy to share. Write the function for any number of items and ranks: every item belongs to exactly one rank, and
# no rank has two items more than another. Each rank calls it with its own number. The check looks at the shares of all ranks together.


# %% tags=["exercise"]
def share_of(items, rank, world_size):
    """The items of the list that are this rank's, as a list."""
    ...  # your code


# %%
from nbddp.teach import check

check.share_of(share_of)

# %% [markdown]
# Stuck? `check.share_of(share_of, hint=True)` gives a hint, and another one each time it is run.


# %% tags=["solution"]
def share_of(items, rank, world_size):
    """The items of the list that are this rank's, as a list."""
    return items[rank::world_size]


# %% [markdown]
# ## To remember
#
# - One program runs in many processes; the rank tells them apart, and every decision that differs is worked out from it.
# - Processes share no names and take no turns: what another must know is sent, and what must come first is waited for.
# - Data parallel training is SPMD: the same model everywhere, another part of the data on each rank, gradients averaged.
#
# **On real GPUs:** save the cell with the sum, without its first line, to a file and start it with `torchrun --nproc-per-node 2 file.py`. Run it a few times: in which order do the lines
# come?

# %%
# %ddp stop
