# %% [markdown]
# # Ranks and devices
#
# A launcher starts the same program many times. Each process must find out which one it is and which GPUs it owns.
#
# **After this lesson you can**
#
# - tell rank, local rank and world size apart;
# - say on which node a rank runs;
# - write the lines that give every process its own GPUs, on one node and on many.

# %%
# %load_ext nbddp

# %% [markdown]
# ## Three numbers
#
# | word | meaning | torchrun's variable |
# |---|---|---|
# | **world size** | the number of processes in the job | `WORLD_SIZE` |
# | **rank** | the number of this process, from 0 to world size − 1 | `RANK` |
# | **local rank** | the number of this process *on its own node*, from 0 | `LOCAL_RANK` |
#
# A **node** is a machine. The number of processes on it is the **local world size**, `LOCAL_WORLD_SIZE`.
#
# The next cell starts four processes on two simulated nodes. Both are this machine, but the program sees the variables of two machines.
#
# Most results are preceded by a question like the next one. Answer it before you run the cell that follows. The notebook then shows your
# prediction next to the result.

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
# Ranks run through all nodes, beginning with node 0. Local ranks begin at 0 on every node.
#
# The next figure draws the two nodes and their ranks. On a machine without GPUs the processes run on the CPU.

# %% tags=["nbval-ignore-output"]
# %ddp topology

# %% [markdown]
# ## Exercise: where is a rank?
#
# torchrun gives the first `nproc_per_node` ranks to node 0, the next ones to node 1, and so on. Write the function that returns a rank's node
# and its local rank. The check calls it on every rank of the pool, for layouts of one to four processes per node.


# %% tags=["exercise"]
def place_of(rank, nproc_per_node):
    """The node of a rank and its local rank there, as a pair of integers."""
    ...  # your code


# %%
from nbddp.teach import check

check.place_of(place_of)

# %% [markdown]
# Stuck? `check.place_of(place_of, hint=True)` gives a hint, and the next one each time you run it.


# %% tags=["solution"]
def place_of(rank, nproc_per_node):
    """The node of a rank and its local rank there, as a pair of integers."""
    return divmod(rank, nproc_per_node)


# %% [markdown]
# ## Two nodes with four GPUs each
#
# CUDA numbers the GPUs of each node separately, from `cuda:0`. Two nodes with four GPUs each have no `cuda:5`; they have two GPUs called
# `cuda:1`.
#
# Suppose a program takes `cuda:{RANK}` as its device. On one node with eight GPUs this works. What happens on two nodes with four GPUs each?

# %% tags=["prediction", "hidden"]
predict.global_rank_as_device()

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.layout()

# %% [markdown]
# Move the sliders (without a mouse: Tab, then ← and →). With the global rank as device index, only the ranks of node 0 start. All others ask
# for a GPU that their node does not have.
#
# On one node, rank and local rank are the same number. So the mistake stays hidden until the program moves to a second node. It is a common
# one: PyTorch's own DDP example passes the global rank as the device index.
#
# `%ddp topology` draws a layout without starting any process. The usual layout has **one process per GPU**: each process reads its own data
# and drives its own GPU. On our two nodes that makes eight ranks.

# %% tags=["prediction", "hidden"]
predict.own_gpu()

# %% tags=["nbval-ignore-output"]
# %ddp topology --nnodes 2 --gpus-per-node 4

# %% [markdown]
# A process can also own **two GPUs**, for a model whose layers are spread over both.

# %% tags=["prediction", "hidden"]
predict.world_size()

# %% tags=["nbval-ignore-output"]
# %ddp topology --nnodes 2 --gpus-per-node 4 --gpus-per-proc 2

# %% [markdown]
# Rank 3 is local rank 1 on node 1. It owns the second pair of GPUs there: GPUs 2 and 3.
#
# ## Exercise: which GPUs are mine?
#
# Each process owns `gpus_per_proc` consecutive GPUs of its node. Local rank 0 owns the first ones. Write the function for any layout.


# %% tags=["exercise"]
def gpus_of(rank, nproc_per_node, gpus_per_proc):
    """The device indices of a rank's GPUs, as a list; the first one is for torch.cuda.set_device."""
    ...  # your code


# %%
check.gpus_of(gpus_of)


# %% tags=["solution"]
def gpus_of(rank, nproc_per_node, gpus_per_proc):
    """The device indices of a rank's GPUs, as a list; the first one is for torch.cuda.set_device."""
    local_rank = rank % nproc_per_node
    first = local_rank * gpus_per_proc
    return list(range(first, first + gpus_per_proc))


# %% [markdown]
# ## In a program
#
# A program can skip half of this arithmetic, because the launcher puts the local rank into the environment. Without its first line, the next
# cell is a script that runs under `torchrun`, with and without GPUs.

# %%
# %%ddp
import os

import torch


def own_devices(gpus_per_proc=1):
    """This process's devices; the CPU if the node has too few GPUs for all its processes."""
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < local_world_size * gpus_per_proc:
        return [torch.device("cpu")]
    first = local_rank * gpus_per_proc
    return [torch.device("cuda", i) for i in range(first, first + gpus_per_proc)]


print(own_devices())

# %% [markdown]
# ## On simulated GPUs
#
# You need no GPU to rehearse this. With `--simulate-gpus 4` each node has four GPUs for which the CPU computes. Devices and errors are as on
# two such machines; times are not. It works on Linux, and on Windows in WSL2.
#
# The next cell is the last figure as a program: two nodes with four GPUs each, two GPUs to a process. The first layer is on a process's first
# GPU, the second layer on its second.

# %% tags=["raises-exception"]
# %%ddp --nnodes 2 --gpus-per-proc 2 --simulate-gpus 4
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

first = 2 * int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(first)
dist.init_process_group("nccl")


class OnTwoGPUs(nn.Module):
    def __init__(self):
        super().__init__()
        self.below = nn.Linear(8, 8).to(f"cuda:{first}")
        self.above = nn.Linear(8, 1).to(f"cuda:{first + 1}")

    def forward(self, x):
        return self.above(self.below(x).to(f"cuda:{first + 1}"))


model = DDP(OnTwoGPUs())  # its layers are on several GPUs, so without device_ids
loss = model(torch.ones(4, 8, device="cuda")).mean()
loss.backward()
print("node", os.environ["GROUP_RANK"], "· input on", f"cuda:{torch.cuda.current_device()}", "· loss on", loss.device)
dist.destroy_process_group()

# %% [markdown]
# Both nodes have a `cuda:0`: rank 0 and rank 2 name different GPUs by it. Now write `RANK` for `LOCAL_RANK` in the cell, run it again, and
# read which ranks fail, and their errors.

# %% [markdown]
# ## To remember
#
# - The rank numbers all processes, the local rank those of one node. The world size counts processes, not GPUs.
# - Device indices begin at 0 on every node. So choose the device by the local rank: `torch.device("cuda", local_rank)`. With *g* GPUs per
#   process, the first is `local_rank * g`.
# - With one process per GPU, give DDP `device_ids=[local_rank]`. If the model is spread over several GPUs, omit `device_ids` and
#   `output_device`.
#
# **On real GPUs:** run this lesson on a machine with two or more GPUs. `%ddp topology` then draws the GPUs and their links. Start a cell with
# `%%ddp --gpus-per-proc 2` to give each process two GPUs. With `--visible own`, each process sees only its own GPUs: which one is its `cuda:0`?
#
# ## Glossary
#
# - **node**: a machine of the job.
# - **world size**: the number of processes in the job.
# - **local rank**: the number of a process on its node, from 0.
# - **local world size**: the number of processes on a node.
# - **device index**: the number of a GPU on its node, as in `cuda:1`.
#
# ## Further reading
#
# - [torchrun (Elastic Launch)](https://docs.pytorch.org/docs/stable/elastic/run.html), PyTorch documentation: all variables that torchrun sets
# - [DistributedDataParallel](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html), PyTorch
#   documentation: `device_ids` and `output_device`
# - [CUDA semantics](https://docs.pytorch.org/docs/stable/notes/cuda.html), PyTorch documentation

# %%
# %ddp stop
