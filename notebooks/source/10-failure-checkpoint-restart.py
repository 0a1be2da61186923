# %% [markdown]
# # Failure, checkpoint, restart
#
# The more nodes and the longer the run, the surer it is that something fails. All ranks depend on each other, so one that
# dies ends all. What is left is what was written down.
#
# **After this lesson you can** let a failed training start again by itself, say how much work a failure costs, and write a
# checkpoint from which it goes on as if nothing had happened, bit for bit.

# %%
# %load_ext nbddp

# %% [markdown]
# ## One dies, all start again
#
# torchrun and `%%ddp` have `--max-restarts`: when a rank fails, the processes of **all** ranks are ended and new ones
# start the program from its first line. `TORCHELASTIC_RESTART_COUNT` says how often that has happened.
#
# Rank 2 kills itself in the first attempt. **Predict:** what is printed, and is `kept` there in the second attempt?

# %%
# %%ddp --nproc 4
kept = "a name from an earlier cell"

# %%
# %%ddp --max-restarts 1
import os
import signal
import time

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0 and rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 0:
    time.sleep(60)  # the other ranks are busy
print("attempt", attempt, "· the earlier name is", "there" if "kept" in globals() else "gone")

# %% [markdown]
# All four processes are new, not only rank 2's, and nothing that was in memory is left. (The line counts attempts from 1, the
# variable counts restarts.) What a program needs for going on must be in a file.
#
# torchrun says why a worker failed only if it is told: put `@record` from `torch.distributed.elastic.multiprocessing.errors` before the main
# function. An exception that leaves it is written to the file in `TORCHELASTIC_ERROR_FILE` (an `error.json` for each attempt and local rank), and
# torchrun's summary shows its traceback under *Root Cause*; without it you see `exitcode: 1`, and *To enable traceback see*. A killed process
# writes nothing. In `%%ddp` each failure is told with its traceback anyway, and the variable is set: a program with `@record` runs unchanged.
#
# ## Nodes that come and go
#
# With two numbers in `--nnodes` a training is **elastic**: this line, the same on every node, goes on with one node to four.
#
# ```
# torchrun --nnodes=1:4 --nproc-per-node=8 --max-restarts=3 \
#     --rdzv-id=run7 --rdzv-backend=c10d --rdzv-endpoint=node0:29400 train.py
# ```
#
# It begins when four nodes are there, or at least one and no other for 30 s. **Predict:** what happens to the ranks that train when a node
# joins? And when one leaves?
#
# | | what happens | of `--max-restarts` |
# |---|---|---|
# | a node **joins** | all workers are stopped; the nodes meet again, and start new ones with new `RANK` and `WORLD_SIZE` | nothing |
# | a node **leaves** | the next collective of the others fails, so their workers do, and those who are left meet again | one |
#
# So **ranks are not stable**: rank 0 can be another process on another node after that, and the world size another number. A program must take both
# from the environment each time it starts, deal out its data by them, and read a checkpoint that does not depend on who wrote it. Even
# `TORCHELASTIC_RESTART_COUNT` is each node's own: one that joins late counts from 0. (PyTorch 2.13 admits a node that joins late
# only with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` before torchrun on every node; without it all wait for each other and end after a minute.
# And the node of the endpoint has to stay: it holds the store at which the others meet.)
#
# ## What a failure costs
#
# A checkpoint every few steps bounds what is lost. **Predict** before you move the sliders: a failure comes after every seven steps.
# Is it better to write a checkpoint after every four steps or after every eight?

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.restarts()

# %% [markdown]
# With eight steps to a checkpoint no attempt ever comes to one: the training does not advance, and more restarts do not help. With one
# step to a checkpoint nothing is lost, but writing takes time too. Half an interval is lost per failure on average; how long an
# interval should be follows from how long a checkpoint takes and how often something fails.
#
# ## Exercise: a checkpoint that holds everything
#
# The check trains a small network with dropout on all ranks, lets the last rank fail in the middle of a step, starts again with new
# objects and new random numbers, and compares each following step with a run that nothing disturbed, **bit by bit**. Write the two methods:
#
# - `save` is called on **every** rank after every second step, with the model **wrapped by DDP**;
# - `load` is called on every rank of the next attempt, **before** DDP wraps the model.
#
# The optimizer has momentum, and its learning rate has changed on the way. `batches` is a sampler: it knows its epoch and its position in
# it, and has `state_dict()` and `load_state_dict()`. Dropout takes its masks from the rank's own random numbers,
# `torch.get_rng_state()`. A process may die at any moment, **also in the middle of `save`**.

# %% tags=["exercise"]
import os


class Checkpoint:
    def __init__(self, path):
        self.path = path

    def save(self, model, optimizer, batches, step):
        """Write down all that is needed to go on with `step`."""
        ...  # your code

    def load(self, model, optimizer, batches):
        """Put everything back and return the step to go on with: 0 if there is no checkpoint yet."""
        ...  # your code


# %%
from nbddp.teach import check

check.Checkpoint(Checkpoint)

# %% [markdown]
# Most wrong answers train without an error. Weights alone look fine, and the loss does; only the comparison shows that it is another run.

# %% tags=["solution"]
import os


class Checkpoint:
    def __init__(self, path):
        self.path = path

    def save(self, model, optimizer, batches, step):
        """Write down all that is needed to go on with `step`."""
        import torch
        import torch.distributed as dist

        dice = [None] * dist.get_world_size()
        dist.all_gather_object(dice, torch.get_rng_state())  # every rank has its own
        if dist.get_rank() == 0:
            state = {
                "model": model.module.state_dict(),  # without DDP's "module." before the names
                "optimizer": optimizer.state_dict(),
                "batches": batches.state_dict(),
                "step": step,
                "dice": dice,
            }
            torch.save(state, self.path + ".new")
            os.replace(self.path + ".new", self.path)  # in one go: the old one or the new one is there, whole

    def load(self, model, optimizer, batches):
        """Put everything back and return the step to go on with: 0 if there is no checkpoint yet."""
        import torch
        import torch.distributed as dist

        if not os.path.exists(self.path):
            return 0
        state = torch.load(self.path, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.load_state_dict(state["batches"])
        torch.set_rng_state(state["dice"][dist.get_rank()])
        return state["step"]


# %% [markdown]
# ## The whole program, killed
#
# Now a real death: rank 3 is killed before step 7 of the first attempt, and the second attempt goes on from the checkpoint. Then the
# same program trains from the beginning, with no failure and no checkpoint, and the weights are compared. (Seeds follow from
# the step here, so no random state has to be saved: the other way to have the same dice again.)
#
# **Predict:** with which step does the second attempt begin, and which steps are done twice?
#
# `settle` is for the last bit. DDP lays out its buckets anew after its first step, so in the step after a restart four ranks' gradients would be
# added up in another order than in the undisturbed run. A pass that changes nothing else comes before.

# %%
import tempfile

folder = tempfile.TemporaryDirectory()

# %%
# %%ddp --max-restarts 1 -- {folder.name}
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP

path, attempt = os.path.join(sys.argv[1], "checkpoint.pt"), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group()
rank = dist.get_rank()


def settle(model):
    model(torch.zeros(1, 8)).sum().backward()
    model.zero_grad()


@record
def train(path=None, steps=12, every=5, killed_at=None):
    torch.manual_seed(0)
    plain, begin = torch.nn.Linear(8, 4), 0
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    if path and os.path.exists(path):
        state = torch.load(path)
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    if rank == 0 and path:
        print(f"attempt {attempt}: begins with step {begin}")
    model = DDP(plain)
    settle(model)
    for step in range(begin, steps):
        if (rank, step) == (3, killed_at):
            os.kill(os.getpid(), signal.SIGKILL)
        torch.manual_seed(1000 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        if path and rank == 0 and (step + 1) % every == 0:
            state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
    return plain


killed = train(path, killed_at=7 if attempt == 0 else None)
undisturbed = train()
same = all(torch.equal(a, b) for a, b in zip(killed.parameters(), undisturbed.parameters(), strict=True))
print("the killed run and the undisturbed one have the same weights, bit for bit:", same)
dist.destroy_process_group()

# %% [markdown]
# With step 5: the checkpoint is of the first five steps, 0 to 4, so 5 and 6 were done twice.
#
# ## To remember
#
# - When one rank fails, all are started again from the first line, as new processes; only files are left.
# - A checkpoint holds model, optimizer, step, the sampler's position and every rank's random state; one rank writes a file, under another
#   name first, then `os.replace`.
# - A restart costs the steps since the last checkpoint, so the interval must be shorter than the time between failures.
#
# **On real GPUs:** save `torch.cuda.get_rng_state()` too, and load with `map_location` so that not every rank fills GPU 0. Let a run go to
# its end twice without any failure first: are two undisturbed runs equal there, bit for bit? (`torch.use_deterministic_algorithms(True)`.)
# Then kill one process of a torchrun with `--max-restarts 3` and watch it come back.

# %%
folder.cleanup()
# %ddp stop
