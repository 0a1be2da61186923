# %% [markdown]
# # Capstone: a language model, start to finish
#
# A complete training program is more than a model and DDP. It computes in bfloat16, clips gradients, warms up the learning rate, logs on one rank,
# survives a failure, and reports a loss that is unbiased. You know each part from the earlier lessons. Here you put them together.
#
# **After this lesson you can** write such a program, check it against a rubric, see where its time goes, and run it under torchrun and Slurm.

# %%
import os
import tempfile

os.chdir(tempfile.mkdtemp())  # what the cells below write is in a new folder
# %load_ext nbddp

# %% [markdown]
# ## The task
#
# The model reads text character by character and predicts the next one. The text is made by a rule, so nothing is downloaded: sums of two digits, such
# as `3+4=07 `. Four sums make a row. The digits before `=` are random; those behind it can be learned. Twenty of the hundred sums are held out as the
# test set.
#
# The model is a small **transformer** of the usual kind (GPT). It has embeddings, blocks of causal attention and a feed-forward network,
# and a linear layer that scores the next character. Called with inputs and targets it returns the mean loss. The arguments after `--` become
# `sys.argv` on the ranks, as in a script; here it is the folder for checkpoints.

# %%
# %%ddp --nproc 2 -- pool
import os
import random
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

LETTERS = "0123456789+= "
sums = [f"{a}+{b}={a + b:02d} " for a in range(10) for b in range(10)]
random.Random(0).shuffle(sums)


def rows(some, count, seed):
    """Inputs and targets of shape (count, 27): rows of four sums, and the same one character later."""
    chance = random.Random(seed)
    texts = ["".join(chance.choices(some, k=4)) for _ in range(count)]
    codes = torch.tensor([[LETTERS.index(letter) for letter in text] for text in texts])
    return codes[:, :-1], codes[:, 1:]


class Block(nn.Module):
    """Causal attention with four heads, then a feed-forward network."""

    def __init__(self, width):
        super().__init__()
        self.before, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class LanguageModel(nn.Module):
    """Inputs and targets → the mean loss per character."""

    def __init__(self, width=64):
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(27, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.scores = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(LETTERS)))

    def forward(self, inputs, targets):
        x = self.letters(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device))
        scores = self.scores(self.blocks(x))
        return F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


print("parameters:", sum(p.numel() for p in LanguageModel().parameters()))
print("a row:", "".join(LETTERS[i] for i in rows(sums[20:], 1, 0)[0][0]))

# %% [markdown]
# ## What one mistake does
#
# Most mistakes do not stop a program: it trains, and its loss falls. The explorer trains a very small model on paper, with one mistake that
# you choose. It compares the model with one process that sees every whole batch. On the right are lines of the rubric by which your own
# program will be marked. As in the check, "checkpoint" is judged by the run that fails and continues, and all other lines by the same
# program without a failure.

# %% tags=["prediction", "hidden"]
from nbddp.teach import predict

predict.forgotten_optimizer()

# %% tags=["prediction", "hidden"]
predict.found_on_one_rank()

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.training()

# %% [markdown]
# - The loss curve gives few mistakes away. If every rank takes the whole batch, even the weights are right, and only the work is not shared.
# - Try a program on several ranks, with a failure, and with a test set that the world size does not divide. Each of these shows mistakes
#   that the others hide.
# - One number is not enough: on three ranks, clipping before the all-reduce ends near the right weights, and only the norms show it.
#
# ## Exercise: the training program
#
# Write `capstone`. It is called on every rank, after `init_process_group`, with a model whose initial weights differ between ranks. The **rubric** has
# nine lines, each with points:
#
# | line | what to do |
# |---|---|
# | same weights on all ranks | train `DDP(model)` |
# | as one process | each rank takes the rows `rank::world_size` of every batch; AdamW with its defaults, one step per batch |
# | bfloat16 | forward passes in `torch.autocast(device.type, dtype=torch.bfloat16)`, here also on a CPU |
# | clipping | gradients to a norm of 1.0 |
# | warm-up | in step *s*, counted from 0, the learning rate is 0.01 · min(1, (*s* + 1)/10) |
# | logging | after every 10 steps rank 0 prints `step 10: loss 1.2345`, the loss of the whole batch |
# | evaluation | the mean loss over all rows of the test, each counted once; the world size may not divide their number |
# | checkpoint | after every 10 steps, one file in `folder`, written atomically; a restart continues from it |
# | any number of ranks | no fixed world size in the code |


# %% tags=["exercise"]
def capstone(model, batch, test, folder, steps):
    """Train model for `steps` steps, and return its mean loss over the test, the same number on every rank.

    model(inputs, targets): the mean loss. batch(step): inputs and targets of the whole batch of a step.
    test: inputs and targets. folder: where the checkpoint is; it may hold one already.
    """
    import os

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    ...  # your code


# %%
from nbddp.teach import check

check.capstone(capstone)

# %% [markdown]
# The check trains a small network: undisturbed, with a rank that fails, from the checkpoint, and on one rank fewer. It compares with one process that
# sees every whole batch. `check.capstone(capstone, hint=True)` gives a hint.


# %% tags=["solution"]
def capstone(model, batch, test, folder, steps):
    """Train model for `steps` steps, and return its mean loss over the test, the same number on every rank.

    model(inputs, targets): the mean loss. batch(step): inputs and targets of the whole batch of a step.
    test: inputs and targets. folder: where the checkpoint is; it may hold one already.
    """
    import os

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    rank, world_size = dist.get_rank(), dist.get_world_size()
    path = os.path.join(folder, "checkpoint.pt")
    device = next(model.parameters()).device
    optimizer, first = torch.optim.AdamW(model.parameters()), 0
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    parallel = DDP(model)

    def loss_of(net, pair):
        """The mean loss of this rank's rows, and their number."""
        inputs, targets = (t[rank::world_size].to(device) for t in pair)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return net(inputs, targets), len(inputs)

    for step in range(first, steps):
        optimizer.param_groups[0]["lr"] = 0.01 * min(1, (step + 1) / 10)
        loss, _ = loss_of(parallel, batch(step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 10 == 0:
            mean = loss.detach() / world_size
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: loss {mean.item():.4f}")
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, path + ".new")
                os.replace(path + ".new", path)

    with torch.no_grad():
        loss, rows = loss_of(model, test)
    sums = torch.tensor([loss.item() * rows, rows], device=device)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


# %% [markdown]
# ## Train the model
#
# `%ddp push` copies the function to the ranks. `train` sets the task: 60 steps of 48 rows. Each batch depends only on its step number, so a restart
# uses the same batches again.

# %%
# %ddp push capstone

# %% tags=["prediction", "hidden"]
predict.lines_of_losses()


# %% tags=["nbval-ignore-output"]
# %%ddp -o losses -- pool
def train(folder, kill):
    """The loss over the held-out sums. kill: rank 1 is killed when it asks for the batch of step 35."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    def batch(step):
        if kill and step == 35 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return rows(sums[20:], 48, seed=step)

    os.makedirs(folder, exist_ok=True)
    torch.manual_seed(dist.get_rank())
    return capstone(LanguageModel().to(device), batch, rows(sums[:20], 25, seed=-1), folder, 60)


if not dist.is_initialized():
    dist.init_process_group()
loss = train(sys.argv[1], "kill" in sys.argv)
if dist.get_rank() == 0:
    print(f"test: {loss:.4f}")
loss

# %% [markdown]
# There are six lines, since only rank 0 prints. A model that guesses among the 13 characters has a loss of ln 13 = 2.56. Two of every seven characters
# are random digits, which cannot be predicted, so no model gets far below 2/7 · ln 10 = 0.66.
#
# ## Exported, run under torchrun, and killed
#
# `%ddp export` writes the `%%ddp` cells as a program, with the function that you pushed. The program does not use nbddp.

# %% tags=["nbval-ignore-output"]
# %ddp export train.py --force

# %% [markdown]
# Below, torchrun starts the program with two new processes. In step 35, rank 1 is killed.

# %% tags=["prediction", "hidden"]
predict.safe_steps()

# %%
import subprocess
import sys


def torchrun(*words):
    """The program's exit status, and the losses that it printed."""
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", *words]
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}  # a rank that is killed prints what it has said
    done = subprocess.run(line, capture_output=True, text=True, timeout=80, env=unbuffered)
    return done.returncode, [said for said in done.stdout.splitlines() if said.startswith(("step", "test"))]


status, lines = torchrun("torchrun", "kill")
print("exit status", status, "·", *(line.partition(":")[0] for line in lines))

# %% [markdown]
# The last checkpoint was written after 30 steps. Steps 30 to 34 were done and then lost. Now the same command again, without the failure.

# %% tags=["prediction", "hidden"]
predict.goes_on()

# %%
status, lines = torchrun("torchrun")
print("exit status", status, "·", *(line.partition(":")[0] for line in lines))
test = float(lines[-1].partition(":")[2])
print("the loss of the notebook, to 2 %:", abs(test - losses[0]) < 0.02 * losses[0])

# %% [markdown]
# It continued at step 30 and reached the loss of the undisturbed run. The last digits may differ. DDP rebuilds its buckets after the first step of each
# start, so numbers are summed in a different order, and bfloat16 keeps about three digits.
#
# For Slurm, this job starts the same program on two nodes:

# %% tags=["nbval-ignore-output"]
# %ddp export train.py --to slurm --nnodes 2 --nproc 4

# %% [markdown]
# ## Where the time goes
#
# The gradients of this model, 404 KiB, fit into one bucket, since the default limit is 25 MiB. So DDP can send nothing before backward is nearly done.

# %% tags=["nbval-ignore-output"]
# %%ddp --timings
from torch.nn.parallel import DistributedDataParallel as DDP

if not dist.is_initialized():
    dist.init_process_group()


def steps(**options):
    """Some steps of forward and backward."""
    model = DDP(LanguageModel(), **options)
    for step in range(16):
        model.zero_grad()
        model(*rows(sums, 24, step)).backward()


steps()

# %% [markdown]
# With a limit of 0.1 MiB, the first buckets are sent while backward still computes, and each bucket costs a message.

# %% tags=["prediction", "hidden"]
predict.buckets_of_a_tenth()

# %% tags=["nbval-ignore-output"]
# %%ddp --timings
steps(bucket_cap_mb=0.1)

# %% [markdown]
# Compare the hidden share and the duration of a step. More buckets hide more, and cost more messages; between two processes of one machine, neither
# matters much. Over a network, with a model of gigabytes, overlap saves far more time than the messages cost. Exchanging less often always helps:
# accumulate micro-batches under `no_sync`.

# %% [markdown]
# ## To remember
#
# - Compare a program with one process that sees every whole batch; equal ranks prove little.
# - Clip after backward has averaged. Compute the learning rate from the step, so that a restart continues with the right one.
# - A checkpoint contains model, optimizer and step. Rank 0 writes it under another name and renames it.
# - A mean over ranks is right only if all ranks have the same count. Otherwise sum values and counts, then divide.
#
# **On real GPUs:** run the cells without `--nproc`, so that each GPU gets a rank; `train` then takes `cuda:LOCAL_RANK`. bfloat16 needs no
# gradient scaler. Make the model 100 times as large, and compare `%ddp timings` for two bucket sizes again.
#
# ## Glossary
#
# - **autocast**: runs selected operations in a smaller type; parameters stay in float32.
# - **bfloat16**: 16 bits with the range of float32 and about three significant digits.
# - **gradient clipping**: scales all gradients down together if their norm exceeds a limit.
# - **rubric**: the list of criteria by which a program is marked, with points.
# - **transformer**: a network of blocks in which each position attends to other positions, here to earlier ones only.
# - **warm-up**: the first steps, in which the learning rate grows.
#
# ## Further reading
#
# - Vaswani et al., [Attention Is All You Need](https://arxiv.org/abs/1706.03762), 2017.
# - Goyal et al., [Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour](https://arxiv.org/abs/1706.02677), 2017: warm-up.
# - PyTorch, [Automatic Mixed Precision](https://pytorch.org/docs/stable/amp.html) and
#   [torchrun](https://pytorch.org/docs/stable/elastic/run.html).

# %%
# %ddp stop
