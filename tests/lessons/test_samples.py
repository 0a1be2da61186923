"""Lesson 06: the sampler's arithmetic against torch's own, and the checks of its two exercises on real ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

import nbddp
from nbddp.lessons.l06_samples.exercise import judge_accuracy, near, sets_for
from nbddp.lessons.l06_samples.figure import draw_samples
from nbddp.lessons.l06_samples.simulation import DROPPED, UNTOLD, dealt, pooled, randperm, shares
from nbddp.teach import check, explore
from tests.lessons.answers import Mutant, defined, exercise, solution

# -- the explorer ----------------------------------------------------------------------------


@given(n=st.integers(1, 700), seed=st.integers(0, 2**40))
def test_permutations_are_torchs(n: int, seed: int) -> None:
    generator = torch.Generator()
    generator.manual_seed(seed)
    assert randperm(n, seed) == torch.randperm(n, generator=generator).tolist()


@settings(max_examples=300)
@given(
    n=st.integers(1, 60), ranks=st.integers(1, 9), shuffle=st.booleans(), drop_last=st.booleans(),
    seed=st.integers(0, 99), epoch=st.integers(0, 99),
)  # fmt: skip
def test_shares_are_those_of_the_distributed_sampler(
    n: int, ranks: int, shuffle: bool, drop_last: bool, seed: int, epoch: int
) -> None:
    mine = shares(n, ranks, shuffle=shuffle, seed=seed, epoch=epoch, drop_last=drop_last)
    for rank, share in enumerate(mine):
        real: DistributedSampler[int] = DistributedSampler(range(n), ranks, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        real.set_epoch(epoch)
        assert share == list(real)


def test_the_figure_has_every_reader() -> None:
    chosen = dealt(10, 4, UNTOLD, DROPPED)
    shown = draw_samples(chosen)
    texts = [t.get_text() for t in shown.figure.axes[0].texts]
    assert texts.count("none") == 2 * len(chosen.epochs)
    assert texts.count("= epoch 0") == 1
    assert shown.words == chosen.words()
    assert all(t.get_fontsize() >= 6.5 for t in shown.figure.axes[0].texts)
    reads = sum(len(share) for epoch in dealt(10, 4).epochs for share in epoch)
    assert len(draw_samples(dealt(10, 4)).figure.axes[0].patches) == reads


def test_what_the_lessons_questions_about_the_explorer_say() -> None:
    untold = dealt(10, 4, UNTOLD, DROPPED)
    assert all(untold.as_before(epoch) for epoch in range(1, 4))
    assert len(untold.never()) == 2
    assert dealt(10, 4).epochs[1][2] == (1, 9, 5)
    first, second = (dealt(**setting) for setting in explore.samples().settings)
    assert first.summary().endswith("every sample once"), "the plain case answers no question"
    assert second == untold


# -- accuracy --------------------------------------------------------------------------------

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
WRONG_ACCURACIES = [
    Mutant("reads twice, own only",
           "return sum(float(model(dataset[i][0]).argmax() == dataset[i][1]) for i in mine) / len(mine)",
           "each is the accuracy of the rank's own samples"),
    Mutant("reads twice, wrong",
           "return total(sum(float(model(dataset[i][0]).argmax() != dataset[i][1]) for i in mine)) / n",
           "that is the share of wrong predictions"),
    Mutant("counts twice", "return total(sum(map(hit, mine)) + sum(map(hit, mine))) / n",
           "samples 0–8 are read more than once by one rank and a hit there counts twice"),
    Mutant("padded", "h = sum(map(hit, padded)); return total(h) / total(len(padded))",
           "expected 0.333, got 0.300; sample 0 is read by more than one rank (DistributedSampler pads) and counted"),
    Mutant("padded mean", "return total(sum(map(hit, padded)) / len(padded)) / world", "and counted each time"),
    Mutant("padded and shuffled", "p = list(DistributedSampler(dataset)); "
           "return total(sum(map(hit, p))) / total(len(p))", "and counted each time; count every sample once"),
    Mutant("padded hits", "return total(sum(map(hit, padded))) / n", "while the divisor counts every sample once"),
    Mutant("dropped", "p = list(DistributedSampler(dataset, shuffle=False, drop_last=True)); "
           "return total(sum(map(hit, p))) / total(len(p))", "sample 8 is read by no rank (drop_last?)"),
    Mutant("mean of means", "return total(sum(map(hit, mine)) / len(mine)) / world",
           "expected 0.333, got 0.375; that is the mean of the ranks' accuracies, and ranks have 5 and 4 samples"),
    Mutant("sum of means", "return total(sum(map(hit, mine)) / len(mine))", "the sum of the ranks' accuracies"),
    Mutant("own", "return sum(map(hit, mine)) / len(mine)",
           "rank 0 returned 0.000 and rank 1 0.750: each is the accuracy of the rank's own samples"),
    Mutant("own divisor", "return total(sum(map(hit, mine))) / len(mine)", "are divided by the rank's own number"),
    Mutant("own hits", "return sum(map(hit, mine)) / n", "own hits are divided by the size of the whole set"),
    Mutant("one rank", "a = total(sum(map(hit, mine))) / n; return a if rank == 0 else None",
           "rank 1 returned None; every rank must return it"),
    Mutant("reduce", "t = torch.tensor([float(sum(map(hit, mine))), len(mine)]); dist.reduce(t, 0); "
           "return (t[0] / t[1]).item() if rank == 0 else 0.75", "all_reduce gives the sum to every rank, reduce to"),
    Mutant("everybody", "return sum(map(hit, range(n))) / n", "is right, but ranks 0–1 read all of them"),
    Mutant("divided again", "return total(sum(map(hit, mine))) / n / world", "by the world size once too often"),
    Mutant("hits alone", "return total(sum(map(hit, mine)))", "divide by the number of samples"),
    Mutant("percent", "return 100 * total(sum(map(hit, mine))) / n", "that is a percentage"),
    Mutant("errors", "return 1 - total(sum(map(hit, mine))) / n", "the share of wrong predictions"),
    Mutant("a number of its own", "list(map(hit, mine)); return 0.123", "expected 0.333, got 0.123; every sample is"),
    Mutant("blocks, rest lost", "k = n // world; return total(sum(map(hit, range(rank * k, rank * k + k)))) / n",
           "sample 6 is read by no rank, while the divisor counts every sample"),
    Mutant("the first only", "return total(hit(rank)) / total(1)", "by no rank (does the loop end too early?)"),
    Mutant("nothing read", "return 1", "no rank has read any sample: dataset[i] gives one"),
    Mutant("rounded", "return round(total(sum(map(hit, mine))) / n, 2)", "expected 0.333, got 0.330; it is rounded"),
    Mutant("whole numbers", "return total(sum(map(hit, mine))) // n", "did // or int() round a fraction down"),
    Mutant("a slice", "return len(dataset[rank::world])", "this dataset gives one sample at a time: dataset[i]"),
    Mutant("a word", "return 'good'", "rank 0 returned 'good'; return a number from 0 to 1"),
    Mutant("in the loop", "h = sum(total(hit(i)) for i in mine); return h / n",
           "deadlock: rank 0 waits in all_reduce #5; rank 1 has finished the cell without calling it"),
    Mutant("raises", "if rank == 1: return hit(n)\n        return total(0)", "rank 1 raised IndexError: there is no"),
    Mutant("unwritten", "...", "still to be written"),
]  # fmt: skip
RIGHT_ACCURACIES = [
    HEAD + """
        from fractions import Fraction
        return Fraction(int(total(sum(map(hit, mine)))), n)
    """,
    HEAD + """
        loader = DataLoader(torch.utils.data.Subset(dataset, mine), batch_size=3)
        hits = torch.tensor(0)
        for x, y in loader:
            hits += (model(x).argmax(1) == y).sum()
        dist.all_reduce(hits)
        return hits / n
    """,
    HEAD + """
        keep = padded[: len(mine)]
        everyone = [None] * world
        dist.all_gather_object(everyone, [hit(i) for i in keep])
        flat = sum(everyone, [])
        return torch.tensor([sum(flat) / len(flat)])
    """,
    HEAD + """
        block = range(n * rank // world, n * (rank + 1) // world)
        return total(sum(map(hit, block))) / total(len(block))
    """,
]  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize("mutant", WRONG_ACCURACIES, ids=str)
def test_wrong_accuracies_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    Mutant(mutant.name, HEAD + "        " + mutant.source + "\n", mutant.says).meets(check.accuracy)


def test_right_accuracies_pass(pool: nbddp.Pool) -> None:
    assert check.accuracy(solution("06", "accuracy"))
    for source in RIGHT_ACCURACIES:
        assert check.accuracy(defined(source, "accuracy")), source
    assert "still to be written" in check.accuracy(exercise("06", "accuracy")).line


@pytest.mark.parametrize("ranks", range(2, 9))
def test_no_wrong_way_of_counting_is_right_in_all_sets(ranks: int) -> None:
    def wrong(right: tuple[bool, ...]) -> dict[str, float]:
        n = len(right)
        plain = [list(range(n))[r::ranks] for r in range(ranks)]
        padded, dropped = (shares(n, ranks, shuffle=False, drop_last=d) for d in (False, True))
        return {
            "padded": pooled(right, padded),
            "dropped": pooled(right, dropped),
            "mean of means": sum(pooled(right, [p]) for p in plain) / ranks,
            "padded hits": sum(right[s] for p in padded for s in p) / n,
        }

    sets = sets_for(ranks)
    for way in wrong(sets[0]):
        assert any(not near(wrong(s)[way], pooled(s, [range(len(s))])) for s in sets), way
    for right in sets:
        n, reads = len(right), [list(range(len(right)))[r::ranks] for r in range(ranks)]
        assert judge_accuracy(right, {r: (sum(right) / n, reads[r]) for r in range(ranks)}) == "ok"


# -- epochs_of -------------------------------------------------------------------------------

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
WRONG_EPOCHS = [
    Mutant("untold", "return [epoch(sampler) for e in es]", "all epochs are shuffled alike: call sampler.set_epoch"),
    Mutant("too late", "return [(epoch(sampler), sampler.set_epoch(e))[0] for e in es]", "set_epoch comes too late"),
    Mutant("always 1", "return [(sampler.set_epoch(1), epoch(sampler))[1] for e in es]", "are shuffled alike"),
    Mutant("every other", "return [(sampler.set_epoch((e + 1) // 2), epoch(sampler))[1] for e in es]",
           "epoch 2 is the same as epoch 1: call sampler.set_epoch(epoch) with every epoch's own number"),
    Mutant("new sampler each", "return [epoch(DistributedSampler(dataset)) for e in es]", "are shuffled alike"),
    Mutant("not shuffled", "return [epoch(DistributedSampler(dataset, shuffle=False)) for e in es]",
           "the samples come in the dataset's own order"),
    Mutant("own seed", "s = DistributedSampler(dataset, seed=rank)\n"
           "        return [(s.set_epoch(e), epoch(s))[1] for e in es]",
           "the ranks must shuffle alike, with the same seed and the same epoch"),
    Mutant("own randperm", "return [torch.randperm(n).tolist()[rank::world][:6] for e in es]", "must shuffle alike"),
    Mutant("no sampler", "return [epoch(None, shuffle=True) for e in es]",
           "epoch 0: ranks 0–1 read all 13 samples; a DistributedSampler, passed to the DataLoader"),
    Mutant("same samples", "own = list(range(n))[:-1][rank::world]\n"
           "        return [[own[i] for i in all_of(e, len(own))] for e in es]",
           "rank 0 reads the same samples in every epoch, only in another order"),
    Mutant("unequal", "return [all_of(e)[rank::world] for e in es]",
           "epoch 0: rank 0 reads 7 samples and rank 1 6: with DDP rank 0 would wait forever in its last step"),
    Mutant("a part", "return [all_of(e)[rank::world][:3] for e in es]", "7 of 13 samples are read by no rank"),
    Mutant("one growing list", "read = []\n        for e in es:\n"
           "            sampler.set_epoch(e); read += epoch(sampler)\n"
           "        return [read for e in es]", "all epochs are the same list, which grows"),
    Mutant("all rank 0", "return [epoch(DistributedSampler(dataset, world, 0, seed=e)) for e in es]",
           "epoch 0: all ranks read the same samples; the sampler's rank must be"),
    Mutant("world size 1", "return [epoch(DistributedSampler(dataset, 1, rank)) for e in es]",
           "rank 1 raised ValueError: Invalid rank; num_replicas is the world size"),
    Mutant("one of each batch", "return [(sampler.set_epoch(e), epoch(sampler)[::2])[1] for e in es]",
           "6 of 13 samples are read by no rank; at most 1"),
    Mutant("its own epoch", "return [(sampler.set_epoch(e + rank), epoch(sampler))[1] for e in es]", "the same epoch"),
    Mutant("yields", "yield epoch(sampler)", "got <generator object epochs_of>"),
    Mutant("one epoch", "return [epoch(sampler)]", "rank 0: return a list of 4 lists, one for each epoch; got a"),
    Mutant("batches", "return [list(DataLoader(dataset, 2, sampler=sampler)) for e in es]", "a list for each batch"),
    Mutant("not samples", "return [[n + 1] for e in es]", "contains values that are not samples; the samples are 0–12"),
    Mutant("numbers", "return list(es)", "epoch 0 is 0; it must be a list of the samples"),
    Mutant("one rank", "return [epoch(sampler) for e in es] if rank == 0 else None", "rank 1: return a list of 4"),
    Mutant("unwritten", "...", "still to be written"),
]  # fmt: skip
RIGHT_EPOCHS = [
    LOOP + "        return tuple(torch.tensor(epoch(DistributedSampler(dataset, seed=e))) for e in es)\n",
    LOOP + """
        s = DistributedSampler(dataset, seed=5, drop_last=True)
        out = []
        for e in es:
            s.set_epoch(10 * e)
            out.append(epoch(s))
        return out
    """,
    LOOP + """
        out = []
        for e in es:
            order = all_of(e)
            order += order[: -n % world]
            out.append(order[rank::world])
        return out
    """,
    LOOP + "        return [epoch(DistributedSampler(dataset, seed=e)) for e in es]\n",
]  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize("mutant", WRONG_EPOCHS, ids=str)
def test_wrong_epochs_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    Mutant(mutant.name, LOOP + "        " + mutant.source + "\n", mutant.says).meets(check.epochs_of)


def test_right_epochs_pass(pool: nbddp.Pool) -> None:
    assert check.epochs_of(solution("06", "epochs_of"))
    for source in RIGHT_EPOCHS:
        assert check.epochs_of(defined(source, "epochs_of")), source
    assert "still to be written" in check.epochs_of(exercise("06", "epochs_of")).line
