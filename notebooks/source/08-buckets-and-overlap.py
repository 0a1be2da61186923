# %% [markdown]
# # Buckets and overlap
#
# DDP does not wait for the end of backward to exchange gradients, and it does not exchange them one by one. It packs them into buckets, and
# a bucket starts as soon as its last gradient is there, while backward goes on.
#
# **After this lesson you can** say which gradients travel together and when they start, read the timeline of a step, tell a slow link from
# a slow rank, choose `bucket_cap_mb` for a reason, and take a trace where the timeline does not tell enough.

# %%
# %load_ext nbddp

# %% [markdown]
# ## What DDP packs
#
# An all-reduce has a cost for being started (its latency) and a cost per byte. One all-reduce for each gradient pays the first cost too often.
# One for all gradients can only start when backward is over, so nothing is hidden. Buckets are the way between.
#
# The rule has three parts:
#
# - **The last parameter comes first.** Backward begins at the loss, so gradients come in about the reverse order of `model.parameters()`.
# - **A bucket closes with the gradient that brings it to its limit or over it.** The limit is `bucket_cap_mb`, 25 MiB if you say nothing.
# - **The first bucket is small**, 1 MiB, so that the link gets something to do early. If you give `bucket_cap_mb`, your number holds for the
#   first bucket too.
#
# Below are eight layers of 512 × 512: a weight of 1 MiB and a bias of 2 KiB each, 8 MiB in all. DDP notes what it decides in a log of its own, and
# the function returns the sizes of the buckets from there.
#
# **Predict:** how many buckets are there, and how large is each?

# %%
# %%ddp --nproc 2 --show 0
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group()


def train(before=lambda: None, **options):
    """Six steps; bytes of the buckets in the first step, and of those that DDP has used since."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512) for _ in range(8)]
    model = DDP(torch.nn.Sequential(*layers), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(128, 512)
    for _ in range(6):
        before()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    log = model._get_ddp_logging_data()
    return {"first step": log["bucket_sizes"], "then": log["rebuilt_bucket_sizes"]}


train()

# %% [markdown]
# In the first step there is one bucket with everything. DDP does not know yet in which order gradients come, so it watches. Then it **rebuilds**
# its buckets once, in the order that it saw: two of them. The first closed at 1 MiB, with the weight of the last layer. The second may hold 25 MiB,
# so all other gradients are in it, down to the first layer's, which comes last of all. The bucket cannot start before.
#
# That is worth remembering: **of a model of less than 26 MiB, only the first small bucket can overlap with backward by default.** The timeline of
# the median step shows it. (Steps are recorded in every cell; the median leaves out the first two, where the rebuild is.)
#
# **Predict:** which of the two buckets sticks out from under backward?

# %% tags=["nbval-ignore-output"]
# %ddp timings

# %% [markdown]
# How to read it, from the top of a rank downwards:
#
# - **forward, backward, optimizer** are what the rank computes.
# - Below backward lie the **buckets**. A bar begins when DDP hands the bucket over. The light part is the wait for the slowest rank to do the
#   same; the hatched part is the transfer.
# - What lies under backward is **hidden**: it costs the step nothing. What sticks out is **exposed**: the optimizer must wait for it. The share that the
#   sentence tells is one of time, waits included, not of bytes.
#
# ## On paper
#
# The packer below uses DDP's rule and a link that carries one bucket at a time, each for a ring's time: 2(n − 1) latencies, and 2(n − 1)/n of
# its bytes over the bandwidth.
#
# **Predict:** eight layers of 4 MiB, on eight ranks. The default makes buckets of 4 and 28 MiB. Which share of the exchange is hidden with
# `bucket_cap_mb=4`, and which bucket can never be?

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.buckets()

# %% [markdown]
# The **last bucket** is sent when backward is over, so it is always exposed. A smaller cap makes it smaller. But try 512 ranks over Ethernet with
# a cap of 1: every bucket pays 2 · 511 latencies, and the exchange as a whole gets longer. A good cap is as small as the latency allows. And where all-reduce
# takes longer than backward, no cap helps: there you need a faster link, fewer bytes or fewer exchanges.
#
# ## Exercise: where do buckets end?
#
# Write DDP's rule. `sizes` are those of the parameters in the order of `model.parameters()`; `first` is the limit of the first bucket and `cap` that of
# the others. `pack([2, 2, 2, 2], 2, 4)` is `[[3], [2, 1], [0]]`.


# %% tags=["exercise"]
def pack(sizes, first, cap):
    """The buckets in the order in which they are sent, each a list of positions in sizes."""
    ...  # your code


# %%
from nbddp.teach import check

check.pack(pack)


# %% tags=["solution"]
def pack(sizes, first, cap):
    """The buckets in the order in which they are sent, each a list of positions in sizes."""
    buckets, bucket, limit = [], [], first
    for i in reversed(range(len(sizes))):
        bucket.append(i)
        if sum(sizes[k] for k in bucket) >= limit:
            buckets.append(bucket)
            bucket, limit = [], cap
    if bucket:
        buckets.append(bucket)
    return buckets


# %% [markdown]
# ## Three caps
#
# **Predict** the buckets of the same model for `bucket_cap_mb` 25, 3 and 1. A hint: 25 is the default, but here it is *given*.

# %%
# %%ddp --show 0
for cap in (25, 1, 3):
    print("bucket_cap_mb", cap, "·", train(bucket_cap_mb=cap)["then"])

# %% [markdown]
# A cap of 25 that is given also holds for the first bucket: there is one bucket, and not a byte of it is hidden. With a cap of 3 a bucket closes with the third
# layer's weight. Now the last of these runs beside the packer, which gets the parameters of the model, the length of the recorded backward and the
# speed that the link had.
#
# **Predict:** what will be the same in both, the buckets, the times, or both?

# %% tags=["nbval-ignore-output"]
parameters = [(f"{i}.{kind}", 4 * n) for i in range(8) for kind, n in (("weight", 512 * 512), ("bias", 512))]
explore.measured_buckets(parameters, cap_mb=3)

# %% [markdown]
# The buckets are the same to the byte. The times are not, and on a CPU they cannot be: gloo adds the numbers up on the cores that backward wants to have, so
# each makes the other slower, and a recorded bar has the wait for the other rank in it. Trust the structure here (which buckets, in which order, sent when), and measure times on the machine you train on.
#
# ## A slow link or a slow rank?
#
# Both look like a long all-reduce. Here rank 1 comes 100 ms late to every step, as it does when its data loader is slow. (`--timings` shows
# when the cell has ended what `%ddp timings` shows.)
#
# **Predict:** on which rank do the buckets look long?

# %% tags=["nbval-ignore-output"]
# %%ddp --timings
import time


def late():
    with torch.profiler.record_function("load the batch"):  # a name for the trace below
        time.sleep(0.1 * rank)


rank = dist.get_rank()
train(before=late, bucket_cap_mb=3)["then"]

# %% [markdown]
# On rank **0**. Its buckets are mostly light: they wait. The hatched part, the transfer, is no longer than before. The rank that never waits is the one that
# all others wait for. A faster link would change nothing; look at rank 1's data.
#
# The figure also says itself in words: type `words = %ddp timings`, then `print(words)`. They name the rank, and have a row for each bucket with its
# bandwidth: of the transfer alone, without the wait.
#
# ## What was rank 1 doing?
#
# The timeline knows DDP: forward, backward, buckets, optimizer. It says *who* is late, and in which part of the step: here between two steps, where it sees
# nothing of what your code does. (A `DataLoader` of torch's it would name.) `%%ddp --trace` runs `torch.profiler` on every rank and
# merges what it saw into one file, a process per rank on one clock: every operation of PyTorch with its thread, every `record_function` of
# yours by its name, and every collective, also those that are not DDP's, with an arrow from rank to rank in the order in which they began to transfer.
# Below the cell it says how long each rank computes, communicates and is idle, which rank comes last to the collectives, and what takes longest.
# It costs more than `%ddp timings` does, which is always on, so ask for it when the timeline leaves a question.
#
# Without a name the file is `ddp-trace.json.gz` beside the notebook, with a link to download it. So that this lesson leaves nothing there, the next cell
# goes to an empty folder first, among the system's temporary ones. (There the link finds nothing. To open the trace, leave that cell out.)
#
# **Predict:** six steps, three buckets. How many all-reduces will the trace have? And how many of those from the third step on does rank 1 call last?

# %%
import os
import tempfile

os.chdir(tempfile.mkdtemp())

# %% tags=["nbval-ignore-output"]
# %%ddp --trace
train(before=late, bucket_cap_mb=3)["then"]

# %% [markdown]
# Open the file at [ui.perfetto.dev](https://ui.perfetto.dev) (it stays in your browser) and zoom with W and S. On rank 1 each step begins with a long "load the batch": there is the answer.
# The file is JSON, so one can also ask it.

# %%
import gzip
import json

with gzip.open("ddp-trace.json.gz") as file:
    events = json.load(file)["traceEvents"]
print([e["args"]["name"] for e in events if e["name"] == "process_name"])
called = {}  # by kind of collective: (rank, number of the collective) → when
for e in events:
    if e["name"].startswith("c10d::"):
        called.setdefault(e["name"], {})[e["pid"] // 1000, e["args"]["sequence"]] = e["ts"]
for name, when in called.items():
    print(name, len(when) // 2)
when = called["c10d::allreduce_"]
steady = sorted(n for rank, n in when if rank == 1)[4:]  # without the first two steps
late = sum(when[0, n] < when[1, n] for n in steady)
print("from the third step on", len(steady), "· rank 1 calls last in", late)

# %% [markdown]
# 16, not 18: the first step has one bucket, the five others three each. Rank 1 is late to all of the last four steps. The all-gather and two of the broadcasts are
# DDP's when it is made: do all ranks have parameters of the same shapes, and here are rank 0's values. The other two broadcasts are the rebuild, in
# the forward of the second step: there rank 0 waits for rank 1 before backward has begun, so that step's buckets look as if nobody were late. No timeline of
# buckets shows that.
#
#
# ## Exercise: how long did the step wait?
#
# A trace gives you when backward ended and, for every bucket, when it was sent and when it was done. How much of the exchange is exposed? Buckets may be
# on their way at the same time, and one that was sent later may be done earlier. `exposed(20, [(5, 9), (12, 18), (20, 26)])` is `6`.


# %% tags=["exercise"]
def exposed(backward_end, spans):
    """The time after backward that the step waits for its buckets. spans: (sent, done) of each."""
    ...  # your code


# %%
check.exposed(exposed)


# %% tags=["solution"]
def exposed(backward_end, spans):
    """The time after backward that the step waits for its buckets. spans: (sent, done) of each."""
    done = [done for sent, done in spans]
    return max([backward_end, *done]) - backward_end


# %% [markdown]
# ## To remember
#
# - Gradients are packed from the last parameter to the first; a bucket starts when its last gradient is there, and the last bucket is always exposed.
# - The first step uses one bucket, and the second rebuilds them, so leave both out when you measure.
# - A long bucket is a slow link only if it *moves* long; if it *waits* long, another rank is late.
#
# **On real GPUs:** run your model for ten steps with `bucket_cap_mb` 5, 25 and 100 and look at `%ddp timings` each time. Is the exposed part as long as
# the last bucket's transfer? Then `%ddp bench` tells from which size on your link reaches its bandwidth: smaller buckets than that cost more than they hide.

# %%
# %ddp stop
