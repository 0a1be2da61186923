# %% [markdown]
# # Finding each other
#
# The processes that a launcher starts do not know each other. Before they can add up a single gradient they must meet. This meeting is called
# the **rendezvous**.
#
# **After this lesson you can**
#
# - list the variables that `init_process_group` reads, and explain what it waits for;
# - choose a backend;
# - read a `torchrun` command line;
# - find the mistake when `init_process_group` does not return.

# %%
# %load_ext nbddp

# %% [markdown]
# ## Four variables
#
# A process reads from its environment where to meet the others and which rank it has. The next cell starts four processes on two simulated
# nodes and prints these variables: `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE` and `RANK`.

# %% tags=["prediction", "hidden"]
from nbddp.teach import predict

predict.variables_that_differ()

# %%
# %%ddp --nnodes 2 --nproc 2
import os

print(*(f"{name}={os.environ[name]}" for name in ("MASTER_ADDR", "WORLD_SIZE", "RANK")))
print("MASTER_PORT is a number:", os.environ["MASTER_PORT"].isdecimal())

# %% [markdown]
# `MASTER_ADDR` and `MASTER_PORT` are the meeting point of all processes. `WORLD_SIZE` is the number of processes to wait for. (The address is
# `localhost` because our two nodes are one machine. On two machines it is the name of one of them.)
#
# ## The meeting point is a store
#
# At that address a small server keeps a dictionary, the **store**. Any process can `set` a key. `get` returns the value of a key and **waits
# until some process has set it**. Because `get` waits, processes can meet at the store.
#
# In the next cell every rank sets a key of its own and reads the keys of all ranks. Rank 3 is a second late.

# %% tags=["prediction", "hidden"]
predict.late_key()

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
# `init_process_group` does the same with more keys. Each rank writes its network address into the store and reads the addresses of the others.
# Then the ranks connect to each other. From then on, tensors are sent over these connections, and not through the store.
#
# The library that moves the tensors is the **backend**:
#
# | backend | moves | use it |
# |---|---|---|
# | **gloo** | CPU tensors; CUDA tensors through a copy on the CPU | on CPUs, as in these lessons |
# | **NCCL** | CUDA tensors, from GPU to GPU | for training on NVIDIA GPUs, where it is the fastest. Each process needs its own GPU. NCCL finds InfiniBand by itself; on Ethernet you may have to name the network interface, as in `NCCL_SOCKET_IFNAME=eth0` |
# | **MPI** | CPU tensors; CUDA tensors if the MPI library supports them | on clusters built for MPI. It requires a torch built from source with MPI installed (for example `libopenmpi-dev`). `mpirun` starts the processes and sets rank and world size instead of the variables |
#
# The next cell calls `init_process_group` without arguments. Then it takes rank and world size from the four variables.

# %% tags=["prediction", "hidden"]
predict.backends_from_pip()

# %%
# %%ddp
dist.init_process_group()
print(f"rank {dist.get_rank()} of {dist.get_world_size()};", end=" ")
print(f"gloo: {dist.is_gloo_available()}, MPI: {dist.is_mpi_available()}")
dist.destroy_process_group()

# %% [markdown]
# Reading the four variables is the default, `init_method="env://"`. Without a backend argument, the tensor decides: gloo if it is on the CPU,
# NCCL if it is on a GPU. `init_process_group("nccl")` sets up NCCL only. Call `destroy_process_group` at the end of the program.
#
# ## Who has arrived?
#
# Which process hosts the store?
#
# - Under `torchrun` the launcher hosts it.
# - Without a launcher, **the process with rank 0 hosts it** on its own node, at `MASTER_PORT`. The others look for it at `MASTER_ADDR`.
#
# The explorer shows the second case, with two nodes called `node0` and `node1`.

# %% tags=["prediction", "hidden"]
predict.three_of_four()
predict.localhost_everywhere()

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.arrived()

# %% [markdown]
# No process continues before all have arrived. So a mistake in one process's variables blocks **all** processes, also those with correct
# variables. After the timeout (30 minutes, or 10 with `"nccl"`) the error names a socket or a key, but not the mistake. Choose each mistake in the
# list and see which process waits for which.
#
# ## Four broken configurations
#
# Each function below returns the variables of one process: two nodes, `node0` and `node1`, with two processes each. Each function has one
# mistake.
#
# 1. Look for the mistake.
# 2. Run the check. It lets four processes meet with these variables and reports what happened.
# 3. Correct the function and run the check again.
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
        "MASTER_ADDR": "node0",  # rank 0's node, for all processes
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
        "RANK": 2 * node + local_rank,  # each rank occurs once in the job
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
        "WORLD_SIZE": 4,  # the number of processes that are started
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
        "RANK": 2 * node + local_rank,  # begins at 0: rank 0 hosts the store
    }


# %% [markdown]
# ## The launcher sets them for you
#
# `torchrun` starts the processes of one node and sets their variables. For several nodes, start it once on each node with the same command:
#
# ```sh
# torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=node0:29400 --rdzv-id=job7 train.py
# ```
#
# | option | meaning |
# |---|---|
# | `--nnodes=2` | number of nodes; with `1:4`, one to four nodes, which may join and leave |
# | `--nproc-per-node=4` | processes per node, the local world size |
# | `--rdzv-endpoint=node0:29400` | where the **launchers** meet. There they agree on the node numbers and assign the ranks |
# | `--rdzv-backend=c10d` | how they meet: at a store like the one above, hosted at the endpoint. With `etcd-v2` or `etcd` the endpoint is an etcd server that you run, with its v2 API enabled |
# | `--rdzv-id=job7` | identifies the job; launchers with another id do not join |
# | `--standalone` | replaces the three `--rdzv` options on one node: a store on a free port |
#
# So there are two meetings. First the launchers meet at the endpoint. Then the workers meet at `MASTER_ADDR` and `MASTER_PORT`, which the
# launchers have chosen. When workers are restarted, ranks are assigned again. A program must not rely on keeping its rank.
#
# The launcher sets further variables for each worker:
#
# - `LOCAL_RANK`: its number among the workers of its node;
# - `GROUP_RANK`: the number of its node;
# - `ROLE_RANK`: its number among the workers with the same **role**.

# %% tags=["prediction", "hidden"]
predict.role_rank()
predict.local_rank_differs()

# %%
# %%ddp
for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"):
    size = name.replace("RANK", "WORLD_SIZE")
    print(name, os.environ[name], "of", os.environ[size], end=" · ")
print("ROLE_NAME", os.environ["ROLE_NAME"])

# %% [markdown]
# Nearly every job has one role, `default`. To have two, start the launcher on the first node with `--role=trainer` and the one on the second
# with `--role=evaluator`. Then `ROLE_NAME` differs, and ranks 2 and 3 get the `ROLE_RANK` 0 and 1 with a `ROLE_WORLD_SIZE` of 2. `RANK` and
# `WORLD_SIZE` still count all four processes. `init_process_group` reads only these two.
#
# ### The older launcher
#
# `python -m torch.distributed.launch` is deprecated. It sets the same variables, but it also passes the local rank as an argument,
# `--local-rank=3`, unless you give it `--use-env`. A script that reads the argument runs under both launchers if it has this default:
#
# ```python
# parser.add_argument("--local-rank", "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
# ```
#
# Both launchers
#
# - run `train.py` with the Python that runs them; `PYTHON_EXEC` names another one;
# - expect a script that is the program of **one** worker. It reads rank and world size from the environment, and starts no processes with
#   `torch.multiprocessing.spawn`. The cells of these lessons are such scripts;
# - set `OMP_NUM_THREADS` to 1 if there are several processes on a node and you have not set it. Otherwise every process would start a thread
#   per core.
#
# ## To remember
#
# - `init_process_group()` reads `MASTER_ADDR`, `MASTER_PORT`, `RANK` and `WORLD_SIZE`. It returns when `WORLD_SIZE` ranks have met.
# - They meet at a store, a dictionary in which `get` waits for `set`. The launcher hosts it, or rank 0 if there is no launcher.
# - If `init_process_group` does not return, ask which rank is missing: it has not started, exists twice, or looks for the store elsewhere.
#
# **On real GPUs:** on two machines, run the `torchrun` command above with a script that prints rank and world size. Then change `--rdzv-id` on
# one of them. Which machine reports an error, what does it say, and after how long?
#
# ## Glossary
#
# - **rendezvous**: the meeting of a job's processes, or of its launchers.
# - **store**: a key-value server at which they meet; `get` waits until the key is set.
# - **process group**: the ranks that communicate with each other, set up by `init_process_group`.
# - **backend**: the library that moves the tensors: gloo, NCCL or MPI.
# - **launcher**: the program that starts the workers of a node and sets their variables, such as `torchrun`.
# - **role**: a name for workers that do the same job; ranks are also counted within a role.
#
# ## Further reading
#
# - [torchrun (Elastic Launch)](https://docs.pytorch.org/docs/stable/elastic/run.html), PyTorch documentation
# - [Distributed communication package, torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html), PyTorch documentation:
#   initialization, stores, backends
# - [Rendezvous](https://docs.pytorch.org/docs/stable/elastic/rendezvous.html), PyTorch documentation
# - [NCCL environment variables](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html), NVIDIA documentation

# %%
# %ddp stop
