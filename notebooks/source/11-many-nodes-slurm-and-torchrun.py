# %% [markdown]
# # Many nodes, Slurm and torchrun
#
# You develop a program in a notebook. A long run on many nodes starts in another way: `torchrun` on every node, or a scheduler such as Slurm.
#
# **After this lesson you can**
#
# - turn your cells into a script;
# - write the torchrun line of every node, for both ways in which nodes find each other;
# - write a batch script for Slurm;
# - say where each process gets its rank from.

# %%
# %load_ext nbddp

cells = {}  # the text of each cell that runs from here on, once each, to make a script of later


def keep(cell):
    cells[cell.raw_cell] = True


get_ipython().events.register("pre_run_cell", keep)

# %% [markdown]
# ## From cells to a script
#
# This is a small training on two simulated nodes. The program takes everything it needs to know about its ranks from the environment, so it runs under any launcher.

# %%
# %%ddp --nnodes 2 --nproc 1
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %%
# %%ddp
torch.manual_seed(100 + rank)
for step in range(3):
    x = torch.randn(32, 16)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step}: mean loss of {world_size} ranks {loss.item() / world_size:.4f}", flush=True)

# %% [markdown]
# `script` joins the `%%ddp` cells into one program. It omits the cells without `%%ddp`, which run in the notebook and not on the ranks. `cells` has the text of each cell that has
# run, once each.

# %% tags=["prediction", "hidden"]
from nbddp.teach import predict

predict.added_to_the_script()

# %%
from nbddp.export import Launch, script, torchrun_line

program = script(list(cells))
print(program)

# %% [markdown]
# In the notebook, the process group stays between cells. A script has to destroy it at its end.
#
# ## Two nodes, two lines
#
# torchrun needs **one command on every node**. The nodes can find out in two ways which of them is node 0:
#
# | rendezvous | the lines | who is node 0 |
# |---|---|---|
# | **static** | differ in `--node-rank` | you decide |
# | **c10d** | are the same on all nodes | the nodes agree, and agree again after a failure; a rank can then be another process |
#
# Static is the default if there is no `--rdzv-backend`, even with an `--rdzv-endpoint`. Without `--node-rank`, every node then considers itself node 0.
#
# The path below contains a space and an apostrophe, as real paths do.

# %% tags=["prediction", "hidden"]
predict.quoted_characters()

# %%
import tempfile
from pathlib import Path

folder = tempfile.TemporaryDirectory()
path = Path(folder.name, "Ada's runs", "train.py")
path.parent.mkdir()
path.write_text(program)

launch = Launch(script="Ada's runs/train.py", nnodes=2, nproc=1, gpus_per_proc=0, rendezvous="static", host="node0")
for node in range(2):
    print(f"node {node}: {torchrun_line(launch, node)}")

# %% [markdown]
# The shell splits words at spaces, and an apostrophe begins a quotation. Single quotes protect the space. They cannot protect an apostrophe, so it gets double quotes.
#
# Two shells on this machine now play the two nodes. Each runs its line, with `localhost` as the address.
#
# - The port is free, and a socket reserves it until both shells have ended. Otherwise the system may give it to another program before torchrun binds it.
# - A torchrun whose workers have finished waits up to five minutes for the other nodes, even if one of them has failed. So when the first shell ends, the second gets ten more seconds.
# - If the training does not finish, there is a second try on a new port. If that fails too, the cell raises an error with torchrun's last lines.

# %% tags=["prediction", "hidden"]
predict.printing_node()

# %% tags=["prediction", "hidden"]
predict.losses_under_torchrun()

# %%
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace

import psutil

env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # where torchrun is installed


def run_nodes(lines, patience=30, rest=10):
    """Start a shell per line; what each prints, and the errors of all. Ends what runs longer."""
    with tempfile.TemporaryFile("w+") as errors:
        options = {"shell": True, "text": True, "cwd": folder.name, "env": env, "stderr": errors}
        shells = [psutil.Popen(f"exec {line}", stdout=subprocess.PIPE, **options) for line in lines]
        end = time.monotonic() + patience
        while all(shell.poll() is None for shell in shells) and time.monotonic() < end:
            time.sleep(0.1)
        _, waiting = psutil.wait_procs(shells, timeout=rest)
        for shell in waiting:
            for process in [*shell.children(recursive=True), shell]:
                process.kill()  # while it waits, torchrun does not react to SIGTERM
        printed = [shell.communicate()[0] for shell in shells]
        errors.seek(0)
        return printed, errors.read()


for _ in range(2):
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torchrun may listen there too
        holder.bind(("localhost", 0))
        here = replace(launch, host="localhost", port=holder.getsockname()[1])
        printed, errors = run_nodes([torchrun_line(here, node) for node in range(2)])
    if "step 2" in printed[0]:
        break
else:
    raise RuntimeError(f"the training did not finish in two attempts; the last lines of torchrun:\n{errors[-2000:]}")

for node, text in enumerate(printed):
    print(f"node {node}:")
    print(text, end="")

# %% [markdown]
# Only rank 0 prints. It runs on node 0, because of `--node-rank`. The losses equal those of the notebook: the same program, the same seeds,
# and the same number of ranks. With another world size they would differ, because each rank draws its own samples.
#
# ## What changes with the layout
#
# The explorer shows a layout and the lines that start it.

# %% tags=["prediction", "hidden"]
predict.option_that_follows_the_backend()

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.launch()

# %% [markdown]
# - The number of nodes appears in `--nnodes`, and with static rendezvous also as one line per node.
# - The processes per node appear in `--nproc-per-node`.
# - torchrun has no option for the backend, which is the program's choice. The batch script depends on it, because a job must request its GPUs.
#
# ## Slurm's batch script
#
# `sbatch` runs the script **on the first node of the job only**. `srun` in the script starts its command once per task, on all nodes. With one task per node there is one torchrun per
# node, which starts the processes there.
#
# - The c10d line is the same on all nodes, so you can copy it into the script.
# - The static line needs another `--node-rank` on each node. A shell has to insert it, and the question is which one.
#
# In the next cell, a function plays `srun`: it runs its command for two nodes. Node 1 is the second of them.

# %% tags=["prediction", "hidden"]
predict.node_rank_in_double_quotes()

# %% tags=["prediction", "hidden"]
predict.node_rank_in_single_quotes()

# %%
batch = """
srun() { for node in 0 1; do SLURM_NODEID=$node "$@"; done; }
export SLURM_NODEID=0

echo 'double quotes:'
srun bash -c "echo torchrun --node-rank $SLURM_NODEID"

echo 'single quotes:'
srun bash -c 'echo torchrun --node-rank "$SLURM_NODEID"'
"""
print(subprocess.run(["bash", "-c", batch], capture_output=True, text=True).stdout)

# %% [markdown]
# In double quotes, the shell that runs the batch script replaces the variable, on the first node, before `srun` sees the command. Both nodes get node rank 0, and the job waits until someone cancels it. In single
# quotes, the shell that `srun` starts on each node replaces it.
#
# ## Exercise: the job's hosts
#
# All nodes need the name of one host where they meet. Slurm abbreviates the list of hosts: `gpu[01-03,07]` means gpu01, gpu02, gpu03 and gpu07. (`scontrol show hostnames` expands
# such a list. In a container, `scontrol` is often missing.) Write the function for lists with at most one pair of brackets.


# %% tags=["exercise"]
def nodes_of(nodelist):
    """The hosts of a list such as gpu[01-03,07], in order, as a list of names."""
    ...  # your code


# %%
from nbddp.teach import check

check.nodes_of(nodes_of)


# %% tags=["solution"]
def nodes_of(nodelist):
    """The hosts of a list such as gpu[01-03,07], in order, as a list of names."""
    name, bracket, rest = nodelist.partition("[")
    if not bracket:
        return [name]
    hosts = []
    for part in rest.rstrip("]").split(","):
        first, _, last = part.partition("-")
        hosts += [f"{name}{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]
    return hosts


# %% [markdown]
# ## Exercise: without torchrun
#
# Slurm can start every process itself, with one task per process: `srun python train.py`. Nobody sets `RANK` then, but every task has Slurm's variables:
#
# | variable | for a task on the second of two nodes with four tasks each |
# |---|---|
# | `SLURM_NTASKS`, `SLURM_NNODES` | 8, 2 |
# | `SLURM_PROCID` | 4 to 7 |
# | `SLURM_NODEID`, `SLURM_LOCALID` | 1, 0 to 3 |
# | `SLURM_JOB_ID`, `SLURM_JOB_NODELIST`, `SLURMD_NODENAME` | 4711, `gpu[01-02]`, gpu02 |
#
# Write the function that turns them into the variables that `init_process_group()` and the choice of a device read. `hosts` is the expanded list. You choose the port, and all
# tasks of a job must choose the same one.


# %% tags=["exercise"]
def variables_of(slurm, hosts):
    """RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as a dict of texts."""
    ...  # your code


# %%
check.variables_of(variables_of)


# %% tags=["solution"]
def variables_of(slurm, hosts):
    """RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as a dict of texts."""
    return {
        "RANK": slurm["SLURM_PROCID"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "WORLD_SIZE": slurm["SLURM_NTASKS"],
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": str(20000 + int(slurm["SLURM_JOB_ID"]) % 10000),
    }


# %% [markdown]
# ## To remember
#
# - torchrun is started once on every node and starts the processes there. Static lines differ in `--node-rank`; c10d lines are the same.
# - A batch script runs on the first node. Put what differs between nodes in single quotes, so that a shell on that node expands it.
# - Slurm's task is a process: `SLURM_PROCID` is the rank, `SLURM_LOCALID` the local rank, `SLURM_NTASKS` the world size.
#
# ## On real GPUs
#
# Make a script of your own notebook in the same way (`%ddp export train.py` does it in one line). Write `sbatch_script(Launch(nnodes=2,
# nproc=4))` (from `nbddp.export`) to `train.sbatch`, and submit it with `sbatch train.sbatch`. Let every rank print its host and its local
# rank first. Do they match the figure?
#
# ## Glossary
#
# - **launcher**: the program that starts the processes and sets their environment, such as torchrun or srun.
# - **rendezvous**: how nodes find each other and agree on ranks; static or c10d here.
# - **node rank**: the number of a node in the job.
# - **scheduler**: the program that assigns nodes to jobs, such as Slurm.
# - **batch script**: the shell script that a scheduler runs on the first node of a job.
# - **task**: Slurm's word for a process that `srun` starts.
#
# ## Further reading
#
# - [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html): all options, and the variables it sets.
# - [Rendezvous](https://docs.pytorch.org/docs/stable/elastic/rendezvous.html): how nodes agree.
# - [sbatch](https://slurm.schedmd.com/sbatch.html) and [srun](https://slurm.schedmd.com/srun.html): options and variables.

# %%
folder.cleanup()
# %ddp stop
