"""Lesson 06's explorer: which rank reads which sample in which epoch, by the arithmetic of DistributedSampler.

Also what an evaluation over padded shares would say. Pure: imports only the standard library and
`nbddp.launch.machine`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nbddp.errors import counted, several

TOLD, UNTOLD, STRAIGHT = "shuffled, set_epoch", "shuffled, no set_epoch", "shuffle=False"
PADDED, DROPPED = "padded", "drop_last=True"
EPOCHS = 4  # epochs in the grid
STATE = 624  # words of a Mersenne twister's state


def randperm(n: int, seed: int) -> list[int]:
    """The permutation of torch.randperm(n, generator=torch.Generator().manual_seed(seed)), without torch.

    Both are a Mersenne twister (MT19937) under Fisher-Yates' shuffle. Python seeds its own in another way (by an
    array), so the state is filled as Matsumoto and Nishimura's init_genrand does, which is torch's way.
    """
    words = [seed & 0xFFFFFFFF]
    for i in range(1, STATE):
        words.append((1812433253 * (words[-1] ^ words[-1] >> 30) + i) & 0xFFFFFFFF)
    twister = random.Random()
    twister.setstate((3, (*words, STATE), None))
    order = list(range(n))
    for i in range(n - 1):
        other = i + twister.getrandbits(32) % (n - i)
        order[i], order[other] = order[other], order[i]
    return order


def shares(
    n: int, world_size: int, *, shuffle: bool = True, seed: int = 0, epoch: int = 0, drop_last: bool = False
) -> list[list[int]]:
    """The samples of each rank in reading order, as DistributedSampler of torch 2 gives them; `n` is at least 1.

    All shares are equally long: the order is filled up from its own beginning, or cut at its end (drop_last).
    """
    order = randperm(n, seed + epoch) if shuffle else list(range(n))
    each = n // world_size if drop_last else -(-n // world_size)
    filled = [order[i % n] for i in range(each * world_size)]
    return [filled[rank::world_size] for rank in range(world_size)]


@dataclass(frozen=True)
class Dealt:
    """Some epochs of a dataset. `epochs[e][rank]`: the samples that the rank reads in epoch e, in reading order."""

    samples: int
    ranks: int
    order: str
    tail: str
    epochs: tuple[tuple[tuple[int, ...], ...], ...]

    def readers(self, epoch: int, sample: int) -> list[int]:
        """The ranks that read a sample in an epoch; a rank that reads it twice is there twice."""
        return [rank for rank, share in enumerate(self.epochs[epoch]) for s in share if s == sample]

    def as_before(self, epoch: int) -> bool:
        """Whether the ranks read what they read in the epoch before, in the same order."""
        return epoch > 0 and self.epochs[epoch] == self.epochs[epoch - 1]

    def never(self) -> list[int]:
        """Samples that no rank reads in any of the epochs."""
        read = {s for epoch in self.epochs for share in epoch for s in share}
        return [s for s in range(self.samples) if s not in read]

    def summary(self) -> str:
        """How many each rank reads, and what becomes of the rest."""
        each = len(self.epochs[0][0])
        reads, over = each * self.ranks, each * self.ranks - self.samples
        head = f"{counted(self.samples, 'sample')} on {counted(self.ranks, 'rank')}, {self.tail}: {each} each"
        if over > self.samples:
            return f"{head}, {reads} in all, though there {_are(self.samples)} {self.samples}"
        if over > 0:
            return f"{head}, {reads} in all; {over} of them a second time"
        if over < 0:
            lost = f"{counted(-over, 'sample')} of every epoch {_are(-over)} read by no rank"
            return f"{head}, {reads} in all; {lost}"
        return f"{head}, every sample once"

    def verdict(self) -> str:
        """What the epochs have in common."""
        never = self.never()
        lost = f"; {several('sample', never)} {_are(len(never))} never read" if never else ""
        if self.order == STRAIGHT:
            return f"shuffle=False: every epoch is read in the same order{lost}"
        if self.order == UNTOLD:
            return f"without set_epoch every epoch repeats epoch 0: the same samples, in the same order{lost}"
        return f"set_epoch(epoch) gives every epoch a new order, the same on all ranks{lost}"

    def describe(self) -> str:
        lines = [self.summary()]
        for e, epoch in enumerate(self.epochs):
            if self.as_before(e):
                lines.append(f"epoch {e}: the same as epoch {e - 1}")
                continue
            read = (f"rank {r} reads {', '.join(map(str, share)) or 'none'}" for r, share in enumerate(epoch))
            lines.append(f"epoch {e}: {'; '.join(read)}")
        return "\n".join([*lines, self.verdict()])


def dealt(samples: int = 10, ranks: int = 4, order: str = TOLD, tail: str = PADDED) -> Dealt:
    """The first EPOCHS epochs; `order` has the value TOLD, UNTOLD or STRAIGHT, `tail` is PADDED or DROPPED."""
    epochs = (
        shares(samples, ranks, shuffle=order != STRAIGHT, epoch=e * (order == TOLD), drop_last=tail == DROPPED)
        for e in range(EPOCHS)
    )
    return Dealt(samples, ranks, order, tail, tuple(tuple(tuple(s) for s in epoch) for epoch in epochs))


def pooled(right: Sequence[bool], reads: Sequence[Sequence[int]]) -> float:
    """The share of right ones among all reads of all ranks, repeats included; nan if there are none.

    right: whether the prediction for a sample is right, by sample. reads: the samples that each rank reads.
    """
    hits = [right[s] for share in reads for s in share]
    return sum(hits) / len(hits) if hits else float("nan")


def repeated(reads: Sequence[Sequence[int]]) -> list[int]:
    """Samples that are read more than once, in order."""
    times = Counter(s for share in reads for s in share)
    return sorted(s for s, n in times.items() if n > 1)


def _are(n: int) -> str:
    return "is" if n == 1 else "are"
