# %% [markdown]
# # Ranks and devices
#
# A launcher starts the same program many times. Each copy has to find out which one it is, and which GPUs are its own.
#
# **After this lesson you can** tell rank, local rank and world size apart, say on which node a rank runs, and write the
# two lines that give every process its own GPUs, on one node and on many.

# %%
# %load_ext nbddp

# %% [markdown]
# ## Three numbers
#
# | word | meaning | torchrun's variable |
# |---|---|---|
# | **world size** | how many processes run in all | `WORLD_SIZE` |
# | **rank** | which of them this one is, from 0 to world size − 1 | `RANK` |
# | **local rank** | which of the processes *on its own node* this one is | `LOCAL_RANK` |
#
# A node is a machine; the number of processes on it is the local world size, `LOCAL_WORLD_SIZE`. We start four processes on two
# simulated nodes: one machine that behaves as two would, so far as the program can see.
#
# A question like the next one comes before most results. Commit to an answer before you run the cell after it: what you predicted then
# appears beside what came.

# %% tags=["prediction", "hidden"]
from nbddp.teach import predict

predict.local_rank()

# %%
# %%ddp --nnodes 2 --nproc 2
import os

env = os.environ
print("rank", env["RANK"], "of", env["WORLD_SIZE"], end=" · ")
print("local rank", env["LOCAL_RANK"], "of", env["LOCAL_WORLD_SIZE"], "on node", env["GROUP_RANK"])

# %% [markdown]
# Rank 2 has local rank 0: it is the first process of node 1. Ranks are counted through all nodes, node 0 first. Local ranks begin
# again at 0 on every node.
#
# **Predict** the picture of it: how many boxes for nodes, and which ranks in which? On this machine the processes run on the CPU if there are no GPUs.

# %% tags=["nbval-ignore-output"]
# %ddp topology

# %% [markdown]
# ## Exercise: where is a rank?
#
# torchrun fills node 0 with the first `nproc_per_node` ranks, then node 1, and so on. Write the function that gives a rank's node
# and its local rank. The check calls it on every rank of the pool for layouts of one to four processes per node.


# %% tags=["exercise"]
def place_of(rank, nproc_per_node):
    """The node of a rank and its local rank there, as a pair of whole numbers."""
    ...  # your code


# %%
from nbddp.teach import check

check.place_of(place_of)

# %% [markdown]
# Stuck? `check.place_of(place_of, hint=True)` gives a hint, and another one each time it is run.


# %% tags=["solution"]
def place_of(rank, nproc_per_node):
    """The node of a rank and its local rank there, as a pair of whole numbers."""
    return divmod(rank, nproc_per_node)


# %% [markdown]
# ## Two nodes with four GPUs each
#
# A GPU's index is a matter of its node: CUDA on each node counts its own GPUs from `cuda:0`. Two nodes with four GPUs have no
# `cuda:5`; they have `cuda:1` twice.
#
# A program takes `cuda:{RANK}` as its device. That works on one node with eight GPUs. And on two nodes with four each?

# %% tags=["prediction", "hidden"]
predict.global_rank_as_device()

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.layout()

# %% [markdown]
# Move the sliders (without a mouse: Tab, then ← and →). By the global rank, the ranks of node 0 start and all others ask for a GPU that
# their node does not have. On one node rank and local rank are the same number, so the mistake does not show until the day the program
# moves to a second node. It is a common one: PyTorch's own page on this example passes the global rank as the device index.
#
# The same layouts as plans, from a line. With **one process per GPU** (the usual way: each process reads its own data and drives
# its own GPU) there are eight ranks.

# %% tags=["prediction", "hidden"]
predict.own_gpu()

# %% tags=["nbval-ignore-output"]
# %ddp topology --nnodes 2 --gpus-per-node 4

# %% [markdown]
# Rank 6 is local rank 2 of node 1, and owns GPU 2 there. With **two GPUs per process** there are four ranks. Such a process holds a model whose layers lie on two GPUs.

# %% tags=["prediction", "hidden"]
predict.world_size()

# %% tags=["nbval-ignore-output"]
# %ddp topology --nnodes 2 --gpus-per-node 4 --gpus-per-proc 2

# %% [markdown]
# Rank 3 is local rank 1 of node 1, and owns the second pair there: GPUs 2 and 3. The world size is the number of **processes**, 4, not of GPUs.
#
# ## Exercise: which GPUs are mine?
#
# Each process owns `gpus_per_proc` GPUs that lie side by side, local rank 0 the first ones. Write the function for any layout.


# %% tags=["exercise"]
def gpus_of(rank, nproc_per_node, gpus_per_proc):
    """The device indices of a rank's own GPUs, as a list; the first is the one for torch.cuda.set_device."""
    ...  # your code


# %%
check.gpus_of(gpus_of)


# %% tags=["solution"]
def gpus_of(rank, nproc_per_node, gpus_per_proc):
    """The device indices of a rank's own GPUs, as a list; the first is the one for torch.cuda.set_device."""
    local_rank = rank % nproc_per_node
    first = local_rank * gpus_per_proc
    return list(range(first, first + gpus_per_proc))


# %% [markdown]
# ## In a program
#
# A program need not do all of the arithmetic: the launcher has put the local rank into the environment. What follows the first line is a program
# that runs as it is under `torchrun`, on GPUs and without.
#
# **Predict:** which devices does each rank print here?

# %%
# %%ddp
import os

import torch


def own_devices(gpus_per_proc=1):
    """This process's devices; the CPU where there are too few GPUs for everyone."""
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < local_world_size * gpus_per_proc:
        return [torch.device("cpu")]
    first = local_rank * gpus_per_proc
    return [torch.device("cuda", i) for i in range(first, first + gpus_per_proc)]


print(own_devices())

# %% [markdown]
# ## To remember
#
# - The rank says which process of all this one is; the local rank says which on its node; the world size counts processes, not GPUs.
# - Device indices begin at 0 on every node, so a device is chosen by the local rank: `torch.device("cuda", local_rank)`, and with *g*
#   GPUs to a process `local_rank * g` and the following.
# - With one process per GPU DDP gets `device_ids=[local_rank]` (its `output_device` is then the same GPU and need not be given); with several
#   GPUs to a process the model itself is spread over them, and DDP gets neither.
#
# **On real GPUs:** run this lesson where there are two or more, and look at `%ddp topology` again: it draws the GPUs with their links. Then
# `%%ddp --gpus-per-proc 2` gives two to a process, and `--visible own` shows a process only its own: what is its `cuda:0` then?

# %%
# %ddp stop
