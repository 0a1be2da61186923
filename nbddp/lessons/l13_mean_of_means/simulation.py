"""Lesson 13's explorer: the weight of a token in the gradient, by the divisor of the ranks' losses.

Two ranks with two micro-batches each. DDP averages over ranks, so a rank's gradients count 1/2; what a token counts
within its rank depends on the divisor. Also Kish's effective sample size (Survey Sampling, 1965, section 11.7). The
mean of (Σw)² / Σw² equally weighted samples has the variance of the weighted mean. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nbddp.errors import counted

MEANS = "tokens of the micro-batch × micro-batches"
RANK = "tokens of the rank"
ALL = "tokens of all ranks / world size"
RULES = (MEANS, RANK, ALL)
CLOSE = 1e-9


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch. weight: what one of its tokens counts in the averaged gradient; all tokens' weights add up to 1.
    relative: the same, where 1 is right."""

    rank: int
    number: int  # within the rank, from 1
    tokens: int
    weight: float
    relative: float

    @property
    def name(self) -> str:
        return f"rank {self.rank}, micro-batch {self.number}"

    @property
    def share(self) -> float:
        """What all its tokens count."""
        return self.tokens * self.weight


@dataclass(frozen=True)
class Weighed:
    """tokens: by rank, of each micro-batch; rule: one of RULES, what a loss is divided by."""

    tokens: tuple[tuple[int, ...], ...]
    rule: str

    @property
    def total(self) -> int:
        return sum(map(sum, self.tokens))

    @property
    def blocks(self) -> tuple[MicroBatch, ...]:
        return tuple(self._blocks())

    def _blocks(self) -> Iterator[MicroBatch]:
        ranks = len(self.tokens)
        for rank, counts in enumerate(self.tokens):
            for i, n in enumerate(counts):
                weight = 1 / (ranks * self._divisor(counts, n))
                yield MicroBatch(rank, i + 1, n, weight, weight * self.total)

    def _divisor(self, counts: Sequence[int], n: int) -> float:
        by = {MEANS: n * len(counts), RANK: sum(counts), ALL: self.total / len(self.tokens)}
        return float(by[self.rule])

    @property
    def moved(self) -> float:
        """The part of the weight that lies on other tokens than it should."""
        return sum(b.tokens * abs(b.weight - 1 / self.total) for b in self.blocks) / 2

    @property
    def effective(self) -> float:
        """How many equally weighted tokens have a mean with as much variance."""
        return 1 / sum(b.tokens * b.weight**2 for b in self.blocks)

    @property
    def even(self) -> bool:
        return all(abs(b.relative - 1) < CLOSE for b in self.blocks)

    def head(self) -> str:
        return f"{self.total} tokens on {counted(len(self.tokens), 'rank')}; each should count 1/{self.total}"

    def verdict(self) -> str:
        if self.even:
            return "every token counts the same"
        most, least = (pick(self.blocks, key=lambda b: b.weight) for pick in (max, min))
        return (
            f"a token of {most.name} counts {most.weight / least.weight:.3g} times as much as one of {least.name}; "
            f"{self.moved:.0%} of the weight is on the wrong tokens, and {self.total} tokens reduce noise as "
            f"{self.effective:.1f} equal ones would"
        )

    def describe(self) -> str:
        lines = [self.head(), f"each loss is divided by: {self.rule}"]
        for b in self.blocks:
            what = f"{counted(b.tokens, 'token')}, each counts {b.relative:.2f} × 1/{self.total}"
            lines.append(f"{b.name}: {what}, together {b.share:.0%}")
        return "\n".join([*lines, self.verdict()])


def weighed(first: int = 8, second: int = 8, other_first: int = 8, other_second: int = 8, rule: str = MEANS) -> Weighed:
    """first, second: tokens of rank 0's micro-batches; other_first, other_second: of rank 1's."""
    return Weighed(((first, second), (other_first, other_second)), rule)
