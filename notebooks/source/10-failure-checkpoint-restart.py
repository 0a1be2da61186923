# %% [markdown]
# # Failure, checkpoint, restart
#
# The more nodes and the longer the run, the more likely a failure. All ranks depend on each other, so one failed rank ends the training. Only what is in files survives.
#
# **After this lesson you can**
#
# - let a failed training restart by itself;
# - say how much work a failure costs;
# - write a checkpoint from which the training continues as if nothing had happened, bit for bit.

# %%
# %load_ext nbddp

# %% [markdown]
# ## One rank dies
#
# With `--max-restarts`, torchrun and `%%ddp` start the program again from its first line when a rank fails. `TORCHELASTIC_RESTART_COUNT` is the number of restarts so far.
#
# Rank 2 kills itself in the first attempt. An earlier cell has set the name `kept` on all ranks.

# %%
# %%ddp --nproc 4
kept = "a name from an earlier cell"

# %% tags=["prediction", "hidden"]
from nbddp.teach import predict

predict.ranks_that_keep_names()

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
# All four processes are new, not only rank 2's, and the contents of their memory are lost. (The report counts attempts from 1; the variable
# counts restarts.) Whatever a program needs to continue must be in a file.
#
# To see in torchrun why a worker failed, put `@record` from `torch.distributed.elastic.multiprocessing.errors` before the main function. If
# an exception leaves the function, it writes the exception to the file in `TORCHELASTIC_ERROR_FILE` (an `error.json` per attempt and local
# rank). torchrun's summary then shows the traceback under *Root Cause*. Without it, the summary shows `exitcode: 1` and *To enable
# traceback see*. A killed process writes nothing. `%%ddp` reports each failure with its traceback anyway. It also sets the variable, so a
# program with `@record` runs unchanged.
#
# ## Nodes that join and leave
#
# With two numbers in `--nnodes`, a training is **elastic**. This line, the same on every node, runs with one to four nodes:
#
# ```
# torchrun --nnodes=1:4 --nproc-per-node=8 --max-restarts=3 \
#     --rdzv-id=run7 --rdzv-backend=c10d --rdzv-endpoint=node0:29400 train.py
# ```
#
# It starts when four nodes have arrived, or when at least one has arrived and no other for 30 s. Later, nodes may join and leave:
#
# | event | what happens | uses up `--max-restarts` |
# |---|---|---|
# | a node **joins** | all workers are stopped; the nodes meet again and start new workers with a new `RANK` and `WORLD_SIZE` | no |
# | a node **leaves** | the next collective of the others fails, and so do their workers; the remaining nodes meet again | one |
#
# So **ranks are not stable**. Afterwards rank 0 can be another process on another node, and the world size can be another number. A program must
#
# - read both from the environment each time it starts,
# - distribute its data by them,
# - read a checkpoint that does not depend on which rank wrote it.
#
# Even `TORCHELASTIC_RESTART_COUNT` belongs to each node: a node that joins late counts from 0. Two limits apply. PyTorch 2.13 admits a node
# that joins late only with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` set before torchrun on every node. Otherwise all nodes wait for each
# other and exit after a minute. And the node in `--rdzv-endpoint` must stay, because it runs the store where the others meet.
#
# ## The cost of a failure
#
# A checkpoint every few steps limits the loss. In the explorer, a training of 20 steps fails again and again. Suppose that each attempt fails after seven steps.

# %% tags=["prediction", "hidden"]
predict.better_interval()

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.restarts()

# %% [markdown]
# With eight steps per checkpoint, no attempt reaches a checkpoint. The training makes no progress, and more restarts do not help. With one step per checkpoint nothing is lost, but writing takes time
# too. A failure loses half an interval on average. The best interval depends on how long a checkpoint takes and how often failures occur.
#
# ## Exercise: a complete checkpoint
#
# The check trains a small network with dropout on all ranks and lets the last rank fail in the middle of a step. It restarts with new
# objects and new random numbers. Then it compares each following step with an undisturbed run, **bit by bit**. Write the two methods:
#
# - `save` is called on **every** rank after every second step, with the model **wrapped in DDP**.
# - `load` is called on every rank of the next attempt, **before** DDP wraps the model.
#
# The optimizer has momentum, and its learning rate has changed during training. `batches` is a sampler: it knows its epoch and its position in the epoch, and has `state_dict()` and
# `load_state_dict()`. Dropout uses the rank's own random state, `torch.get_rng_state()`. A process may die at any moment, **also during `save`**.

# %% tags=["exercise"]
import os


class Checkpoint:
    def __init__(self, path):
        self.path = path

    def save(self, model, optimizer, batches, step):
        """Save everything needed to continue at `step`."""
        ...  # your code

    def load(self, model, optimizer, batches):
        """Restore everything and return the step to continue at: 0 if there is no checkpoint yet."""
        ...  # your code


# %%
from nbddp.teach import check

check.Checkpoint(Checkpoint)

# %% [markdown]
# Most wrong answers train without an error. With the weights alone, even the loss looks fine. Only the comparison shows that it is a different run.

# %% tags=["solution"]
import os


class Checkpoint:
    def __init__(self, path):
        self.path = path

    def save(self, model, optimizer, batches, step):
        """Save everything needed to continue at `step`."""
        import torch
        import torch.distributed as dist

        random_states = [None] * dist.get_world_size()
        dist.all_gather_object(random_states, torch.get_rng_state())  # every rank has its own
        if dist.get_rank() == 0:
            state = {
                "model": model.module.state_dict(),  # without DDP's "module." before the names
                "optimizer": optimizer.state_dict(),
                "batches": batches.state_dict(),
                "step": step,
                "random_states": random_states,
            }
            torch.save(state, self.path + ".new")
            os.replace(self.path + ".new", self.path)  # atomic: there is always one complete file

    def load(self, model, optimizer, batches):
        """Restore everything and return the step to continue at: 0 if there is no checkpoint yet."""
        import torch
        import torch.distributed as dist

        if not os.path.exists(self.path):
            return 0
        state = torch.load(self.path, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.load_state_dict(state["batches"])
        torch.set_rng_state(state["random_states"][dist.get_rank()])
        return state["step"]


# %% [markdown]
# ## The whole program, killed
#
# Now a real failure. Rank 3 is killed before step 7 of the first attempt, and the second attempt continues from the checkpoint. Checkpoints
# are written after every five steps. Then the same program trains from the beginning, without failure and checkpoint, and the weights are
# compared. Here the seeds are computed from the step, so no random state has to be saved. This is the other way to get the same random
# numbers again.
#
# `settle` is needed for equality to the last bit. DDP rebuilds its buckets after the first step. In the step after a restart, the gradients of four ranks would be added in another order than in the
# undisturbed run. So each run first makes one pass that changes nothing else.

# %%
import tempfile

folder = tempfile.TemporaryDirectory()

# %% tags=["prediction", "hidden"]
predict.second_attempt_starts()

# %% tags=["prediction", "hidden"]
predict.steps_done_twice()

# %%
# %%ddp --max-restarts 1 -- {tempfile.mkdtemp(dir=folder.name)}
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
# The checkpoint contains the first five steps, 0 to 4. So the second attempt begins with step 5, and steps 5 and 6 were done twice.
#
# ## To remember
#
# - When one rank fails, all ranks are restarted from the first line, as new processes. Only files survive.
# - A checkpoint contains the model, the optimizer, the step, the sampler's position and every rank's random state. One rank writes the file, under another
#   name first, and then calls `os.replace`.
# - A restart costs the steps since the last checkpoint, so the interval must be shorter than the time between failures.
#
# ## On real GPUs
#
# Save `torch.cuda.get_rng_state()` too, and load with `map_location`, so that not every rank fills GPU 0. First let two runs finish without a failure: are they equal, bit for bit?
# (`torch.use_deterministic_algorithms(True)`.) Then kill one process of a torchrun with `--max-restarts 3`, and watch it come back.
#
# ## Glossary
#
# - **checkpoint**: a file from which a training can continue.
# - **attempt**: one start of all workers; a restart begins the next one.
# - **elastic**: a training whose number of nodes may change.
# - **atomic**: done completely or not at all, as `os.replace` is.
# - **random state**: the state of a random number generator, from which its next numbers follow.
#
# ## Further reading
#
# - [torchrun (Elastic Launch)](https://docs.pytorch.org/docs/stable/elastic/run.html): restarts, elastic nodes, and what a script must do.
# - [Error propagation](https://docs.pytorch.org/docs/stable/elastic/errors.html): `@record` and the error files.
# - [Reproducibility](https://docs.pytorch.org/docs/stable/notes/randomness.html): seeds and deterministic algorithms.
# - J. Young, [A first order approximation to the optimum checkpoint interval](https://doi.org/10.1145/361147.361115), *Communications of the ACM* 17, 1974.

# %%
folder.cleanup()
# %ddp stop
