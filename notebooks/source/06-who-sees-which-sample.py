# %% [markdown]
# # Who sees which sample
#
# DDP averages gradients. That the gradients are of different data is the program's own task: every process has the whole dataset in
# reach, and a sampler tells it which part to read.
#
# **After this lesson you can** say which rank reads which sample in which epoch, shuffle anew in every epoch, and measure an accuracy that
# does not depend on the number of GPUs.

# %%
# %load_ext nbddp

# %% [markdown]
# ## Ten samples, four ranks
#
# `DistributedSampler` deals samples out like cards: rank *r* gets every `world_size`-th one, beginning with the *r*-th. It asks
# nobody: each rank works out its share from the length of the dataset, its rank and the world size.
#
# Ten cards cannot be dealt evenly to four. **Predict** before you run the cell: how many samples does each rank read, and what happens to
# the two that are left over?

# %%
# %%ddp --nproc 4
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group()
dataset = list(range(10))
for drop_last in (False, True):
    sampler = DistributedSampler(dataset, shuffle=False, drop_last=drop_last)
    print(f"drop_last={drop_last!s:5}", list(sampler))

# %% [markdown]
# Three each, twelve in all: samples 0 and 1 are there twice, on ranks 2 and 3. With `drop_last=True` two each: samples 8 and 9 are not read.
#
# All shares are equally long, and in training they have to be. DDP's backward is a collective: a rank with one batch more than the others
# would wait in it for ever. So the sampler pads (the default) or drops.
#
# ## Epoch by epoch
#
# With `shuffle=True` (also the default) all samples are shuffled before they are dealt out. All ranks must shuffle alike, or two of them would hold
# the same card. They do so without a message: each seeds a generator of its own with the same number, `seed + epoch`.
#
# The sampler does not know which epoch it is. **Predict:** what does a rank read in the second epoch if nobody tells it? And what is
# lost for good when `drop_last` comes on top?

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.samples()

# %% [markdown]
# Move the controls (without a mouse: Tab, then ← and →; Space opens a list). The upper picture is how it should be: each epoch another order, and the two
# repeated samples are others each time. Below nobody called `set_epoch`: the epochs are the same, and the same two samples are left out until training
# ends. No error tells you; the model just learns from less.
#
# The picture is worked out without PyTorch, generator included. This cell asks the real sampler on the real ranks. **Predict** from the picture what rank 2 prints.

# %%
# %%ddp
sampler = DistributedSampler(dataset)  # shuffle=True, seed=0
print("epochs 0, 1, nobody told:", list(sampler), list(sampler))
sampler.set_epoch(1)
print("epoch 1 after set_epoch: ", list(sampler))

# %% [markdown]
# ## Exercise: every epoch anew
#
# Write the frame of a training loop: for each epoch, what this rank reads. Batches of two, please, from a `DataLoader`. The check runs it on all
# ranks, each of which is seeded differently (as ranks are that nobody seeds), and compares what they read.


# %% tags=["exercise"]
def epochs_of(dataset, n_epochs):
    """For each epoch the list of samples that this rank reads, in order; the dataset holds whole numbers."""
    ...  # your code


# %%
from nbddp.teach import check

check.epochs_of(epochs_of)

# %% [markdown]
# Stuck? `check.epochs_of(epochs_of, hint=True)` gives a hint, and another one each time it is run.


# %% tags=["solution"]
def epochs_of(dataset, n_epochs):
    """For each epoch the list of samples that this rank reads, in order; the dataset holds whole numbers."""
    from torch.utils.data import DataLoader, DistributedSampler

    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    read = []
    for epoch in range(n_epochs):
        sampler.set_epoch(epoch)
        read.append([int(sample) for batch in loader for sample in batch])
    return read


# %% [markdown]
# ## A test set is something else
#
# In training a sample that is read twice does little harm. A measurement must not have it. Here a model is wrong about samples 0 and 1 and
# right about all others: its accuracy is 8 of 10.
#
# **Predict** what four ranks find that count over a padded sampler. And eight? And three?

# %%
from nbddp.lessons.samples.simulation import pooled, shares

right = [i not in (0, 1) for i in range(10)]
for world_size in range(1, 9):
    reads = shares(10, world_size, shuffle=False)
    repeats = sum(map(len, reads)) - 10
    print(f"world size {world_size}: {pooled(right, reads):.3f}, {repeats} samples counted twice")

# %% [markdown]
# The same model, the same data, and four different accuracies. With four ranks it is 8 of 12: the two wrong ones count twice. `drop_last=True` is no cure; it leaves
# samples out, and which ones depends on the number of ranks again.
#
# Taking the mean of the ranks' accuracies is none either: if one rank has three samples and another two, a sample of the first
# weighs less. What can be added up without a loss are **counts**.
#
# ## Exercise: an accuracy that counts every sample once
#
# Evaluation has no backward, so the shares need not be equally long, and nothing has to be padded. `dataset[i]` is a pair of
# an input `x` and its class `y`; `model(x)` gives a score per class, and the highest is the prediction. The process group is there. Each rank
# is to read its own share, and every rank is to return the accuracy over the whole set, as a number.


# %% tags=["exercise"]
def accuracy(model, dataset):
    """The share of samples whose class the model predicts, over all ranks: the same number on every rank."""
    ...  # your code


# %%
check.accuracy(accuracy)


# %% tags=["solution"]
def accuracy(model, dataset):
    """The share of samples whose class the model predicts, over all ranks: the same number on every rank."""
    import torch
    import torch.distributed as dist

    counts = torch.zeros(2)  # right predictions, samples
    with torch.no_grad():
        for i in range(dist.get_rank(), len(dataset), dist.get_world_size()):
            x, y = dataset[i]
            counts += torch.tensor([float(model(x).argmax() == y), 1.0])
    dist.all_reduce(counts)
    hits, samples = counts.tolist()
    return hits / samples


# %% [markdown]
# Two things bite in a real evaluation. The all-reduce belongs **after** the loop: inside it, a rank with one sample more would wait alone. And the
# loop must not call the DDP-wrapped model if it has buffers, such as batch norm's: DDP broadcasts them from rank 0 in a forward, in `eval()` too
# (under `no_grad` in the first one after a training step), and that is a collective again. Call `model.module`.
#
# ## Where there is no index
#
# A stream (`IterableDataset`) has no length, so no sampler can deal it out: every rank would read all of it. The program has to skip.
# **Predict** what rank 1 reads of a stream 0, 1, 2, … with four ranks.

# %%
# %%ddp
from itertools import count, islice

from torch.utils.data import IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()  # None without worker processes of the DataLoader
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        reader, readers = dist.get_rank() * workers + worker, dist.get_world_size() * workers
        return islice(count(), reader, 20, readers)


print([int(x) for x in DataLoader(Stream(), batch_size=None)])

# %% [markdown]
# Every fourth, beginning with 1. Each *reader* has to skip what the others read, and with `num_workers=2` a rank has two of them; the line with
# `get_worker_info` sees to that.
#
# ## To remember
#
# - `DistributedSampler` gives each rank every `world_size`-th sample of an order that all ranks shuffle alike, padded or cut so that all make the
#   same number of steps.
# - Without `sampler.set_epoch(epoch)` before each epoch, every epoch is the first one again.
# - An accuracy is a sum of counts over all ranks, divided once; padding, `drop_last` and means of means make it depend on the number of GPUs.
#
# **On real GPUs:** take your own training program, print the accuracy on one GPU and on all, over the same weights, to the last digit. If they
# differ, you now know where to look.

# %%
# %ddp stop
