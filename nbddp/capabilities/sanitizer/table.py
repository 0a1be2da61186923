"""The kinds of mistakes: the name, weight, rule and repair of each. Pure.

From weight 60 on results are wrong, from 30 on they may be, and below they are only slow. Where two findings have one
cause, `explains` names the effects that are not reported beside the cause.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MistakeKind:
    """group: of the table in the documentation. rule: what must have been seen. example: of a mistake."""

    name: str
    group: str
    weight: int
    rule: str
    cure: str
    example: str = ""
    explains: tuple[str, ...] = ()


DATA, GRADIENTS, DRIFT, MEANS = "data", "gradients", "drift", "means"
MODES, SPEED = "modes and files", "speed"

ROWS = (
    # -- gradients that are not exchanged
    MistakeKind(
        "past-ddp", GRADIENTS, 95,
        "a training forward of DDP's module ran outside of DDP's forward, no backward through DDP's output came "
        "before the step, and gradients differed there",
        "call the DDP model, ddp(x), and not ddp.module(x), for all that is trained",
        "loss = loss_fn(ddp.module(x), y)",
        ("gradients-differ", "replicas-differ", "no-exchange", "buffers-differ"),
    ),
    MistakeKind(
        "past-ddp-armed", GRADIENTS, 35,
        "a training forward of DDP's module ran outside of DDP's forward, while gradients were equal at all steps",
        "compute every part of the loss within one forward of the DDP model, and return it from there",
        "out = ddp(x); loss = loss_fn(ddp.module.head(features))",
    ),
    MistakeKind(
        "replaced-parameter", GRADIENTS, 92,
        "an optimizer moved a parameter of DDP's module that was added or replaced after DDP had registered its hooks",
        "change the model first, then wrap it: ddp = DDP(model); or wrap it again",
        "ddp = DDP(model); model.head.weight = nn.Parameter(...)",
        ("gradients-differ", "replicas-differ", "no-exchange", "lost-result"),
    ),
    MistakeKind(
        "moved-model", GRADIENTS, 92,
        "parameters have another dtype or device than when DDP was made",
        "move or convert the model first, then wrap it: ddp = DDP(model.to(...))",
        "ddp = DDP(model); ddp.to(torch.float64)",
        ("gradients-differ", "replicas-differ", "no-exchange", "lost-result"),
    ),
    MistakeKind(
        "unknown-to-ddp", GRADIENTS, 90,
        "an optimizer of DDP's model moved a parameter that no DDP exchanges, and its gradient or value differed "
        "between ranks",
        "put the parameter into the module that DDP wraps",
        "optim.SGD([*ddp.parameters(), *head.parameters()], 0.1)",
        ("gradients-differ", "replicas-differ"),
    ),
    MistakeKind(
        "unfrozen-after-wrap", GRADIENTS, 90,
        "an optimizer moved a parameter that did not require a gradient when DDP was made",
        "set requires_grad before DDP(model), or wrap the model again",
        "ddp = DDP(model); model.encoder.requires_grad_(True)",
        ("gradients-differ", "replicas-differ"),
    ),
    MistakeKind(
        "optimizer-outdated", GRADIENTS, 89,
        "no optimizer held a parameter of a trained FSDP2 model; one held as many of the same shapes, and none of "
        "these had a gradient at its first four steps",
        "make the optimizer after fully_shard(model), from model.parameters()",
        "optimizer = AdamW(model.parameters()); fully_shard(model)",
    ),
    MistakeKind(
        "sync-flag-late", GRADIENTS, 93,
        "require_backward_grad_sync was False at the forward and True at its backward; gradients differed at the step",
        "set require_backward_grad_sync, or enter no_sync, before the forward of the micro-step",
        "loss = ddp(x).mean(); ddp.require_backward_grad_sync = last; loss.backward()",
        ("exchange-in-no-sync", "gradients-differ", "replicas-differ", "no-exchange"),
    ),
    MistakeKind(
        "no-sync-at-step", GRADIENTS, 93,
        "the last backward before an optimizer step was inside no_sync, with its forward; gradients differed there",
        "leave no_sync for the last micro-step before each optimizer step, also where batches are left over",
        "with ddp.no_sync(): loss.backward()\noptimizer.step()",
        ("gradients-differ", "replicas-differ", "no-exchange"),
    ),
    MistakeKind(
        "kept-gradients", GRADIENTS, 84,
        "before the first backward of at least 2 steps some ranks had gradients, and others had none or zeros",
        "call optimizer.zero_grad() on all ranks, before each step's first backward",
        "if rank == 0: optimizer.zero_grad()",
    ),
    MistakeKind(
        "no-exchange", GRADIENTS, 88,
        "gradients differed at a step without an exchange: no backward through DDP's output came before it, or it "
        "left no gradients. Or another backward followed it, or the step began within it",
        "run the forward through the DDP model, and its backward once before each step",
        "",
        ("gradients-differ", "replicas-differ"),
    ),
    MistakeKind(
        "gradients-differ", GRADIENTS, 85,
        "gradients differed between ranks at a step, and no rule about causes held",
        "compare the ranks' steps: %ddp compare model",
        "",
        ("replicas-differ",),
    ),
    # -- replicas that drift
    MistakeKind(
        "hyperparameters-differ", DRIFT, 84,
        "a number of the optimizer's groups differed between ranks at the same step, and parameters differed after "
        "it. With FSDP2, whose shards cannot be compared, a number such as `lr` is enough",
        "compute it from what all ranks know: all_reduce the metric before scheduler.step(metric)",
        "scheduler.step(local_loss)",
        ("replicas-differ",),
    ),
    MistakeKind(
        "steps-differ", DRIFT, 86,
        "the program ended well, and ranks made different numbers of steps of the same optimizer. Or they made them "
        "after different numbers of exchanges, and gradients differed there",
        "call optimizer.step() on every rank, equally often",
        "if rank == 0: optimizer.step()",
        ("replicas-differ", "gradients-differ", "lost-result", "edited-gradients", "optimizer-state-differs"),
    ),
    MistakeKind(
        "scales-differ", DRIFT, 84,
        "GradScaler's scale differed between ranks at the same update",
        "let no rank skip alone: check for infinities after the exchange, with one scaler setting on all ranks",
        "GradScaler(init_scale=2.0 ** (10 + rank))",
        ("edited-gradients", "replicas-differ", "gradients-differ", "steps-differ"),
    ),
    MistakeKind(
        "edited-gradients", DRIFT, 82,
        "gradients were equal when backward ended, and differed at the step; or before the exchange each rank clipped "
        "its own, by another factor",
        "edit gradients by numbers that are equal on all ranks: all_reduce the norm or the loss first",
        "clip_grad_norm_(ddp.parameters(), loss.item())",
        ("replicas-differ", "gradients-differ"),
    ),
    MistakeKind(
        "changed-parameters", DRIFT, 82,
        "parameters were equal after one step (or when DDP was made) and differed before the next, and on some ranks "
        "alone they had changed",
        "change the model on all ranks alike, or before DDP(model), which copies rank 0's values",
        "if rank == 0: ddp.module.load_state_dict(checkpoint)",
        ("replicas-differ",),
    ),
    MistakeKind(
        "optimizer-state-differs", DRIFT, 80,
        "parameters, gradients and the optimizer's numbers were equal before a step, and parameters differed after it",
        "load the optimizer's state on every rank",
        "if rank == 0: optimizer.load_state_dict(state)",
        ("replicas-differ",),
    ),
    MistakeKind(
        "optimizer-differs", DRIFT, 83,
        "the ranks' optimizers of one model had other parameters, or groups with other numbers. At a step such a "
        "parameter became unequal, or only ranks that lack it kept its value",
        "give the optimizer the same parameters, in the same groups, on all ranks",
        "decay = set(names)  # whose order differs by process",
        ("optimizer-state-differs", "replicas-differ"),
    ),
    MistakeKind(
        "frozen-differs", DRIFT, 54,
        "a module that needs no gradient was called beside the model at half of its training forwards or more. Its "
        "values differed between ranks and stayed as they were. Or they were equal, and then changed on some ranks "
        "alone. Or it had the model's first values on some ranks, and changed on others",
        "load the same values on all ranks, or seed them equally: for t in module.state_dict().values(): "
        "dist.broadcast(t, 0)",
        "teacher = Net().requires_grad_(False)  # of each rank's own generator",
    ),
    MistakeKind(
        "lost-result", DRIFT, 83,
        "gradients differed after an exchange that all ranks had made",
        "see whether the ranks' communication hooks return the same; else suspect the hardware or the driver",
        "",
        ("replicas-differ", "gradients-differ"),
    ),
    MistakeKind(
        "buffers-differ", DRIFT, 55,
        "buffers that a checkpoint has differed between ranks, and DDP does not broadcast them: by its setting, or "
        "because they are newer than DDP. Or the module moves a buffer a little at each forward, and the loss depends "
        "on it. DDP then overwrites each rank's buffer by rank 0's",
        "use SyncBatchNorm, or DDP's broadcast_buffers=True",
        "DDP(model_with_batch_norm, broadcast_buffers=False)",
    ),
    MistakeKind(
        "parameter-order", DRIFT, 90,
        "the ranks' models had the same number of parameters with different names, or in a different order",
        "build the model from the same code, in the same order, on all ranks",
        "layers = set(names)  # the order differs by process",
        ("gradients-differ", "replicas-differ"),
    ),
    MistakeKind(
        "replicas-differ", DRIFT, 80,
        "parameters differed between ranks when the program ended, and no rule about causes held. Or they differed "
        "when DDP was made, and before the first step. Or, without DDP, they differed at each step, before which all "
        "their gradients were all-reduced",
        "compare them: %ddp compare model",
    ),
    # -- data
    MistakeKind(
        "sampler-world", DATA, 78,
        "the DistributedSampler of a loader that trained the model was made for another number of replicas. Or it was "
        "made for all ranks, while each rank's DDP has a group of its own",
        "make the sampler after init_process_group, or pass num_replicas=dist.get_world_size()",
        "DistributedSampler(data, num_replicas=1, rank=0)",
        ("same-batch", "sampler-rank", "overlap"),
    ),
    MistakeKind(
        "sampler-rank", DATA, 78,
        "the DistributedSamplers of two ranks had the same rank",
        "pass rank=dist.get_rank(), not LOCAL_RANK",
        "DistributedSampler(data, world, int(os.environ['LOCAL_RANK']))",
        ("same-batch", "overlap"),
    ),
    MistakeKind(
        "sampler-seed", DATA, 74,
        "the ranks' DistributedSamplers had different seeds",
        "give all ranks the sampler's same seed",
        "DistributedSampler(data, seed=rank)",
        ("overlap",),
    ),
    MistakeKind(
        "same-batch", DATA, 76,
        "ranks fed the model equal batches at all of their training forwards, and the batches were not all one",
        "split the data: DataLoader(data, sampler=DistributedSampler(data)), or take every world-th item by rank",
        "DataLoader(data, shuffle=True)",
        ("overlap", "same-noise"),
    ),
    MistakeKind(
        "overlap", DATA, 66,
        "in one epoch several ranks got the same samples, more than equal samples of a data set explain, and each "
        "rank's own were distinct. Or each rank went through all of a data set whose lists are equal on all ranks",
        "shuffle by a seed that all ranks share, and then take each rank's part",
        "random.shuffle(files); files[rank::world]",
    ),
    MistakeKind(
        "worker-repeats", DATA, 65,
        "a loader with several workers gave batches in groups of equal ones, one of each worker, on all ranks",
        "take each worker's part of the rank's rows with itertools.islice(rows, info.id, None, info.num_workers)",
        "class Stream(IterableDataset): ...  # split by rank, and not by worker",
    ),
    MistakeKind(
        "split-differs", DATA, 70,
        "a fifth or more of the samples that a rank evaluated were another rank's training samples, and none its own",
        "split with a generator that all ranks seed equally",
        "train, val = random_split(data, [90, 10])",
        ("overlap",),
    ),
    MistakeKind(
        "dataset-differs", DATA, 62,
        "the data sets behind the ranks' DistributedSamplers had different lengths, or other statistics named "
        "mean, std or var; or the ranks' data sets numbered the same classes in another order",
        "give every rank the same data set; the sampler takes its part",
        "data = data.filter(lambda row: row['id'] % world == rank)",
        ("overlap",),
    ),
    MistakeKind(
        "same-order", DATA, 50,
        "a shuffling sampler kept its epoch, and two epochs gave the same batches in the same order. Or a data set's "
        "epoch was set, and kept workers did not see it",
        "call sampler.set_epoch(epoch) at the start of each epoch",
        "for epoch in range(n): for batch in loader: ...",
    ),
    MistakeKind(
        "same-augmentation", DATA, 45,
        "fetches drew random numbers from generators of equal state on all ranks, for different samples",
        "seed by rank once the model is made: torch.manual_seed(seed + rank), in workers too",
        "np.random.seed(0)  # on every rank",
    ),
    MistakeKind(
        "same-mask", DATA, 40,
        "a model with dropout drew random numbers from generators of equal state on all ranks, for other inputs. It "
        "did so at all of the first 16 forwards, or from one of them on",
        "seed by rank once the model is made: torch.manual_seed(seed + rank)",
        "torch.manual_seed(0)  # then dropout on every rank",
        ("same-noise",),
    ),
    MistakeKind(
        "same-noise", DATA, 39,
        "at each of at least 4 steps the ranks drew equal tensors by torch's generator before the backward, while "
        "inputs differed. The tensors had a row for each sample. What loaders draw, and shapes of parameters, do not "
        "count",
        "seed by rank once the model is made: torch.manual_seed(seed + rank)",
        "torch.manual_seed(0); noise = torch.randn_like(x)  # on every rank",
    ),
    MistakeKind(
        "evaluated-twice", DATA, 52,
        "an evaluation saw samples more than once over all ranks, and no rank gathered results of samples",
        "evaluate range(rank, len(data), world), or drop the sampler's padding before the metric",
        "DataLoader(test, sampler=DistributedSampler(test))",
    ),
    MistakeKind(
        "evaluated-in-part", DATA, 32,
        "the DistributedSampler of an evaluation had drop_last=True, and samples were left over",
        "evaluate range(rank, len(data), world)",
        "DataLoader(test, sampler=DistributedSampler(test, shuffle=False, drop_last=True))",
    ),
    # -- means
    MistakeKind(
        "hook-scale", MEANS, 88,
        "the result of a communication hook was the mean of what went in, times a factor",
        "divide the bucket by the world size before the all-reduce: bucket.buffer().div_(world)",
        "def hook(state, bucket): return dist.all_reduce(bucket.buffer(), async_op=True)...",
        ("lost-result", "gradients-differ"),
    ),
    MistakeKind(
        "averaged-twice", MEANS, 86,
        "gradients of a DDP model were all-reduced by hand after DDP had exchanged them, and changed by it",
        "remove the all-reduce: DDP has averaged the gradients when backward returns",
        "for p in ddp.parameters(): dist.all_reduce(p.grad)",
    ),
    MistakeKind(
        "reduced-in-graph", MEANS, 80,
        "a tensor of one element was reduced over ranks in place, and backward then ran through it, by a factor other "
        "than 1",
        "all-reduce a copy for the log: dist.all_reduce(loss.detach().clone()); run backward on the rank's own loss",
        "dist.all_reduce(loss); (loss / world).backward()",
    ),
    MistakeKind(
        "gather-cuts-gradient", MEANS, 70,
        "a gather of a tensor that requires a gradient gave values without one, and the loss was made of them",
        "use torch.distributed.nn.functional.all_gather, or detach the tensor if that is meant",
        "dist.all_gather(parts, z); loss = contrast(z, torch.cat(parts))",
    ),
    MistakeKind(
        "unequal-batches", MEANS, 58,
        "ranks trained on batches of different sizes at the same forward, no count was exchanged, and samples weighed "
        "differently in the graph. Or ranks of equal weight accumulated over different numbers of micro-batches",
        "weight each rank's loss by its share: loss * n * world / n_of_all_ranks",
        "x = x[: 4 - 3 * rank]",
    ),
    MistakeKind(
        "unequal-tokens", MEANS, 57,
        "at half of the steps (at least 4), counts of targets were 1.2 times apart between ranks. Each rank's targets "
        "had the same total weight. Targets that `ignore_index` or a mask of 0 and 1 excludes are not counted",
        "divide by the count of all ranks: dist.all_reduce(n); loss = cross_entropy(..., reduction='sum') * world / n",
        "cross_entropy(logits, labels)  # labels of -100 are not counted",
        ("unequal-batches",),
    ),
    MistakeKind(
        "loss-weights-differ", MEANS, 57,
        "at least 4 losses of a rank had the same weights of classes, and other ranks' losses had others",
        "compute the weights from the labels of all ranks: dist.all_reduce(counts)",
        "weight = 1 / torch.bincount(labels_of_this_rank).float(); cross_entropy(logits, y, weight)",
    ),
    MistakeKind(
        "loss-settings-differ", MEANS, 56,
        "at least 4 losses of a rank had graphs of one form with the same numbers in them, and other ranks' had "
        "others. Such a number is a temperature, an exponent, label smoothing or a term's weight. Batches were of one "
        "size",
        "give the loss the same settings on all ranks",
        "CrossEntropyLoss(label_smoothing=0.1 if rank == 0 else 0.0)",
    ),
    MistakeKind(
        "scheduler-steps", MEANS, 56,
        "a scheduler made exactly world-size steps for each step of its optimizer",
        "step the scheduler once for each optimizer step",
        "for _ in range(world): scheduler.step()",
    ),
    MistakeKind(
        "collectives-crossed", MEANS, 87,
        "the n-th collective of a group came from lines that the ranks call in another order, with equal shapes",
        "call the group's collectives in the same order on all ranks",
        "for name in set(metrics): dist.all_reduce(metrics[name])",
    ),
    # -- modes and files
    MistakeKind(
        "autocast-differs", MODES, 64,
        "autocast was on at a training forward on some ranks, or with another dtype",
        "enter autocast on all ranks alike",
        "with torch.autocast('cuda', enabled=rank == 0): ...",
    ),
    MistakeKind(
        "mode-differs", MODES, 66,
        "the model, a module within it or a frozen one beside it was in train mode on some ranks only, at the same "
        "training forward. Or some ranks alone ran a model with BatchNorm in train mode without gradients, twice or "
        "more",
        "call ddp.train() on all ranks before training",
        "if rank == 0: ddp.eval(); evaluate(); ddp.train()",
        ("buffers-differ",),
    ),
    MistakeKind(
        "modules-differ", MODES, 59,
        "a number of a module of torch.nn, such as a dropout's share, differed between ranks at a training forward",
        "set it on all ranks alike",
        "if rank: ddp.module.dropout.p = 0.5",
        ("mode-differs",),
    ),
    MistakeKind(
        "settings-differ", MODES, 42,
        "settings of precision or determinism differed between ranks at an optimizer step",
        "set them on all ranks alike",
        "if rank == 0: torch.set_float32_matmul_precision('high')",
    ),
    MistakeKind(
        "same-file", MODES, 61,
        "several ranks wrote one file by torch.save, numpy.save, safetensors, json.dump or pickle.dump, after the same "
        "number of steps",
        "if dist.get_rank() == 0: torch.save(...)",
        "torch.save(ddp.module.state_dict(), 'model.pt')",
    ),
    # -- speed
    MistakeKind(
        "exchange-in-no-sync", SPEED, 25,
        "a backward inside no_sync exchanged gradients, since its forward was outside",
        "put the forward inside no_sync, too",
        "loss = ddp(x).mean()\nwith ddp.no_sync(): loss.backward()",
    ),
    MistakeKind(
        "exchanged-again", SPEED, 22,
        "gradients of a DDP model were all-reduced by hand after DDP had exchanged them, and stayed as they were",
        "remove the all-reduce: DDP has averaged the gradients when backward returns",
        "dist.all_reduce(p.grad); p.grad /= world",
    ),
    MistakeKind(
        "host-sync", SPEED, 21,
        "at 90 % of at least 30 optimizer steps, one line of the program waited for a GPU, real or simulated. It read "
        "the loss, or a number after backward. Or it called `torch.cuda.synchronize` in a function that does not ask "
        "for the time",
        "keep loss.detach() on the GPU, and read it at each k-th step, as in if step % 50 == 0: print(loss.item())",
        "optimizer.step(); total += loss.item()",
    ),
    MistakeKind(
        "starved-rank", SPEED, 24,
        "on one rank, three of four waits for a batch were longer than 5 ms. On each other rank, three of four were "
        "five times shorter",
        "give its loader more workers, or spread the slow samples over all ranks",
        "",
    ),
    MistakeKind(
        "too-many-threads", SPEED, 23,
        "ranks on a host computed on the CPU with more threads in all than it has cores",
        "torch.set_num_threads(cores // ranks), or OMP_NUM_THREADS",
        "torch.set_num_threads(os.cpu_count())",
    ),
)  # fmt: skip
KINDS = {row.name: row for row in ROWS}
