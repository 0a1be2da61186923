"""Lesson 06: an accuracy that counts every sample once, and epochs that are shuffled anew.

Both are run on real ranks in a process group, over data that note who reads what. The judging is pure: what the ranks
returned and read → the line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from math import isnan
from typing import Any, cast

from nbddp.errors import several
from nbddp.launch.topology import rank_words
from nbddp.lessons.framework.answer import OK, Exercise, Wrong, mismatch, not_written
from nbddp.lessons.framework.run_check import grouped, in_world, pool, this_screen, world_sizes
from nbddp.lessons.l06_samples import on_rank
from nbddp.lessons.l06_samples.simulation import pooled, repeated
from nbddp.output.screens import Screen

NEAR = 1e-5  # counts are small, so float32 is exact but for the division
EPOCHS = 4
ONCE = (
    "every sample is read once, so check what counts as right (model(x).argmax() == y), the sum over the ranks "
    "and the division"
)
COUNT = "count right predictions and samples over all ranks, and divide once at the end"
Found = Mapping[int, tuple[Any, Sequence[int]]]  # by rank: what was returned, the samples that were read


# -- accuracy --------------------------------------------------------------------------------


def sets_for(world_size: int) -> tuple[tuple[bool, ...], ...]:
    """Which predictions are right in the sets that are evaluated: two that cannot be dealt out evenly, one that can.

    In the first the samples that padding repeats are predicted wrong, and rank 0 is wrong throughout. In the second
    they are predicted right, and so is the last one, which equal shares leave over. No wrong way of counting is right
    in both.
    """
    w = world_size
    return (
        tuple(i >= w and i % w != 0 for i in range(4 * w + 1)),
        tuple(i < w or i % w == 1 or i == 3 * w for i in range(3 * w + 1)),
        tuple(i % 3 == 0 for i in range(2 * w)),
    )


def judge_accuracy(right: Sequence[bool], found: Found) -> str:
    """The line for one set: `right` says which of its samples are predicted right."""
    ranks = sorted(found)
    values = {r: _number(found[r][0]) for r in ranks}
    head = f"accuracy over {len(right)} samples on {len(ranks)} ranks"
    for r in ranks:
        if values[r] is None:
            got = found[r][0]
            return f"{head}: rank {r} returned {got!r}; " + (
                "every rank must return it, and all_reduce gives all of them the sums"
                if got is None else "return a number from 0 to 1"
            )  # fmt: skip
    reads = [[s for s, _ in groupby(found[r][1])] for r in ranks]  # dataset[i][0], dataset[i][1] is one reading
    numbers = [v for v in values.values() if v is not None]
    if all(near(v, pooled(right, [range(len(right))])) for v in numbers):
        return _shared(head, right, reads)
    if not all(near(v, numbers[0]) for v in numbers):
        return f"{head}: {_apart(right, reads, numbers)}"
    truth = pooled(right, [range(len(right))])
    why = why_accuracy(numbers[0], right, reads)
    why = why or (ONCE if _each_once(right, reads) else COUNT)
    return f"{head}: {mismatch(f'{truth:.3f}', f'{numbers[0]:.3f}', why)}"


def _each_once(right: Sequence[bool], reads: Sequence[Sequence[int]]) -> bool:
    return sorted(s for read in reads for s in read) == list(range(len(right)))


def _number(value: Any) -> float | None:
    """A number, also one in a list of one, as a tensor with one element becomes."""
    while isinstance(value, list) and len(value) == 1:
        (value,) = value
    return float(value) if type(value) in (int, float) else None


def near(a: float, b: float) -> bool:
    return abs(a - b) <= NEAR or (isnan(a) and isnan(b))


def _shared(head: str, right: Sequence[bool], reads: Sequence[Sequence[int]]) -> str:
    """Right numbers are ok if the ranks shared the work."""
    whole = [r for r, read in enumerate(reads) if len(set(read)) == len(right)]
    if whole and len(reads) > 1:
        return f"{head} is right, but {rank_words(whole)} read all of them; each rank must read only its share"
    return OK


def _apart(right: Sequence[bool], reads: Sequence[Sequence[int]], values: Sequence[float]) -> str:
    """Why ranks that should agree return different numbers."""
    told = f"rank 0 returned {values[0]:.3f} and rank 1 {values[1]:.3f}"
    own = [pooled(right, [read]) for read in reads]
    if all(map(near, values, own)):
        return f"{told}: each is the accuracy of the rank's own samples; add up the counts of all ranks"
    if near(values[0], pooled(right, reads)):
        return f"{told}: only rank 0 has the counts of all ranks; all_reduce gives the sum to every rank, reduce to one"
    hits = sum(right[s] for read in reads for s in read)
    if all(near(v, hits / len(read)) for v, read in zip(values, reads, strict=True) if read):
        return f"{told}: the hits of all ranks are divided by the rank's own number of samples; add up both"
    if all(near(v, sum(right[s] for s in read) / len(right)) for v, read in zip(values, reads, strict=True)):
        return f"{told}: the rank's own hits are divided by the size of the whole set; add up the hits of all ranks"
    return f"{told}; it must be the same number on every rank"


def why_accuracy(value: float, right: Sequence[bool], reads: Sequence[Sequence[int]]) -> str:
    """The mistake that gives this value over these reads, or nothing."""
    n, truth = len(right), pooled(right, [range(len(right))])
    own = [pooled(right, [read]) for read in reads]
    twice, lost = repeated(reads), sorted(set(range(n)) - {s for read in reads for s in read})
    hits = sum(right[s] for read in reads for s in read)
    again = _again(twice, reads)
    if lost == list(range(n)):
        return "no rank has read any sample: dataset[i] gives one"
    if isnan(value):
        return "0 / 0 on a rank without samples; add up the counts before dividing"
    if near(value, pooled(right, reads)):
        if twice:
            return f"{again} and counted each time; count every sample once"
        why = "(drop_last?)" if len(lost) < len(reads) else "(does the loop end too early?)"
        return f"{several('sample', lost)} {_is(lost)} read by no rank {why}" if lost else ""
    if near(value, sum(own) / len(own)):
        sizes = f"{max(map(len, reads))} and {min(map(len, reads))} samples"
        return f"that is the mean of the ranks' accuracies, and ranks have {sizes}; add up the counts, then divide"
    if near(value, sum(own)):
        return "that is the sum of the ranks' accuracies; add up the counts, then divide"
    if twice and near(value, hits / n):
        return f"{again} and a hit there counts twice, while the divisor counts every sample once"
    if lost and near(value, hits / n):
        return f"{several('sample', lost)} {_is(lost)} read by no rank, while the divisor counts every sample"
    return next((words for v, words in _slips(truth, hits, len(reads)) if near(value, v)), "")


def _again(twice: Sequence[int], reads: Sequence[Sequence[int]]) -> str:
    """Who read the samples that were read more than once; empty if none were."""
    if not twice:
        return ""
    head = f"{several('sample', twice)} {_is(twice)} read"
    if repeated([sorted(set(read)) for read in reads]):
        return f"{head} by more than one rank (DistributedSampler pads)"
    return f"{head} more than once by one rank"


def _slips(truth: float, hits: int, world_size: int) -> list[tuple[float, str]]:
    return [
        (1 - truth, "that is the share of wrong predictions"),
        (100 * truth, "that is a percentage; return a number from 0 to 1"),
        (truth / world_size, "the counts are divided by the world size once too often"),
        (truth * world_size, "the hits are summed over the ranks, the number of samples is not"),
        (hits, "that is the number of right predictions; divide by the number of samples"),
        *((round(truth, digits), "it is rounded; return it unrounded") for digits in (1, 2, 3, 4)),
        (0.0, "0: did // or int() round a fraction down?"),
    ]


def accuracy_line(function: Any) -> str:
    """Run the learner's evaluation on all ranks, then on all but the last, and judge it."""
    screen = this_screen()
    with grouped():
        runs = ((right, _evaluated(function, right, n, screen)) for n in world_sizes() for right in sets_for(n))
        return next((line for right, found in runs if (line := judge_accuracy(right, found)) != OK), OK)


def _evaluated(function: Any, right: Sequence[bool], size: int, screen: Screen) -> Found:
    """Raises Wrong if the function is unwritten."""
    found = in_world(size, on_rank.evaluated, function, right, screen=screen)
    if all(value is None for value, _ in found.values()):
        raise Wrong(not_written("accuracy"))
    return found


# -- epochs ----------------------------------------------------------------------------------


def judge_epochs(samples: int, by_rank: Mapping[int, object]) -> str:
    """The line for what each rank says it read: a list of samples for each of EPOCHS epochs."""
    ranks = sorted(by_rank)
    if all(by_rank[r] is None for r in ranks):
        return not_written("epochs_of")
    for r in ranks:
        wrong = _shape(by_rank[r], samples)
        if wrong:
            return f"rank {r}: {wrong}"
    read = cast(Mapping[int, list[list[int]]], by_rank)
    epochs = [[read[r][e] for r in ranks] for e in range(EPOCHS)]
    if all(e == epochs[0] for e in epochs) and len(epochs[0][0]) > samples / len(ranks) * (EPOCHS - 1):
        return "all epochs are the same list, which grows; start a new list in each epoch"
    for e, shares in enumerate(epochs):
        wrong = why_shares(samples, shares)
        if wrong:
            return f"epoch {e}: {wrong}"
    return why_order(epochs) or OK


def _shape(answer: Any, samples: int) -> str:
    if not isinstance(answer, list) or len(answer) != EPOCHS:
        got = f"a list of {len(answer)}" if isinstance(answer, list) else repr(answer)
        return f"return a list of {EPOCHS} lists, one for each epoch; got {got}"
    for e, read in enumerate(answer):
        if not isinstance(read, list):
            return f"epoch {e} is {read!r}; it must be a list of the samples that were read"
        odd = next((s for s in read if type(s) is not int), None)
        if isinstance(odd, list):
            return f"epoch {e} contains a list for each batch; put the samples of all batches into one list"
        if odd is not None or any(not 0 <= s < samples for s in read):
            return f"epoch {e} contains values that are not samples; the samples are 0–{samples - 1}"
    return ""


def why_shares(samples: int, shares: Sequence[Sequence[int]]) -> str:
    """What is wrong with the shares of one epoch, or nothing. Padding and drop_last are both allowed."""
    world_size = len(shares)
    whole = [r for r, read in enumerate(shares) if len(set(read)) == samples]
    if whole:
        given = "a DistributedSampler, passed to the DataLoader as sampler=..., gives each rank its share"
        return f"{rank_words(whole)} read all {samples} samples; {given}"
    if all(list(read) == list(shares[0]) for read in shares[1:]):
        return "all ranks read the same samples; the sampler's rank must be the process's own"
    reads = Counter(s for read in shares for s in read)
    missing, over = samples - len(reads), sum(reads.values()) - len(reads)
    enough = sum(reads.values()) > samples - world_size
    if over and (over >= world_size or (missing and enough)):
        s = min(s for s, n in reads.items() if n > 1)
        on = [r for r, read in enumerate(shares) if s in read]
        lost = f", and {missing} of {samples} by none" if missing else ""
        alike = "the ranks must shuffle alike, with the same seed and the same epoch"
        return f"sample {s} is read by {rank_words(on)}{lost}: {alike}"
    if missing >= world_size:
        return f"{missing} of {samples} samples are read by no rank; at most {world_size - 1} may be left over"
    lengths = [len(read) for read in shares]
    if max(lengths) != min(lengths):
        long, short = lengths.index(max(lengths)), lengths.index(min(lengths))
        return (
            f"rank {long} reads {max(lengths)} samples and rank {short} {min(lengths)}: with DDP rank {long} would "
            "wait forever in its last step; pad or drop, as DistributedSampler does"
        )
    return ""


def why_order(epochs: Sequence[Sequence[Sequence[int]]]) -> str:
    """What is wrong with the order from epoch to epoch, or nothing."""
    same = [e for e in range(1, len(epochs)) if epochs[e] == epochs[e - 1]]
    if len(same) == len(epochs) - 1:
        if all(list(read) == sorted(read) for read in (share[:-1] for share in epochs[0])):
            return "all epochs: the samples come in the dataset's own order; use the sampler's shuffle=True"
        return "all epochs are shuffled alike: call sampler.set_epoch(epoch) before each"
    if same == [1]:
        return "epoch 1 is the same as epoch 0: set_epoch comes too late; call it before the loader is iterated"
    if same:
        told = "call sampler.set_epoch(epoch) with every epoch's own number"
        return f"epoch {same[0]} is the same as epoch {same[0] - 1}: {told}"
    if all(set(share) == set(first) for epoch in epochs[1:] for share, first in zip(epoch, epochs[0], strict=True)):
        return (
            "rank 0 reads the same samples in every epoch, only in another order: shuffle all samples before you "
            "divide them among the ranks"
        )
    return ""


def epochs_line(function: Any) -> str:
    """Run the learner's epochs on all ranks, then on all but the last if there are others, and judge them."""
    with grouped():
        for size in filter(lambda n: n > 1, world_sizes()):
            samples = 6 * size + 1
            line = judge_epochs(samples, in_world(size, on_rank.epochs, function, samples, EPOCHS))
            if line != OK:
                return line if size == pool().world_size else f"on {size} ranks: {line}"
    return OK


def _is(some: Sequence[int]) -> str:
    return "is" if len(some) == 1 else "are"


accuracy = Exercise(
    "accuracy",
    accuracy_line,
    verifies="every sample counts once on real ranks, on all of them and on one fewer",
)
epochs_of = Exercise(
    "epochs_of",
    epochs_line,
    verifies=f"{EPOCHS} epochs on real ranks: each has its own share, shuffled again in every epoch",
)
