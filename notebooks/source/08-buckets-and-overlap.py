# %% [markdown]
# # Buckets and overlap
#
# DDP does not wait for the end of backward before it exchanges gradients, and it does not exchange them one by one. It packs gradients into **buckets**.
# The all-reduce of a bucket starts as soon as the bucket's last gradient is ready, while backward continues.
#
# **After this lesson you can**
#
# - say which gradients share a bucket, and when each bucket is sent;
# - read the timeline of a step, and tell a slow link from a slow rank;
# - choose `bucket_cap_mb` for a reason;
# - record a trace when the timeline does not explain enough.

# %%
# %load_ext nbddp

# %% [markdown]
# ## What DDP packs
#
# An all-reduce has a fixed cost (its latency) and a cost per byte.
#
# - One all-reduce per gradient pays the latency too often.
# - One all-reduce for all gradients starts when backward is over, so none of it overlaps with backward.
#
# Buckets are the compromise. DDP packs them by three rules:
#
# - **The last parameter comes first.** Backward starts at the loss, so gradients become ready in roughly the reverse order of `model.parameters()`.
# - **A bucket closes with the gradient that brings it to its limit or beyond.** The limit is `bucket_cap_mb`, 25 MiB by default.
# - **The first bucket is small**, 1 MiB, so that communication starts early. If you pass `bucket_cap_mb`, your value also applies to the first bucket.
#
# The model below has eight layers of 512 × 512. Each has a weight of 1 MiB and a bias of 2 KiB; together they are 8 MiB. DDP logs its decisions,
# and the function returns the sizes of the buckets from that log.

# %% tags=["prediction", "hidden"]
from nbddp.teach import predict

predict.buckets_in_the_first_step()

# %% tags=["prediction", "hidden"]
predict.buckets_from_then_on()

# %%
# %%ddp --nproc 2 --show 0
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group()


def train(before=lambda: None, steps=16, **options):
    """Some steps; bytes of the buckets in the first step, and of those that DDP has used since."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512) for _ in range(8)]
    model = DDP(torch.nn.Sequential(*layers), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(512, 512)
    for _ in range(steps):
        before()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    log = model._get_ddp_logging_data()
    return {"first step": log["bucket_sizes"], "then": log["rebuilt_bucket_sizes"]}


train()

# %% [markdown]
# The first step uses one bucket with all gradients. DDP does not know yet in which order gradients become ready, so it watches. Then it **rebuilds** its
# buckets once, in the order it saw. Now there are two:
#
# - Bucket 0 closed at 1 MiB, with the weight of the last layer.
# - Bucket 1 may hold 25 MiB, so it takes all other gradients, down to those of the first layer.
#
# nbddp records every DDP step. `%ddp timings` draws the median step, without the first two, in which DDP rebuilds its buckets.

# %% tags=["prediction", "hidden"]
predict.second_bucket_sent()

# %% tags=["prediction", "hidden"]
predict.optimizer_starts()

# %% tags=["nbval-ignore-output"]
# %ddp timings

# %% [markdown]
# Bucket 1 is sent at the end of backward, because it contains the first layer's gradients, and backward reaches these last. Bucket 0 is
# sent early in backward. **By default, a model of less than 26 MiB has at most two buckets. The last one is sent only when the last
# gradient is ready.** This holds on every machine. The length of the bars depends on the machine and on its other programs. So does the
# part of bucket 1 that lies under the rest of backward.
#
# Read the upper panel from the top of a rank down:
#
# - **forward, backward, optimizer** are the rank's own computation.
# - The **buckets** are below backward. A bar begins when DDP hands the bucket to the backend. In the light part, the bucket waits for the slowest rank to
#   do the same. In the hatched part, data moves.
# - What lies under backward is **hidden**: it costs no time. What extends beyond backward is **exposed**: the rank has nothing to compute meanwhile.
#   The black line below the bars marks it.
# - The **optimizer** starts late because it needs the averaged gradients of all buckets. The gap between backward and optimizer is the exposed time, plus a
#   moment in which DDP copies the result from the buckets to `.grad`.
#
# The percentage is a share of time, not of bytes, and it includes waiting. If ranks start backward at different times, the early rank's bucket 0 waits under backward, and
# that wait counts as hidden.
#
# The lower panel has one point per recorded step: the duration of the **step**, its **exposed communication**, and the **spread between
# ranks**. The spread is how far apart the ranks send their buckets. The vertical line marks the step drawn above. The first step is usually
# the longest. A step far above the others is a disturbance; do not tune for it.
#
# ## On paper
#
# The explorer packs gradients by DDP's rules. Its link carries one bucket at a time. Each takes the time of a ring all-reduce: 2(n − 1)
# latencies, plus 2(n − 1)/n of the bucket's bytes divided by the bandwidth.
#
# The questions are about eight layers of width 1024 (4 MiB each) on eight ranks with 100 Gb/s, and 20 ms of backward. The default makes buckets of 4 and 28 MiB.

# %% tags=["prediction", "hidden"]
predict.share_hidden_by_small_buckets()

# %% tags=["prediction", "hidden"]
predict.never_hidden_bucket()

# %% tags=["nbval-ignore-output"]
from nbddp.teach import explore

explore.buckets()

# %% [markdown]
# The **last bucket** is sent when backward is over, so it is always exposed. A smaller `bucket_cap_mb` makes it smaller. There are two limits:
#
# - Every bucket pays 2(n − 1) latencies. Try 512 ranks over Ethernet with a cap of 1: the whole exchange gets longer. A good cap is as small as the latency allows.
# - Where all-reduce takes longer than backward, no cap helps. You need a faster link, fewer bytes, or fewer exchanges.
#
# ## Exercise: pack the buckets
#
# Implement DDP's rules. `sizes` lists the parameters' sizes in the order of `model.parameters()`. `first` is the limit of the first bucket,
# and `cap` that of all others. For example, `pack([2, 2, 2, 2], 2, 4)` is `[[3], [2, 1], [0]]`.


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
# The same model again, with `bucket_cap_mb` 25, 1 and 3. Remember that 25 is the default, but here it is passed explicitly.

# %% tags=["prediction", "hidden"]
predict.buckets_with_a_given_25()

# %% tags=["prediction", "hidden"]
predict.buckets_with_3()

# %%
# %%ddp --show 0
for cap in (25, 1, 3):
    print("bucket_cap_mb", cap, "·", train(bucket_cap_mb=cap)["then"])

# %% [markdown]
# An explicit cap of 25 applies to the first bucket too. All gradients share one bucket, and none of its bytes are sent before backward ends. With a cap of 3, a bucket closes
# with the weight of the third layer.
#
# The next cell draws the last of these runs next to the packer's result. The packer gets the model's parameters, the length of the recorded backward, and the speed that the link had.

# %% tags=["prediction", "hidden"]
predict.same_on_paper()

# %% tags=["nbval-ignore-output"]
parameters = [(f"{i}.{kind}", 4 * n) for i in range(8) for kind, n in (("weight", 512 * 512), ("bias", 512))]
explore.measured_buckets(parameters, cap_mb=3)

# %% [markdown]
# The buckets agree to the byte. The times do not. On a CPU, gloo adds numbers on the same cores that backward uses, so each slows the
# other. A recorded bar also includes the wait for the other rank. Trust the structure here: which buckets there are, in which order, and
# when they are sent. Measure times on the machine that you train on.
#
# ## A slow link or a slow rank?
#
# Both make all-reduces look long. In the next cell, rank 1 is 200 ms late in every step, as if its data loader were slow. (`--timings` shows the output of `%ddp timings` when the
# cell has finished.)

# %% tags=["prediction", "hidden"]
predict.long_bars()

# %% tags=["nbval-ignore-output"]
# %%ddp --timings
import time


def late():
    with torch.profiler.record_function("load the batch"):  # a name for the trace below
        time.sleep(0.2 * rank)


rank = dist.get_rank()
train(before=late, bucket_cap_mb=3)["then"]

# %% [markdown]
# The bars on rank **0** are long, but they are mostly light: rank 0 waits. The hatched part, the transfer, is no longer than before. **The rank that never waits is the one that all
# others wait for.** A faster link would change nothing. Check rank 1's data.
#
# The figure is also available as text: `words = %ddp timings`, then `print(words)`. The text names the late rank and has a row per bucket with its bandwidth, computed
# from the transfer without the wait.
#
# ## What was rank 1 doing?
#
# The timeline knows four things: forward, backward, buckets and optimizer. It shows *who* is late and in which part of the step. Here rank 1 loses its time between steps, where the
# timeline sees nothing of your code (except torch's `DataLoader`).
#
# `%%ddp --trace` runs `torch.profiler` on every rank and merges the results into one file, with a process per rank on one clock. The trace contains
#
# - every PyTorch operation with its thread,
# - every `record_function` block by name,
# - every collective, also those that DDP does not send. An arrow joins the ranks in the order in which they begin to transfer.
#
# The summary below the cell shows how long each rank computes, communicates and is idle. It names the rank that arrives last at the
# collectives, and the longest calls. Tracing costs more than `%ddp timings`, which is always on, so use it when the timeline leaves a
# question.
#
# The file is `ddp-trace.json.gz` next to the notebook, with a download link. To leave no file there, the next cell changes to an empty temporary folder. (The link
# does not work from there. Skip the cell if you want to open the trace.)

# %%
import os
import tempfile

os.chdir(tempfile.mkdtemp())

# %% [markdown]
# The program below takes six steps. From the second step on there are three buckets.

# %% tags=["prediction", "hidden"]
predict.all_reduces_in_the_trace()

# %% tags=["nbval-ignore-output"]
# %%ddp --trace
train(before=late, steps=6, bucket_cap_mb=3)["then"]

# %% [markdown]
# There are 16, not 18: the first step has one bucket, the five others have three each.
#
# Open the file at [ui.perfetto.dev](https://ui.perfetto.dev) (it stays in your browser) and zoom with W and S. On rank 1 each step begins with a long "load the batch", which is
# the cause. The file is JSON, so a program can read it too. The next cell reads the last four steps, which have 12 all-reduces.

# %% tags=["prediction", "hidden"]
predict.called_last_by_rank_1()

# %% tags=["nbval-ignore-output"]
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
# Rank 1 is late to every all-reduce of the last four steps. The all-gather and two of the broadcasts come from DDP's constructor. It checks
# that all ranks have parameters of the same shapes, and copies rank 0's values. The other two broadcasts are the rebuild, in the forward of
# the second step. There rank 0 waits for rank 1 before backward begins, so in that step no bucket looks late. A timeline of buckets cannot
# show this.
#
# ## Exercise: how long did the step wait?
#
# From a trace you know when backward ended and, for every bucket, when it was sent and when it was done. How long is the exposed part of the exchange? Several buckets may be in
# flight at the same time, and a later one may finish earlier. For example, `exposed(20, [(5, 9), (12, 18), (20, 26)])` is `6`.


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
# - Gradients are packed from the last parameter to the first. A bucket is sent when its last gradient is ready, and the last bucket is always exposed.
# - The first step uses one bucket, and the second step rebuilds the buckets. Leave both out when you measure.
# - A long bar means a slow link only if most of it is *transfer*. If most of it is *waiting*, another rank is late.
#
# ## On real GPUs
#
# Run your model for ten steps with `bucket_cap_mb` 5, 25 and 100, and look at `%ddp timings` each time. Is the exposed part as long as the last bucket's transfer? Then
# `%ddp bench` shows from which message size on your link reaches its bandwidth. Buckets smaller than that cost more than they hide.
#
# ## Glossary
#
# - **bucket**: a buffer of gradients that DDP exchanges in one all-reduce.
# - **`bucket_cap_mb`**: the size in MiB at which a bucket closes.
# - **overlap**: communication that runs while backward computes.
# - **hidden, exposed**: the parts of communication that do and do not overlap with backward.
# - **straggler**: a rank that arrives late at collectives, so that the others wait.
# - **trace**: a record of all operations with their start and end times.
#
# ## Further reading
#
# - Shen Li et al., [PyTorch Distributed: Experiences on Accelerating Data Parallel Training](https://arxiv.org/abs/2006.15704), VLDB 2020: why buckets, and how large.
# - [DistributedDataParallel](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html): `bucket_cap_mb` and the other options.
# - [Distributed Data Parallel, design note](https://docs.pytorch.org/docs/stable/notes/ddp.html): what happens in constructor, forward and backward.
# - [torch.profiler](https://docs.pytorch.org/docs/stable/profiler.html) and [Perfetto](https://perfetto.dev/docs/).

# %%
# %ddp stop
