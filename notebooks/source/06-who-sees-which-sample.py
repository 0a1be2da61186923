# %% [markdown]
# # Who sees which sample
#
# DDP averages gradients. The program must make sure that each rank computes its gradients on different data. Every process can read the whole
# dataset; a **sampler** selects the part that a rank reads.
#
# **After this lesson you can**
#
# - say which rank reads which sample in which epoch;
# - shuffle differently in every epoch;
# - measure an accuracy that does not depend on the number of GPUs.

# %%
# %load_ext nbddp

# %% [markdown]
# ## Ten samples, four ranks
#
# `DistributedSampler` deals samples like cards: rank *r* gets every `world_size`-th sample, starting with sample *r*. The ranks do not
# communicate for this. Each computes its share from the length of the dataset, its rank and the world size.
#
# Ten samples cannot be divided evenly among four ranks. The sampler can handle the remainder in two ways. By default it **pads**, so every
# sample is used. With `drop_last=True` it drops samples.

# %% tags=["prediction", "hidden"]
from nbddp.teach import predict

predict.samples_per_rank()
predict.samples_dropped()

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
# Samples 0 and 1 are read twice: ranks 2 and 3 read them again as padding.
#
# All shares have the same length. Training needs this, because DDP's `backward()` contains collectives: a rank with one batch more than the
# others would wait in it forever.
#
# ## Epoch by epoch
#
# With `shuffle=True`, the default, the sampler shuffles all samples before it divides them. All ranks must shuffle alike. Otherwise two ranks
# could read the same sample. They need no communication for this either: each rank seeds its own generator with the same number, `seed + epoch`.
#
# The sampler does not know the epoch. The program sets it with `sampler.set_epoch(epoch)`, and many programs forget to.

# %% tags=["prediction", "hidden"]
predict.second_epoch_without_set_epoch()
predict.samples_never_read()

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.samples()

# %% [markdown]
# Move the controls (without a mouse: Tab, then ← and →; Space opens a list). Choose 10 samples, 4 ranks, and compare the orders with and without
# `set_epoch`. With it, every epoch has a different order, and padding repeats different samples. Without it, `drop_last=True` omits the
# same samples until training ends. No error reports this. The model only learns from less data.
#
# The explorer computes the permutations without PyTorch. The next cell runs the real sampler on the real ranks. You can find the answer to the
# next question in the explorer.

# %% tags=["prediction", "hidden"]
predict.read_by_rank_2_in_epoch_1()

# %%
# %%ddp
dist.init_process_group()
sampler = DistributedSampler(dataset)  # shuffle=True, seed=0
print("epochs 0 and 1 without set_epoch:", list(sampler), list(sampler))
sampler.set_epoch(1)
print("epoch 1 after set_epoch(1):", list(sampler))

# %% [markdown]
# ## Exercise: a new order in every epoch
#
# Write the outer part of a training loop: for each epoch, collect the samples that this rank reads from a `DataLoader`, in batches of two. The
# check runs your function on all ranks and compares what they read. Each rank has a different random seed, as in a program that sets none.


# %% tags=["exercise"]
def epochs_of(dataset, n_epochs):
    """For each epoch the list of samples that this rank reads, in order; the dataset contains integers."""
    ...  # your code


# %%
from nbddp.teach import check

check.epochs_of(epochs_of)

# %% [markdown]
# Stuck? `check.epochs_of(epochs_of, hint=True)` gives a hint, and the next one each time you run it.


# %% tags=["solution"]
def epochs_of(dataset, n_epochs):
    """For each epoch the list of samples that this rank reads, in order; the dataset contains integers."""
    from torch.utils.data import DataLoader, DistributedSampler

    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    read = []
    for epoch in range(n_epochs):
        sampler.set_epoch(epoch)
        read.append([int(sample) for batch in loader for sample in batch])
    return read


# %% [markdown]
# ## Evaluating on a test set
#
# In training, a sample that is read twice makes little difference. In a measurement it makes the result wrong. Suppose a model predicts
# samples 0 and 1 wrong and the other eight right. Its accuracy is 0.8. The next cell computes what 1 to 8 ranks would measure if they
# counted over padded shares.

# %% tags=["prediction", "hidden"]
predict.accuracy_of_four_ranks()
predict.world_sizes_with_the_right_accuracy()

# %%
from nbddp.lessons.l06_samples.simulation import pooled, shares

right = [i not in (0, 1) for i in range(10)]
for world_size in range(1, 9):
    reads = shares(10, world_size, shuffle=False)
    repeats = sum(map(len, reads)) - 10
    print(f"world size {world_size}: {pooled(right, reads):.3f}, {repeats} samples counted twice")

# %% [markdown]
# The same model and the same data give four different accuracies. Two remedies do not work:
#
# - `drop_last=True` leaves samples out, and which ones depends on the number of ranks.
# - The mean of the ranks' accuracies is wrong if the ranks have different numbers of samples.
#
# **Counts** can be added up exactly: the number of right predictions and the number of samples.
#
# ## Exercise: an accuracy that counts every sample once
#
# Evaluation has no `backward()`, so the shares may have different lengths and need no padding.
#
# - `dataset[i]` is a pair of an input `x` and its class `y`.
# - `model(x)` returns a score per class; the class with the highest score is the prediction.
# - The check has made the process group.
#
# Each rank must read only its own share. Every rank must return the accuracy over the whole set, as a number.


# %% tags=["exercise"]
def accuracy(model, dataset):
    """The fraction of samples that the model predicts right, over all ranks: the same number on every rank."""
    ...  # your code


# %%
check.accuracy(accuracy)


# %% tags=["solution"]
def accuracy(model, dataset):
    """The fraction of samples that the model predicts right, over all ranks: the same number on every rank."""
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
# A real evaluation has two more pitfalls:
#
# - The all-reduce belongs **after** the loop. Inside it, a rank with one sample more would wait alone.
# - If the model has buffers, as batch norm does, call `model.module` and not the DDP wrapper. DDP broadcasts the buffers from rank 0 in forward,
#   even in `eval()` mode (under `no_grad`, in the first forward after a training step). This broadcast is a collective too.
#
# ## Streams
#
# A stream (`IterableDataset`) has no length, so no sampler can divide it. Without further code, every rank reads all of it. The dataset itself
# must skip what others read. Below, four ranks read a stream 0, 1, 2, … up to 19.

# %% tags=["prediction", "hidden"]
predict.stream_on_rank_1()

# %%
# %%ddp
from itertools import count, islice

from torch.utils.data import IterableDataset, get_worker_info

dist.init_process_group()


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()  # None without worker processes of the DataLoader
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        reader, readers = dist.get_rank() * workers + worker, dist.get_world_size() * workers
        return islice(count(), reader, 20, readers)


print([int(x) for x in DataLoader(Stream(), batch_size=None)])

# %% [markdown]
# With `num_workers=2`, each rank has two worker processes that read. Each of them must skip what all others read. `get_worker_info` gives the
# number of the worker.
#
# ## To remember
#
# - `DistributedSampler` shuffles alike on all ranks and gives each rank every `world_size`-th sample. It pads or drops, so that all ranks take
#   the same number of steps.
# - Without `sampler.set_epoch(epoch)` before each epoch, every epoch repeats the first one.
# - Add up counts over all ranks and divide once. With padding, `drop_last` or a mean of means, the accuracy depends on the number of GPUs.
#
# **On real GPUs:** take your own training program. Print the accuracy of the same weights on one GPU and on all, to the last digit. Are they
# equal?
#
# ## Glossary
#
# - **sampler**: yields the indices of the samples that a process reads.
# - **epoch**: one pass through the dataset.
# - **padding**: samples that are read again, so that all shares have the same length.
# - **stream** (`IterableDataset`): a dataset that yields samples in order and has no index.
#
# ## Further reading
#
# - [torch.utils.data](https://docs.pytorch.org/docs/stable/data.html), PyTorch documentation: `DistributedSampler`, `IterableDataset`,
#   `get_worker_info`
# - [DistributedDataParallel](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html), PyTorch
#   documentation: buffers and `broadcast_buffers`

# %%
# %ddp stop
