"""Lesson 01: each rank takes its share of the work, and together they take all of it once.

Any way to share is right that leaves nothing out, does nothing twice, and gives no rank two items more than another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbddp.launch.topology import counted, rank_words
from nbddp.lessons.framework.answer import OK, Exercise
from nbddp.lessons.framework.run_check import tabulated
from nbddp.lessons.framework.tables import Mistakes, Outcome, call, depends, nothing, raised, unwritten

NAME = "share_of"
JOBS = ((8, 4), (7, 3), (11, 4), (2, 3), (5, 1))  # items, ranks
CASES = tuple((list("abcdefghijkl"[:items]), rank, size) for items, size in JOBS for rank in range(size))
MISTAKES: Mistakes = {
    "that is right for 4 ranks only; use world_size": lambda items, rank, size: items[rank::4],
    "that is two items per rank; the number follows from len(items) and world_size": lambda items, rank, size: items[
        2 * rank : 2 * rank + 2
    ],
    "a share does not have world_size items; it has about len(items) / world_size": lambda items, rank, size: items[
        rank * size : (rank + 1) * size
    ],
    "items[a:b] is a range from a up to b; items[a::step], with two colons, is every step-th item from a on": (
        lambda items, rank, size: items[rank:size]
    ),
}


def line(by_rank: Mapping[int, Sequence[Outcome]]) -> str:
    """The answer's line, from what the function gave for CASES on every rank of the pool."""
    first = by_rank[min(by_rank)]
    early = unwritten(NAME, first) or depends(NAME, CASES, by_rank)
    if early:
        return early
    for items, size in JOBS:
        some = [(c, o) for c, o in zip(CASES, first, strict=True) if (len(c[0]), c[2]) == (items, size)]
        why = strange(some) or unfair(some[0][0][0], [o[1] for _, o in some])
        if why:
            known = next((words for words, would in MISTAKES.items() if _is(would, first)), "")
            return f"{why}; {known}" if known else why
    return OK


def _is(would: Callable[..., Any], outcomes: Sequence[Outcome]) -> bool:
    return all(value == would(*case) for case, (_, value) in zip(CASES, outcomes, strict=True))


def strange(some: Sequence[tuple[tuple[Any, ...], Outcome]]) -> str:
    """What is no share at all; empty if all are lists of items."""
    for case, (kind, value) in some:
        if kind == "raised":
            return f"{call(NAME, case)} {raised(value)}"
        if not isinstance(value, list):
            return f"{call(NAME, case)} is {value!r}; {nothing(value) or 'return a list of items'}"
        if value and all(isinstance(v, list) for v in value):
            return f"{call(NAME, case)} is {value!r}; return the share of this one rank, not a list of shares"
        foreign = [v for v in value if v not in case[0]]
        if foreign:
            return f"{call(NAME, case)} has {foreign[0]!r}; return the items, not their positions"
    return ""


def unfair(items: Sequence[str], shares: Sequence[list[str]]) -> str:
    """What is wrong with the shares of all ranks together; empty if they are as they should be."""
    head = f"{counted(len(items), 'item')} on {counted(len(shares), 'rank')}: "
    if len(shares) > 1 and all(share == list(items) for share in shares):
        return f"{head}every rank takes all of them, so the work is done {len(shares)} times; choose by the rank"
    for item in items:
        takers = [r for r, share in enumerate(shares) for taken in share if taken == item]
        if len(takers) > 1:
            return f"{head}{item!r} is taken by {_and(takers)}; each item belongs to one rank"
    missing = [i for i in items if not any(i in share for share in shares)]
    if missing:
        return f"{head}no rank takes {', '.join(map(repr, missing))}{_hint(items, shares, missing)}"
    sizes = [len(share) for share in shares]
    if max(sizes) - min(sizes) > 1:
        most, least = sizes.index(max(sizes)), sizes.index(min(sizes))
        return (
            f"{head}rank {most} takes {max(sizes)} and rank {least} {min(sizes) or 'none'}; all ranks wait for the "
            "one with the most, so shares may differ by at most one item"
        )
    return ""


def _hint(items: Sequence[str], shares: Sequence[list[str]], missing: Sequence[str]) -> str:
    rest = len(items) % len(shares)
    if rest and list(missing) == list(items[-rest:]):
        return f"; {len(items)} is not a multiple of {len(shares)}, and some rank must take the rest"
    if items[0] in missing:
        return "; ranks are counted from 0, and so are items"
    return ""


def _and(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} twice" if len(set(ranks)) == 1 else rank_words(ranks)


share_of = Exercise(
    NAME,
    tabulated(CASES, line),
    verifies=f"{len(CASES)} calls on every rank: each item goes to one rank, and shares differ by one item at most",
)
