"""Lesson 06: answers to its exercises, wrong and right."""

from __future__ import annotations

from tests.lessons.tables import Table, within

HEAD = """
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler
    def accuracy(model, dataset):
        rank, world = dist.get_rank(), dist.get_world_size()
        n = len(dataset)
        def hit(i):
            x, y = dataset[i]
            return int(model(x).argmax() == y)
        def total(x):
            t = torch.tensor([float(x)]); dist.all_reduce(t); return t.item()
        mine = range(rank, n, world)
        padded = list(DistributedSampler(dataset, shuffle=False))
"""
ACCURACY = Table("accuracy", within(HEAD + "        ...\n"), every=3, wrong={
    "return sum(float(model(dataset[i][0]).argmax() == dataset[i][1]) for i in mine) / len(mine)":
        "each is the accuracy of the rank's own samples",
    "return total(sum(map(hit, mine)) + sum(map(hit, mine))) / n":
        "samples 0–8 are read more than once by one rank and a hit there counts twice",
    "h = sum(map(hit, padded)); return total(h) / total(len(padded))":
        "expected 0.333, got 0.300; sample 0 is read by more than one rank (DistributedSampler pads) and counted",
    "return total(sum(map(hit, padded)) / len(padded)) / world": "and counted each time",
    "return total(sum(map(hit, padded))) / n": "while the divisor counts every sample once",
    "p = list(DistributedSampler(dataset, shuffle=False, drop_last=True)); return total(sum(map(hit, p))) / "
    "total(len(p))":
        "sample 8 is read by no rank (drop_last?)",
    "return total(sum(map(hit, mine)) / len(mine)) / world":
        "expected 0.333, got 0.375; that is the mean of the ranks' accuracies, and ranks have 5 and 4 samples",
    "return total(sum(map(hit, mine)) / len(mine))": "the sum of the ranks' accuracies",
    "return total(sum(map(hit, mine))) / len(mine)": "are divided by the rank's own number",
    "return sum(map(hit, mine)) / n": "own hits are divided by the size of the whole set",
    "a = total(sum(map(hit, mine))) / n; return a if rank == 0 else None":
        "rank 1 returned None; every rank must return it",
    "t = torch.tensor([float(sum(map(hit, mine))), len(mine)]); dist.reduce(t, 0); return (t[0] / t[1]).item() if "
    "rank == 0 else 0.75":
        "all_reduce gives the sum to every rank, reduce to",
    "return sum(map(hit, range(n))) / n": "is right, but ranks 0–1 read all of them",
    "return total(sum(map(hit, mine))) / n / world": "by the world size once too often",
    "return total(sum(map(hit, mine)))": "divide by the number of samples",
    "return 100 * total(sum(map(hit, mine))) / n": "that is a percentage",
    "return 1 - total(sum(map(hit, mine))) / n": "the share of wrong predictions",
    "list(map(hit, mine)); return 0.123": "expected 0.333, got 0.123; every sample is",
    "k = n // world; return total(sum(map(hit, range(rank * k, rank * k + k)))) / n":
        "sample 6 is read by no rank, while the divisor counts every sample",
    "return total(hit(rank)) / total(1)": "by no rank (does the loop end too early?)",
    "return 1": "no rank has read any sample: dataset[i] gives one",
    "return round(total(sum(map(hit, mine))) / n, 2)": "expected 0.333, got 0.330; it is rounded",
    "return total(sum(map(hit, mine))) // n": "did // or int() round a fraction down",
    "return len(dataset[rank::world])": "this dataset gives one sample at a time: dataset[i]",
    "return 'good'": "rank 0 returned 'good'; return a number from 0 to 1",
    "h = sum(total(hit(i)) for i in mine); return h / n":
        "deadlock: rank 0 waits in all_reduce #5; rank 1 has finished the cell without calling it",
    "if rank == 1: return hit(n)\n        return total(0)": "rank 1 raised IndexError: there is no",
}, right=[
    """
        from fractions import Fraction
        return Fraction(int(total(sum(map(hit, mine)))), n)
    """,
    """
        loader = DataLoader(torch.utils.data.Subset(dataset, mine), batch_size=3)
        hits = torch.tensor(0)
        for x, y in loader:
            hits += (model(x).argmax(1) == y).sum()
        dist.all_reduce(hits)
        return hits / n
    """,
    """
        keep = padded[: len(mine)]
        everyone = [None] * world
        dist.all_gather_object(everyone, [hit(i) for i in keep])
        flat = sum(everyone, [])
        return torch.tensor([sum(flat) / len(flat)])
    """,
    """
        block = range(n * rank // world, n * (rank + 1) // world)
        return total(sum(map(hit, block))) / total(len(block))
    """,
])  # fmt: skip

LOOP = """
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler
    def epochs_of(dataset, n_epochs, **options):
        rank, world = dist.get_rank(), dist.get_world_size()
        n = len(dataset)
        def epoch(sampler, **more):
            return [int(s) for batch in DataLoader(dataset, 2, sampler=sampler, **more) for s in batch]
        def all_of(seed, n=n):
            return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
        sampler = DistributedSampler(dataset)
        es = range(n_epochs)
"""
EPOCHS_OF = Table("epochs_of", within(LOOP + "        ...\n"), every=3, wrong={
    "return [epoch(sampler) for e in es]": "all epochs are shuffled alike: call sampler.set_epoch",
    "return [(epoch(sampler), sampler.set_epoch(e))[0] for e in es]": "set_epoch comes too late",
    "return [(sampler.set_epoch(1), epoch(sampler))[1] for e in es]": "are shuffled alike",
    "return [(sampler.set_epoch((e + 1) // 2), epoch(sampler))[1] for e in es]":
        "epoch 2 is the same as epoch 1: call sampler.set_epoch(epoch) with every epoch's own number",
    "return [epoch(DistributedSampler(dataset, shuffle=False)) for e in es]":
        "the samples come in the dataset's own order",
    "return [torch.randperm(n).tolist()[rank::world][:6] for e in es]": "must shuffle alike",
    "return [epoch(None, shuffle=True) for e in es]":
        "epoch 0: ranks 0–1 read all 13 samples; a DistributedSampler, passed to the DataLoader",
    "own = list(range(n))[:-1][rank::world]\n        return [[own[i] for i in all_of(e, len(own))] for e in es]":
        "rank 0 reads the same samples in every epoch, only in another order",
    "return [all_of(e)[rank::world] for e in es]":
        "epoch 0: rank 0 reads 7 samples and rank 1 6: with DDP rank 0 would wait forever in its last step",
    "return [all_of(e)[rank::world][:3] for e in es]": "7 of 13 samples are read by no rank",
    "read = []\n        for e in es:\n            sampler.set_epoch(e); read += epoch(sampler)\n"
    "        return [read for e in es]":
        "all epochs are the same list, which grows",
    "return [epoch(DistributedSampler(dataset, world, 0, seed=e)) for e in es]":
        "epoch 0: all ranks read the same samples; the sampler's rank must be",
    "return [epoch(DistributedSampler(dataset, 1, rank)) for e in es]":
        "rank 1 raised ValueError: Invalid rank; num_replicas is the world size",
    "return [(sampler.set_epoch(e), epoch(sampler)[::2])[1] for e in es]":
        "6 of 13 samples are read by no rank; at most 1",
    "yield epoch(sampler)": "got <generator object epochs_of>",
    "return [epoch(sampler)]": "rank 0: return a list of 4 lists, one for each epoch; got a",
    "return [list(DataLoader(dataset, 2, sampler=sampler)) for e in es]": "a list for each batch",
    "return [[n + 1] for e in es]": "contains values that are not samples; the samples are 0–12",
    "return list(es)": "epoch 0 is 0; it must be a list of the samples",
    "return [epoch(sampler) for e in es] if rank == 0 else None": "rank 1: return a list of 4",
    "return [(sampler.set_epoch(e + rank), epoch(sampler))[1] for e in es]": "the same epoch",
}, right=[
    "return tuple(torch.tensor(epoch(DistributedSampler(dataset, seed=e))) for e in es)",
    """
        s = DistributedSampler(dataset, seed=5, drop_last=True)
        out = []
        for e in es:
            s.set_epoch(10 * e)
            out.append(epoch(s))
        return out
    """,
    """
        out = []
        for e in es:
            order = all_of(e)
            order += order[: -n % world]
            out.append(order[rank::world])
        return out
    """,
    "return [epoch(DistributedSampler(dataset, seed=e)) for e in es]",
])  # fmt: skip
