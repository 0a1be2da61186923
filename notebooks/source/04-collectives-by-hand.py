# %% [markdown]
# # Collectives by hand
#
# In training, ranks exchange tensors by **collectives**: operations that all ranks of a process group call together. All of them can be
# made from two simpler things, a rank that sends and a rank that receives.
#
# **After this lesson you can** say what broadcast, reduce, all-gather, reduce-scatter, all-to-all and all-reduce leave on which rank,
# write them with `send` and `recv`, and write the ring all-reduce, which moves the gradients in data-parallel training.

# %%
# %load_ext nbddp

# %% [markdown]
# ## Two ranks: send and receive
#
# `dist.send(tensor, dst)` gives a tensor to rank `dst`; `dist.recv(tensor, src)` waits for one from rank `src` and writes it into `tensor`,
# which must have the same shape and dtype.
#
# Below, every rank has one number: 1 on rank 0, 10 on rank 1, 100 on rank 2, 1000 on rank 3. So a sum shows what it is made of: 1101 is
# what ranks 0, 2 and 3 had.
#
# **Predict:** what does rank 2 print?

# %%
# %%ddp --nproc 4
import torch
import torch.distributed as dist

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
mine = torch.tensor([10**rank])

got = torch.zeros(1, dtype=torch.int64)
if rank == 0:
    dist.send(mine, 2)
if rank == 2:
    dist.recv(got, 0)
print("has", got.item())

# %% [markdown]
# ## One to all, all to one
#
# **Broadcast** leaves rank 0's tensor on every rank. **Reduce** leaves the sum of all tensors on rank 0. By hand, rank 0 does all the work
# and the others queue up for it.
#
# **Predict** both results for rank 3. What does a rank other than 0 have after a reduce?


# %%
# %%ddp
def broadcast(x):
    """Rank 0's x, on every rank."""
    if rank == 0:
        for other in range(1, world_size):
            dist.send(x, other)
        return x
    dist.recv(got := torch.empty_like(x), 0)
    return got


def reduce(x):
    """The sum of all x on rank 0; the others keep what they had."""
    if rank != 0:
        dist.send(x, 0)
        return x
    total = x.clone()
    for other in range(1, world_size):
        dist.recv(got := torch.empty_like(x), other)
        total += got
    return total


print(f"broadcast {broadcast(mine).item()}, reduce {reduce(mine).item()}")

# %% [markdown]
# ## All to all
#
# Here every rank has a list of one piece for each rank.
#
# | collective | rank *r* has in the end |
# |---|---|
# | **all-gather** | what every rank had (one piece each), side by side |
# | **all-to-all** | piece *r* of every rank: rows become columns |
# | **reduce-scatter** | the sum of every rank's piece *r* |
#
# All-gather and reduce-scatter follow from all-to-all: give everyone the same piece, or add what you got. `isend` starts a send and returns
# at once; `wait()` is when it must be over.
#
# **Predict:** rank *r* has the pieces `10 * r, 10 * r + 1, 10 * r + 2, 10 * r + 3`. What does rank 1 have after the all-to-all, and after
# the reduce-scatter?


# %%
# %%ddp
def all_to_all(pieces):
    """Piece `rank` of every rank, in rank order."""
    got = [torch.empty_like(p) for p in pieces]
    got[rank] = pieces[rank]
    others = [r for r in range(world_size) if r != rank]
    works = [dist.isend(pieces[r], r) for r in others]
    for r in others:
        dist.recv(got[r], r)
    for work in works:
        work.wait()
    return got


def all_gather(x):
    """Every rank's x, in rank order."""
    return all_to_all([x] * world_size)


def reduce_scatter(pieces):
    """The sum of all ranks' piece `rank`."""
    return sum(all_to_all(pieces))


pieces = [torch.tensor([10 * rank + i]) for i in range(world_size)]


def numbers(tensors):
    return [t.item() for t in tensors]


print("all-to-all", numbers(all_to_all(pieces)), end="   ")
print("reduce-scatter", reduce_scatter(pieces).item(), end="   ")
print("all-gather", numbers(all_gather(mine)))

# %% [markdown]
# PyTorch has all of these. In a program one calls them; which way the bytes take is then the backend's choice (gloo here, NCCL on GPUs).
#
# **Predict:** do they leave the same on every rank as ours?

# %%
# %%ddp
theirs = [torch.empty_like(mine) for _ in range(world_size)]
dist.all_gather(theirs, mine)
turned = torch.empty(world_size, dtype=torch.int64)
dist.all_to_all_single(turned, torch.cat(pieces))
added = torch.empty(1, dtype=torch.int64)
dist.reduce_scatter(added, pieces)

theirs == all_gather(mine), turned.tolist() == numbers(all_to_all(pieces)), added.equal(reduce_scatter(pieces))

# %% [markdown]
# ## When everyone sends first
#
# Now each rank passes its tensor to its right neighbour, and the last one to rank 0: a ring.
#
# **Predict:** every rank sends, then receives. What happens?

# %% tags=["raises-exception"]
# %%ddp --hang-after 1
right, left = (rank + 1) % world_size, (rank - 1) % world_size
dist.send(mine, right)
dist.recv(got, left)

# %% [markdown]
# A `send` is over when the other side has received. All wait in `send`, so nobody gets to `recv`: a **deadlock**. (Some backends and
# sizes let a send end early, and then such a program works, until the tensors grow.) With `isend` the send is under way while the
# rank receives. The failed run has ended the process group, so the cell makes a new one.
#
# **Predict:** what does rank 0 have in the end?

# %%
# %%ddp
dist.init_process_group()
work = dist.isend(mine, right)
dist.recv(got, left)
work.wait()
print("has", got.item())
dist.destroy_process_group()

# %% [markdown]
# ## The ring all-reduce, on symbols
#
# **All-reduce** leaves the sum of all tensors on every rank. Reduce, then broadcast would do, but everything goes through rank 0: with *n*
# ranks and *K* bytes it receives (*n* − 1) · *K* bytes and sends as many, while the others wait. The **ring all-reduce** has no such rank.
# Each rank cuts its tensor into *n* chunks, and in every step each sends *one chunk* to its right neighbour:
#
# 1. in the first *n* − 1 steps what arrives is **added** to the chunk that is there (a reduce-scatter);
# 2. in the next *n* − 1 steps chunks that are complete go round and **replace** what is there (an all-gather).
#
# In the picture a letter is a rank's part of a chunk. A complete chunk has all letters, each once.
#
# **Predict** for 4 ranks: after how many steps is the first chunk complete, and on how many ranks is it then? If the adding stops one step
# early, what is missing in the end, and where?

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.ring()

# %% [markdown]
# After three steps every rank has one complete chunk; three more bring all to all. A program that adds one step less ends with one letter
# missing in *every* chunk, on *all* ranks alike: comparing ranks with each other would find nothing wrong.
#
# ## Exercise: which chunk?
#
# All depends on which chunk a rank sends in a step. Steps are counted from 0 to 2 (*n* − 1) − 1, through both halves. The check carries your schedule out on
# symbols, on two, three and four ranks.


# %% tags=["exercise"]
def chunk_to_send(rank, step, world_size):
    """The number of the chunk that a rank sends to its right neighbour in this step."""
    ...  # your code


# %%
from nbddp.teach import check

check.chunk_to_send(chunk_to_send)


# %% tags=["solution"]
def chunk_to_send(rank, step, world_size):
    """The number of the chunk that a rank sends to its right neighbour in this step."""
    return (rank - step) % world_size


# %% [markdown]
# Stuck? `check.chunk_to_send(chunk_to_send, hint=True)` gives a hint, and another one each time it is run.
#
# ## Exercise: the ring all-reduce, on tensors
#
# Now with real tensors on real ranks, with nothing but sends and receives. The check runs it on 4, 3 and 2 ranks, on numbers that differ from
# rank to rank. The length of `x` need not be a multiple of the world size: `x.tensor_split(world_size)` always makes `world_size` chunks,
# some of them shorter, even empty. (`x.chunk(4)` cuts 5 numbers into only three.)


# %% tags=["exercise"]
def ring_all_reduce(x):
    """The sum of all ranks' x (one dimension, any length), by send and recv along the ring."""
    import torch
    import torch.distributed as dist

    ...  # your code: dist.get_rank() and dist.get_world_size() say who and how many


# %%
check.ring_all_reduce(ring_all_reduce)


# %% tags=["solution"]
def ring_all_reduce(x):
    """The sum of all ranks' x (one dimension, any length), by send and recv along the ring."""
    import torch
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = list(x.clone().tensor_split(world_size))
    for step in range(2 * (world_size - 1)):
        leaving, arriving = (rank - step) % world_size, (left - step) % world_size
        got = torch.empty_like(chunks[arriving])
        work = dist.isend(chunks[leaving], right)
        dist.recv(got, left)
        work.wait()
        chunks[arriving] = chunks[arriving] + got if step < world_size - 1 else got
    return torch.cat(chunks)


# %% [markdown]
# ## What it costs
#
# **Predict:** a model has 400 MB of gradients. How much does each rank send, on 4 ranks? On 64? And rank 0 of a reduce and broadcast?

# %%
print("ranks   ring, each rank sends   reduce + broadcast, rank 0 sends")
for n in (2, 4, 16, 64):
    print(f"{n:5}   {2 * (n - 1) / n * 400:18.0f} MB   {(n - 1) * 400:29} MB")

# %% [markdown]
# In the ring each rank sends 2 (*n* − 1) chunks of *K*/*n* bytes, which stays below 2 *K* however many ranks there are. What grows is the
# number of steps, and with it the latency: that is why DDP puts small gradients together into buckets before it sends them.
#
# ## To remember
#
# - A collective is called by all ranks of the group; reduce-scatter followed by all-gather is an all-reduce.
# - A send waits for its receive: if all ranks send first, none goes on; start the send, receive, then wait.
# - The ring all-reduce takes *n* − 1 steps that add and *n* − 1 that pass on, and each rank sends less than twice its tensor, for any *n*.
#
# **On real GPUs:** put the tensors of `ring_all_reduce` on `torch.device("cuda", local_rank)` and time it against `dist.all_reduce` on a
# gigabyte (call `torch.cuda.synchronize()` before you look at the clock). NCCL takes sends and receives of one step as a group: write the
# step with `dist.batch_isend_irecv`. `%ddp bench` draws the bandwidth that NCCL reaches, and `NCCL_DEBUG=INFO` tells which rings it has built.

# %%
# %ddp stop
