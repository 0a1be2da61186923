# %% [markdown]
# # Finding each other
#
# Processes that a launcher has started know nothing of each other. Before they can add up a single gradient they have to
# meet: the **rendezvous**.
#
# **After this lesson you can** say what `init_process_group` reads and what it waits for, choose a backend, read a `torchrun` line, and
# find the mistake when it never returns.

# %%
# %load_ext nbddp

# %% [markdown]
# ## Four variables
#
# A process learns from its environment where to go and who it is. We start four processes on two simulated nodes.
#
# **Predict:** which of the four variables below have the same value on all ranks?

# %%
# %%ddp --nnodes 2 --nproc 2
import os

print(*(f"{name}={os.environ[name]}" for name in ("MASTER_ADDR", "WORLD_SIZE", "RANK")))
print("a number as MASTER_PORT:", os.environ["MASTER_PORT"].isdecimal())

# %% [markdown]
# `MASTER_ADDR` and `MASTER_PORT` are one meeting point for all, `WORLD_SIZE` says how many to wait for, and `RANK` alone differs.
# (The address is `localhost` because our two nodes are one machine; on two machines it would be the name of one of them.)
#
# ## The meeting point is a store
#
# At that address a small server keeps a dictionary: the **store**. Any process may `set` a key; `get` returns its value, and **waits until
# somebody has set it**. That waiting is what makes it a place to meet.
#
# **Predict:** rank 3 sets its key a second later than the others. What do the others print?

# %%
# %%ddp
import time

import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
if rank == 3:
    time.sleep(1)
store.set(f"hello from {rank}", "I am here")
print("found:", [r for r in range(world_size) if store.get(f"hello from {r}") == b"I am here"])
del store

# %% [markdown]
# Everybody found everybody: `get` of rank 3's key waited. `init_process_group` does the same with more keys. Each rank writes its own
# network address into the store and reads those of the others; then they open connections among themselves, and the store has
# done its part. What carries tensors over these connections is the **backend**:
#
# | backend | carries | when |
# |---|---|---|
# | **gloo** | CPU tensors; CUDA tensors by way of a copy on the CPU | on CPUs, as in these lessons |
# | **NCCL** | CUDA tensors, from GPU to GPU | training on NVIDIA GPUs: the fastest there. Each process needs GPUs of its own. Between nodes it finds InfiniBand by itself; over plain Ethernet `NCCL_SOCKET_IFNAME=eth0` may have to say which network |
# | **MPI** | CPU tensors; CUDA tensors if the MPI library can | on clusters that are made for MPI. Only a torch that was built from source where an MPI is installed (`libopenmpi-dev`, say) has it; MPI starts the processes (`mpirun`) and gives them rank and world size, in place of the variables |
#
# **Predict:** the cell gives `init_process_group` no arguments. From where does it know the rank? And which of gloo and MPI does a torch from `pip install` have?

# %%
# %%ddp
dist.init_process_group()
print(f"rank {dist.get_rank()} of {dist.get_world_size()};", end=" ")
print(f"gloo: {dist.is_gloo_available()}, MPI: {dist.is_mpi_available()}")
dist.destroy_process_group()

# %% [markdown]
# With no arguments the four variables are used (`init_method="env://"`, the usual way), and the tensor decides on the backend: gloo if it is on the CPU, NCCL if
# it is on a GPU. `init_process_group("nccl")` has NCCL alone. The group should be ended as well as begun.
#
# ## Who has arrived?
#
# Who hosts the store? Under `torchrun` the launcher does. Where nobody has started one, **the process with rank 0 hosts it**, on its own node at
# `MASTER_PORT`, and the others look for it at `MASTER_ADDR`. The explorer shows that case with two nodes, `node0` and `node1`.
#
# **Predict:** three of four processes have started. Does any of them get out of `init_process_group`? And what if `MASTER_ADDR` is
# `localhost` everywhere?

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.arrived()

# %% [markdown]
# Nobody goes on before all have come. So a mistake in one process's variables stops **all** of them, and the processes with the right variables
# are the ones that seem to hang. After the timeout (30 minutes, or 10 if you ask for `"nccl"`) the error names a socket or a key, not the mistake. Try
# each mistake in the list, and see who waits and for whom.
#
# ## Four broken configurations
#
# Each function below gives a process its variables: two nodes, `node0` and `node1`, with two processes each. Each has one mistake.
# Look for it first; then run the check, which starts the four processes with just these variables and says what happened. Then mend
# it.
#
# ### The first


# %% tags=["exercise"]
def by_address(node, local_rank):
    return {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29400,
        "WORLD_SIZE": 4,
        "RANK": 2 * node + local_rank,
    }


# %%
from nbddp.teach import check

check.by_address(by_address)


# %% tags=["solution"]
def by_address(node, local_rank):
    return {
        "MASTER_ADDR": "node0",  # rank 0's node, for everybody
        "MASTER_PORT": 29400,
        "WORLD_SIZE": 4,
        "RANK": 2 * node + local_rank,
    }


# %% [markdown]
# ### The second


# %% tags=["exercise"]
def by_rank(node, local_rank):
    return {
        "MASTER_ADDR": "node0",
        "MASTER_PORT": 29400,
        "WORLD_SIZE": 4,
        "RANK": local_rank,
    }


# %%
check.by_rank(by_rank)


# %% tags=["solution"]
def by_rank(node, local_rank):
    return {
        "MASTER_ADDR": "node0",
        "MASTER_PORT": 29400,
        "WORLD_SIZE": 4,
        "RANK": 2 * node + local_rank,  # each rank once in the whole job
    }


# %% [markdown]
# ### The third


# %% tags=["exercise"]
def by_size(node, local_rank):
    return {
        "MASTER_ADDR": "node0",
        "MASTER_PORT": 29400,
        "WORLD_SIZE": 6,
        "RANK": 2 * node + local_rank,
    }


# %%
check.by_size(by_size)


# %% tags=["solution"]
def by_size(node, local_rank):
    return {
        "MASTER_ADDR": "node0",
        "MASTER_PORT": 29400,
        "WORLD_SIZE": 4,  # as many as are started
        "RANK": 2 * node + local_rank,
    }


# %% [markdown]
# ### The fourth


# %% tags=["exercise"]
def by_host(node, local_rank):
    return {
        "MASTER_ADDR": "node0",
        "MASTER_PORT": 29400,
        "WORLD_SIZE": 4,
        "RANK": 2 * node + local_rank + 1,
    }


# %%
check.by_host(by_host)


# %% tags=["solution"]
def by_host(node, local_rank):
    return {
        "MASTER_ADDR": "node0",
        "MASTER_PORT": 29400,
        "WORLD_SIZE": 4,
        "RANK": 2 * node + local_rank,  # from 0: rank 0 hosts the store
    }


# %% [markdown]
# ## The launcher sets them for you
#
# `torchrun` starts the processes of one node and gives each its variables. On several nodes it is started once on each, with the same line:
#
# ```sh
# torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=node0:29400 --rdzv-id=job7 train.py
# ```
#
# | part of the line | what it is |
# |---|---|
# | `--nnodes=2` | how many nodes there are; `1:4` lets nodes come and go, from one to four |
# | `--nproc-per-node=4` | processes on each, the local world size |
# | `--rdzv-endpoint=node0:29400` | where the **launchers** meet; they settle who is node 0 and 1, and hand out the ranks |
# | `--rdzv-backend=c10d` | how: by a store like the one above, hosted at the endpoint. Others are `etcd-v2` and `etcd`: then the endpoint is an etcd server of your own, with its API v2 switched on |
# | `--rdzv-id=job7` | which job; launchers with another id do not join |
# | `--standalone` | instead of all that, on one node: a store on a free port |
#
# There are two meetings, then: first the launchers, at the endpoint; then the workers, at `MASTER_ADDR` and `MASTER_PORT`, which the launchers have
# chosen. The ranks are handed out anew if workers are restarted, so no program may count on keeping its rank.
#
# The launcher tells each worker more than the four variables: its place among the workers of its node (`LOCAL_`), its node's place among the nodes (`GROUP_`), and its place
# among the workers of its **role** (`ROLE_`).
#
# **Predict:** on which of the four does `ROLE_RANK` differ from `RANK`? And `LOCAL_RANK`?

# %%
# %%ddp
for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"):
    size = name.replace("RANK", "WORLD_SIZE")
    print(name, os.environ[name], "of", os.environ[size], end=" · ")
print("ROLE_NAME", os.environ["ROLE_NAME"])

# %% [markdown]
# `ROLE_RANK` differs nowhere: all four have one role, called `default`, as in nearly every job. A launcher that is started with `--role=evaluator` gives its workers
# that `ROLE_NAME`. If it is the one on the second node, and the one on the first says `--role=trainer`, then ranks 2 and 3 have the `ROLE_RANK` 0 and 1, of a `ROLE_WORLD_SIZE` of
# 2, while `RANK` and `WORLD_SIZE` count all four as before. `init_process_group` reads these two and never a role's.
#
# `python -m torch.distributed.launch` is the older launcher, and deprecated. It sets the same variables, but hands the local rank over as an argument, `--local-rank=3`, unless
# it is told `--use-env`. A script that still reads the argument runs under both launchers like this:
#
# ```python
# parser.add_argument("--local-rank", "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
# ```
#
# Both run `train.py` with the interpreter that runs them; `PYTHON_EXEC` names another one. And both ask two things of a script: that it is the program of **one** worker, which starts no others with `torch.multiprocessing.spawn`; and that it takes rank and world size from
# the environment. The cells of these lessons are such scripts. Both set `OMP_NUM_THREADS` to 1 where there are several processes on a node and you have not set it, lest every
# process start a thread on every core.
#
# ## To remember
#
# - `init_process_group()` reads `MASTER_ADDR`, `MASTER_PORT`, `RANK` and `WORLD_SIZE`, and returns when `WORLD_SIZE` ranks have met.
# - They meet at a store, a dictionary in which a `get` waits for the `set`; the launcher hosts it, or else rank 0.
# - If it never returns, ask who is missing: a rank that has not started, is there twice, or looks for the store somewhere else.
#
# **On real GPUs:** on two machines run the line above with a script that prints rank and world size, then change `--rdzv-id` on one of them. Which message
# comes, from which machine, and after how long?

# %%
# %ddp stop
