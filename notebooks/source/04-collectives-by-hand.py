# %% [markdown]
# # Collectives by hand
#
# In training, ranks exchange tensors by **collectives**: operations that all ranks of a process group call together. Every collective can be
# built from two operations: one rank sends, another receives.
#
# **After this lesson you can**
#
# - say what each collective leaves on which rank;
# - write collectives with `send` and `recv`;
# - write the ring all-reduce, which moves the gradients in data-parallel training.

# %%
# %load_ext nbddp

# %% [markdown]
# ## Two ranks: send and receive
#
# `dist.send(tensor, dst)` sends a tensor to rank `dst`. `dist.recv(tensor, src)` waits for a tensor from rank `src` and writes it into
# `tensor`, which must have the same shape and dtype.
#
# Below, every rank has one number: 1 on rank 0, 10 on rank 1, 100 on rank 2, 1000 on rank 3. So you can see which ranks contributed to a sum:
# 1101 is the sum of ranks 0, 2 and 3.
#
# Each cell calls `init_process_group`, as a script does. You can run any cell again.

# %% tags=["prediction", "hidden"]
from nbddp.teach import predict

predict.received_by_rank_2()

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
# **Broadcast** copies rank 0's tensor to every rank. **Reduce** adds up the tensors of all ranks on rank 0. In both functions below, rank 0
# sends or receives once for each other rank, one after the other.

# %% tags=["prediction", "hidden"]
predict.broadcast_on_rank_3()
predict.reduce_on_rank_3()

# %%
# %%ddp
dist.init_process_group()


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
# Here every rank has a list with one piece for each rank.
#
# | collective | result on rank *r* |
# |---|---|
# | **all-gather** | the tensors of all ranks, in rank order |
# | **all-to-all** | piece *r* of every rank, in rank order |
# | **reduce-scatter** | the sum of every rank's piece *r* |
#
# All-to-all gives us the other two. For all-gather, send the same piece to every rank. For reduce-scatter, add up what you receive.
#
# `isend` starts a send and returns at once. `wait()` returns when that send has ended.
#
# In the next cell, rank *r* has the pieces `10 * r`, `10 * r + 1`, `10 * r + 2` and `10 * r + 3`.

# %% tags=["prediction", "hidden"]
predict.all_to_all_on_rank_1()
predict.reduce_scatter_on_rank_1()

# %%
# %%ddp
dist.init_process_group()


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
# PyTorch has all these collectives. A program calls them, and the backend (gloo here, NCCL on GPUs) decides how the bytes are sent. The next cell
# compares PyTorch's results with ours.

# %%
# %%ddp
dist.init_process_group()
theirs = [torch.empty_like(mine) for _ in range(world_size)]
dist.all_gather(theirs, mine)
turned = torch.empty(world_size, dtype=torch.int64)
dist.all_to_all_single(turned, torch.cat(pieces))
added = torch.empty(1, dtype=torch.int64)
dist.reduce_scatter(added, pieces)

theirs == all_gather(mine), turned.tolist() == numbers(all_to_all(pieces)), added.equal(reduce_scatter(pieces))

# %% [markdown]
# ## Before and after
#
# The explorer shows what each rank has before and after a collective. A letter is a rank's tensor: A on rank 0, B on rank 1. A2 is piece 2 of
# it. Letters in one frame are a sum, and a dash means no input or no result. Two collectives are new: **scatter** gives each rank a piece of rank 0's tensor, and **gather**
# collects all tensors on rank 0.

# %% tags=["prediction", "hidden"]
predict.ranks_with_all_after_gather()
predict.reduce_scatter_then_all_gather()

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.before_after()

# %% [markdown]
# Choose each collective in the list. They differ in only three ways: who has the data before, who has the result after, and whether tensors are
# added up.
#
# ## When all ranks send first
#
# Now each rank passes its tensor to its right neighbour. The right neighbour of the last rank is rank 0, so the ranks form a **ring**.

# %% tags=["prediction", "hidden"]
predict.all_send_first()

# %% tags=["raises-exception"]
# %%ddp --hang-after 1
dist.init_process_group()
right, left = (rank + 1) % world_size, (rank - 1) % world_size
dist.send(mine, right)
dist.recv(got, left)

# %% [markdown]
# A `send` ends when its receiver has received. All ranks are blocked in `send`, so none of them reaches `recv`: a **deadlock**. (With some
# backends and sizes a send ends early. Then such a program works until the tensors grow.)
#
# With `isend`, a rank can receive while its send is in progress.

# %% tags=["prediction", "hidden"]
predict.passed_to_rank_0()

# %%
# %%ddp
dist.init_process_group()
right, left = (rank + 1) % world_size, (rank - 1) % world_size
work = dist.isend(mine, right)
dist.recv(got, left)
work.wait()
print("has", got.item())
dist.destroy_process_group()

# %% [markdown]
# ## The ring all-reduce, on symbols
#
# **All-reduce** gives every rank the sum of all tensors. A reduce followed by a broadcast does the same, but everything goes through rank
# 0. With *n* ranks and *K* bytes, rank 0 receives (*n* − 1) · *K* bytes and sends as many. The others wait meanwhile.
#
# The **ring all-reduce** spreads this work over all ranks. Each rank cuts its tensor into *n* **chunks**. In every step each rank sends *one
# chunk* to its right neighbour:
#
# 1. In the first *n* − 1 steps, a rank **adds** the arriving chunk to its own. This is a reduce-scatter.
# 2. In the next *n* − 1 steps, an arriving chunk is complete and **replaces** the rank's own. This is an all-gather.
#
# In the explorer a letter is one rank's part of a chunk. A complete chunk has every letter once.

# %% tags=["prediction", "hidden"]
predict.steps_to_the_first_chunk()
predict.chunks_short_of_a_part()

# %% tags=["nbval-ignore-output"]
explore.ring()

# %% [markdown]
# Press Play, or take the steps one by one. When the first half ends, every rank has one complete chunk, each rank a different one. The second
# half copies them to all ranks.
#
# Now choose the program that stops adding one step early. It shows why comparing the ranks with each other is not a test: they agree on wrong sums.
#
# ## Exercise: which chunk?
#
# The algorithm depends on which chunk a rank sends in which step. Steps are numbered from 0 to 2 (*n* − 1) − 1, through both halves. The check
# simulates your schedule on two, three and four ranks.


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
# Stuck? `check.chunk_to_send(chunk_to_send, hint=True)` gives a hint, and the next one each time you run it.
#
# ## Exercise: the ring all-reduce, on tensors
#
# Now write the ring all-reduce for real tensors on real ranks, with only sends and receives. The check runs it on 4, 3 and 2 ranks, with
# different numbers on each rank.
#
# The length of `x` need not be a multiple of the world size. `x.tensor_split(world_size)` always makes `world_size` chunks; some may be shorter
# or empty. (`x.chunk(4)` cuts 5 numbers into only three chunks.)


# %% tags=["exercise"]
def ring_all_reduce(x):
    """The sum of all ranks' x (one dimension, any length), by send and recv along the ring."""
    import torch
    import torch.distributed as dist

    ...  # your code; use dist.get_rank() and dist.get_world_size()


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
# ## Cost
#
# A model has 400 MB of gradients. How much does each rank send, in the ring and in a reduce followed by a broadcast?

# %% tags=["prediction", "hidden"]
predict.sent_in_the_ring()
predict.sent_by_rank_0()

# %%
print("ranks   ring, each rank sends   reduce + broadcast, rank 0 sends")
for n in (2, 4, 16, 64):
    print(f"{n:5}   {2 * (n - 1) / n * 400:18.0f} MB   {(n - 1) * 400:29} MB")

# %% [markdown]
# In the ring each rank sends 2 (*n* − 1) chunks of *K*/*n* bytes. This stays below 2 *K* for any number of ranks. The number of steps grows with
# *n*, however, and each step adds latency. That is one reason why DDP collects small gradients in buckets before it sends them.
#
# ## To remember
#
# - All ranks of the group call a collective. A reduce-scatter followed by an all-gather is an all-reduce.
# - A send waits for its receive. If all ranks send first, they deadlock: start the send, receive, then wait for the send.
# - The ring all-reduce adds in *n* − 1 steps and passes on in *n* − 1 steps. Each rank sends less than twice its tensor, for any *n*.
#
# **On real GPUs:** put the tensors of `ring_all_reduce` on `torch.device("cuda", local_rank)` and compare its time with that of
# `dist.all_reduce` on a gigabyte. (Call `torch.cuda.synchronize()` before you read the clock.) NCCL needs the send and the receive of a
# step as one group. Write the step with `dist.batch_isend_irecv`. `%ddp bench` draws the bandwidth that NCCL reaches, and `NCCL_DEBUG=INFO`
# logs the rings it has built.
#
# ## Glossary
#
# - **collective**: an operation that all ranks of a process group call together.
# - **broadcast**, **scatter**: give every rank a copy, or a piece, of one rank's tensor.
# - **gather**, **all-gather**: collect the tensors of all ranks on one rank, or on all.
# - **reduce**, **all-reduce**: add up the tensors of all ranks, on one rank, or on all.
# - **reduce-scatter**: adds up the tensors of all ranks and leaves one piece of the sum on each.
# - **all-to-all**: sends piece *r* of every rank to rank *r*.
# - **deadlock**: ranks wait for each other, and none can continue.
# - **chunk**: one of the *n* pieces into which the ring cuts a tensor.
#
# ## Further reading
#
# - Patarasuk and Yuan, [Bandwidth optimal all-reduce algorithms for clusters of
#   workstations](https://doi.org/10.1016/j.jpdc.2008.09.002), Journal of Parallel and Distributed Computing 69 (2009)
# - [Distributed communication package, torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html), PyTorch documentation: all
#   collectives, `isend`, `batch_isend_irecv`
# - [Collective operations](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html), NCCL documentation, with a figure
#   of each

# %%
# %ddp stop
