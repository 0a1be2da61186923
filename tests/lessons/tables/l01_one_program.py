"""Lesson 01: answers to its exercises, wrong and right."""

from __future__ import annotations

from tests.lessons.tables import Table, within

SHARE_OF = Table("share_of", within("def share_of(items, rank, size):\n    ..."), wrong={
    "return items": "every rank takes all of them, so the work is done 4 times",
    "n = len(items) // size; return items[rank * n : rank * n + n]":
        "7 items on 3 ranks: no rank takes 'g'; 7 is not a multiple of 3",
    "n = len(items) // size\n    return items[rank * n :] if rank == size - 1 else items[rank * n : rank * n + n]":
        "11 items on 4 ranks: rank 3 takes 5 and rank 0 2",
    "return items[rank + 1 :: size]": "no rank takes 'a'; ranks are counted from 0",
    "n = len(items) // size; return items[rank * n : rank * n + n + 1]":
        "'c' is taken by ranks 0–1; each item belongs to one rank",
    "return items[rank::size] * 2": "'a' is taken by rank 0 twice",
    "return list(range(rank, len(items), size))": "return the items, not their positions",
    "return items[rank : rank + 1]": "no rank takes 'e', 'f', 'g', 'h'",
    "return len(items) // size": "is 2; return a list of items",
    "import os; return items[int(os.environ['RANK']) :: size]": "not on the rank",
    "return items[rank::4]": "right for 4 ranks only; use world_size",
    "return items[2 * rank : 2 * rank + 2]": "two items per rank; the number follows",
    "return items[rank * size : (rank + 1) * size]": "has about len(items)",
    "return items[rank:size]": "items[a::step], with two colons, is every step-th",
    "return [items[r::size] for r in range(size)]": "the share of this one rank, not a list",
    "if rank < 2: return items[rank::size]":
        "share_of(['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'], 2, 4) is None; here the function ends without a value",
    "n = len(items) / size; return items[rank * n : rank * n + n]": "; / gives a float, // a whole",
    "return items[int(input()) :: size]": "EOF when reading a line (line 2, in share_of); input() does not work on a",
    "def share_of(items, rank): return items[rank::4]": "; keep the arguments as the lesson has",
    "yield from items[rank::size]": "is <generator object share_of>; return a list",
    "import random; return random.sample(items, 2)": "or on random numbers",
    "import numpy; numpy.random.shuffle(items); return items[rank::size]": "or on random numbers",
    "n = -(-len(items) // size); return items[rank * n : rank * n + n]": "shares may differ by at most one item",
    "import torch.distributed as dist; dist.barrier()": "no communication is needed",
}, right=[
    "return [item for i, item in enumerate(items) if i % size == rank]",
    "n, rest = divmod(len(items), size)\n    start = rank * n + min(rank, rest)\n"
    "    return items[start : start + n + (rank < rest)]",
    "return items[len(items) * rank // size : len(items) * (rank + 1) // size]",
])  # fmt: skip
