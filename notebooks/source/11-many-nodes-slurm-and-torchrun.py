# %% [markdown]
# # Many nodes, Slurm and torchrun
#
# A notebook is where a program is made. A long run on many nodes is started by something else: by `torchrun` on each
# of them, or by a scheduler such as Slurm.
#
# **After this lesson you can** make a script of your cells, write the torchrun line of every node for both ways in which
# nodes meet, write a batch script for Slurm, and say where each process gets its rank from.

# %%
# %load_ext nbddp

cells = []  # the text of each cell that is run from here on, to make a script of later
get_ipython().events.register("pre_run_cell", lambda cell: cells.append(cell.raw_cell))

# %% [markdown]
# ## From cells to a script
#
# A small training on two simulated nodes. The program takes all that it has to know from the environment, so it does not
# care who starts it.

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
# `script` puts the text of the `%%ddp` cells one below the other. Cells without `%%ddp` stay behind: they run in the notebook, not
# on the ranks. **Predict:** two cells, one process group; what has to be added for a script that ends well?

# %%
from nbddp.export import Launch, script, torchrun_line

program = script(cells)
print(program)

# %% [markdown]
# The group: between cells it stays, and a script has to leave it at its end.
#
# ## Two nodes, two lines
#
# With torchrun **every node gets a command of its own**. There are two ways for the nodes to find out who is who:
#
# | | the lines | who is node 0 |
# |---|---|---|
# | **static** | differ in `--node-rank` | you say |
# | **c10d** | are the same on all nodes | the nodes agree, and again after a failure: a rank can be another process then |
#
# Static is what you get if no `--rdzv-backend` is said, also with an `--rdzv-endpoint`; and without `--node-rank` every node is node 0 then.
#
# The path below has a blank and an apostrophe in it, as paths do. **Predict:** which characters must be quoted so that the shell
# gives torchrun this one word?

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
# The blank and the apostrophe. An apostrophe cannot stand between apostrophes, so it gets double quotes of its own.
#
# Two shells on this machine can play the two nodes: each runs its line. The address is then `localhost`. The port is one that is
# free here, and a socket holds it until the shells have ended: otherwise the system may give it to another program before torchrun
# takes it, and then node 1 waits for a node 0 that has failed.
#
# **Predict:** which node prints something? And which losses, compared with those in the notebook?

# %%
import os
import socket
import subprocess
import sys
from dataclasses import replace

import psutil

env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # where torchrun is installed
options = {"shell": True, "cwd": folder.name, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
with socket.socket() as holder:
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torchrun may listen there as well
    holder.bind(("localhost", 0))
    here = replace(launch, host="localhost", port=holder.getsockname()[1])
    lines = [f"exec {torchrun_line(here, node)}" for node in range(2)]
    shells = [subprocess.Popen(line, text=True, **options) for line in lines]
    for node, patience in [(1, 60), (0, 10)]:
        try:
            shells[node].wait(timeout=patience)
        except subprocess.TimeoutExpired:  # the other's process did not end well, for which torchrun waits five minutes
            for process in [*psutil.Process(shells[node].pid).children(recursive=True), shells[node]]:
                process.kill()  # in that wait it does not hear SIGTERM
    for node, shell in enumerate(shells):
        print(f"node {node}:")
        print(shell.communicate()[0], end="")
folder.cleanup()

# %% [markdown]
# Only rank 0 prints, and it is on node 0, because `--node-rank` says so. The losses are those of the notebook: the same program with
# the same seeds and as many ranks. With another world size they would be others, for each rank draws samples of its own.
#
# ## What changes with the layout
#
# **Predict** before you move a slider: what in the lines below depends on the number of nodes, what on the processes per node, what
# on the backend?

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.launch()

# %% [markdown]
# torchrun does not know about the backend: that is the program's. The batch script does, because on GPUs the job must ask for them.
#
# ## Slurm's batch script
#
# `sbatch` runs the script **on the first node of the job only**. `srun` in it starts its command once per task, on all nodes. One task
# per node is one torchrun per node, which starts the processes there. torchrun's c10d line is the same for all, so it can stand there
# as it is. The static one needs another `--node-rank` on each node, and a shell has to put it in. Which one?
#
# Here a function plays `srun` and runs its command for two nodes. **Predict** what each line prints.

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
# In double quotes the batch script's own shell fills in the variable, on the first node, before `srun` sees it: both nodes would
# be node 0, and the job waits until it is ended. In single quotes the shell that `srun` starts on each node does it.
#
# ## Exercise: the job's hosts
#
# All nodes need the name of one host to meet at. Slurm writes its hosts in short: `gpu[01-03,07]` is gpu01, gpu02, gpu03 and gpu07.
# (`scontrol show hostnames` spells such a list out; a program in a container often has no `scontrol`.) Write the function for
# lists with at most one pair of brackets.


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
# Slurm can start every process itself: one task for each, `srun python train.py`. Then nobody sets `RANK`, but every task has Slurm's
# own variables:
#
# | variable | of a task on the second of two nodes with four tasks each |
# |---|---|
# | `SLURM_NTASKS`, `SLURM_NNODES` | 8, 2 |
# | `SLURM_PROCID` | 4 to 7 |
# | `SLURM_NODEID`, `SLURM_LOCALID` | 1, 0 to 3 |
# | `SLURM_JOB_ID`, `SLURM_JOB_NODELIST`, `SLURMD_NODENAME` | 4711, `gpu[01-02]`, gpu02 |
#
# Write the function that makes of them what `init_process_group()` and the choice of a device read. The hosts come spelled out. The port is
# yours to choose; all tasks have to choose the same.


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
# - torchrun is started once on every node and starts the processes there; static lines differ in `--node-rank`, c10d lines are the same.
# - A batch script runs on the first node; what differs from node to node goes in single quotes, so that a shell on that node fills it in.
# - Slurm's task is a process: `SLURM_PROCID` is the rank, `SLURM_LOCALID` the local rank, `SLURM_NTASKS` the world size.
#
# **On real GPUs:** make a script of your own notebook (`get_ipython().history_manager.input_hist_raw` has all of its cells), write
# `sbatch_script(Launch(nnodes=2, nproc=4))` into `train.sbatch`, and hand it in with `sbatch train.sbatch`. Let every rank print its host and
# its local rank first. Do they stand where the figure says?

# %%
# %ddp stop
