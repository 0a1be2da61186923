"""Lesson 08: where buckets end, and how long a step waits for its exchange.

Both are arithmetic, judged by tables. The sizes are small whole numbers, so that a learner can follow a wrong answer
by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nbddp.lessons.framework.answer import Exercise
from nbddp.lessons.framework.run_check import judged_by
from nbddp.lessons.framework.tables import Case, TableExercise
from nbddp.lessons.l08_buckets_and_overlap import simulation

Spans = Sequence[tuple[int, int]]

PACK_CASES: tuple[Case, ...] = (
    ([2, 2, 2, 2], 2, 4),
    ([8, 1, 3, 1, 1], 1, 4),
    ([3, 3, 3, 3, 1], 1, 5),
    ([1, 1, 1, 1, 1, 1, 1], 3, 2),
    ([2, 9, 2, 4], 5, 5),
    ([7], 1, 25),
)


def packed(sizes: Sequence[int], first: int, cap: int) -> list[list[int]]:
    """The right answer: buckets of positions among the parameters, in the order in which they are sent."""
    last = len(sizes) - 1
    return [[last - i for i in some] for some in simulation.pack(list(reversed(sizes)), first, cap)]


def cut(sizes: Sequence[int], first: int, cap: int, order: Sequence[int], full: Callable[[int, int], bool]) -> Any:
    """Buckets of `order` that close when `full(held, limit)` is true; for wrong ways to do it."""
    made: list[list[int]] = [[]]
    held, limit = 0, first
    for i in order:
        made[-1].append(i)
        held += sizes[i]
        if full(held, limit):
            made.append([])
            held, limit = 0, cap
    return [some for some in made if some]


def never_over(sizes: Sequence[int], first: int, cap: int, empty: bool = False) -> list[list[int]]:
    """A gradient that would not fit goes into the next bucket; with `empty` also where this one holds nothing."""
    made: list[list[int]] = [[]]
    held, limit = 0, first
    for i in reversed(range(len(sizes))):
        if (made[-1] or empty) and held + sizes[i] > limit:
            made.append([])
            held, limit = 0, cap
        made[-1].append(i)
        held += sizes[i]
    return made


def never_reset(sizes: Sequence[int], first: int, cap: int) -> list[list[int]]:
    """What a bucket holds is not counted from 0 again."""
    made: list[list[int]] = [[]]
    held, limit = 0, first
    for i in reversed(range(len(sizes))):
        made[-1].append(i)
        held += sizes[i]
        if held >= limit:
            made.append([])
            limit = cap
    return [some for some in made if some]


def growing(sizes: Sequence[int], first: int, cap: int) -> list[list[int]]:
    """The limit is not set to cap, but cap is added to it."""
    made: list[list[int]] = [[]]
    held, limit = 0, first
    for i in _backwards(sizes):
        made[-1].append(i)
        held += sizes[i]
        if held >= limit:
            made.append([])
            held, limit = 0, limit + cap
    return [some for some in made if some]


def with_an_empty_one(sizes: Sequence[int], first: int, cap: int) -> list[list[int]]:
    """A new bucket is begun after the last gradient, too."""
    made = packed(sizes, first, cap)
    return [*made, []] if _closed(sizes, first, cap) else made


def without_the_rest(sizes: Sequence[int], first: int, cap: int) -> list[list[int]]:
    """A last bucket that never reached its limit is lost."""
    made = packed(sizes, first, cap)
    return made if _closed(sizes, first, cap) else made[:-1]


def _closed(sizes: Sequence[int], first: int, cap: int) -> bool:
    """Whether the last bucket reached its limit."""
    made = packed(sizes, first, cap)
    return sum(sizes[i] for i in made[-1]) >= (first if len(made) == 1 else cap)


def _backwards(sizes: Sequence[int]) -> list[int]:
    return list(reversed(range(len(sizes))))


def why_not_these_buckets(case: Case, answer: Any) -> str:
    """What cannot be about the buckets that were answered."""
    sizes = case[0]
    if not (isinstance(answer, list) and all(isinstance(some, list) for some in answer)):
        return "return a list of buckets, each a list of positions in sizes"
    flat = [i for some in answer for i in some]
    wanted = list(range(len(sizes)))
    if sorted(map(repr, flat)) != sorted(map(repr, wanted)):
        return _not_once(sizes, answer, flat)
    if flat == wanted and len(flat) > 1:
        return "the gradient of the last parameter comes first"
    return ""


def _not_once(sizes: Sequence[int], answer: Sequence[list[Any]], flat: Sequence[Any]) -> str:
    """Why these are not all positions, each once."""
    once = f"every parameter is in exactly one bucket: the positions 0 to {len(sizes) - 1}, each once"
    if len(answer) > 1 and answer[0] and all(some == answer[0] for some in answer):
        return f"{once}; this is the same list several times: create a new one with [] instead of emptying it"
    if flat == list(reversed(sizes)):
        return f"{once}; these are the sizes themselves"
    missing = next((i for i in range(len(sizes)) if i not in flat), None)
    return once if missing is None else f"{once}; position {missing} is missing"


PACK = TableExercise(
    "pack",
    PACK_CASES,
    packed,
    {
        "these buckets go from the first parameter to the last; backward starts at the loss, so the gradient "
        "of the last parameter comes first": lambda sizes, first, cap: cut(
            sizes, first, cap, range(len(sizes)), lambda held, limit: held >= limit
        ),
        "the buckets are right, but the positions are counted in the reversed list; position 0 is the first of "
        "sizes": lambda sizes, first, cap: simulation.pack(list(reversed(sizes)), first, cap),
        "the buckets are right, but within a bucket the gradient of the later parameter comes first": (
            lambda sizes, first, cap: [sorted(some) for some in packed(sizes, first, cap)]
        ),
        "the buckets are right, but in reverse order; the bucket that is sent first comes first": (
            lambda sizes, first, cap: packed(sizes, first, cap)[::-1]
        ),
        "this counts gradients; the limit applies to the sum of their sizes": lambda sizes, first, cap: packed(
            [1] * len(sizes), first, cap
        ),
        "this adds positions; the limit applies to the sum of the sizes": lambda sizes, first, cap: packed(
            range(len(sizes)), first, cap
        ),
        "a bucket that exceeds its limit is full too: >=, not ==": lambda sizes, first, cap: cut(
            sizes, first, cap, _backwards(sizes), lambda held, limit: held == limit
        ),
        "this adds cap to the limit with every bucket; from the second bucket on the limit is cap": (
            lambda sizes, first, cap: growing(sizes, first, cap)
        ),
        "these buckets never exceed their limit, and one may be empty; DDP closes a bucket after the gradient that "
        "reaches the limit": lambda sizes, first, cap: never_over(sizes, first, cap, empty=True),
        "these buckets never exceed their limit; DDP closes a bucket after the gradient that reaches the limit, "
        "and that gradient may exceed it": never_over,
        "a bucket that holds exactly its limit is full: >=, not >": lambda sizes, first, cap: cut(
            sizes, first, cap, _backwards(sizes), lambda held, limit: held > limit
        ),
        "the limit is `first` for every bucket here; from the second bucket on it is cap": lambda sizes, first, cap: (
            packed(sizes, first, first)
        ),
        "the limit is `cap` for the first bucket too; the first bucket's limit is `first`": lambda sizes, first, cap: (
            packed(sizes, cap, cap)
        ),
        "the last gradients are in no bucket: a bucket that never fills is sent too, when backward is over": (
            without_the_rest
        ),
        "the last bucket is empty; open a bucket only when there is a gradient for it": with_an_empty_one,
        "reset the running sum to 0 when you open a new bucket": never_reset,
        "this is one bucket per gradient, as if the limits were 0": lambda sizes, first, cap: [
            [i] for i in _backwards(sizes)
        ],
        "this is one bucket for all gradients; a bucket closes when it reaches its limit": lambda sizes, first, cap: [
            _backwards(sizes)
        ],
    },
    why_not_these_buckets,
)

EXPOSED_CASES: tuple[Case, ...] = (
    (20, [(5, 9), (12, 18), (20, 26)]),  # a usual step
    (20, [(5, 15), (10, 24), (18, 23)]),  # two on their way at once, and the last is not the last to be done
    (30, [(5, 9), (9, 20), (28, 29)]),  # all behind backward
    (10, [(10, 17)]),  # one bucket
    (12, [(3, 14), (12, 14), (11, 13)]),  # two end together
    (15, [(6, 17), (9, 21), (14, 19)]),  # neither the first that ends late nor the last is the last to be done
    (8, []),  # no_sync
)


def exposed_time(backward_end: int, spans: Spans) -> int:
    """The right answer. A bucket is sent before backward ends, so what is left then goes on without a gap."""
    return max([0, *(done - backward_end for _, done in spans)])


def _whole(spans: Spans) -> int:
    """Time in which at least one bucket is on its way."""
    total, reached = 0, 0
    for sent, done in sorted(spans):
        total += max(0, done - max(sent, reached))
        reached = max(reached, done)
    return total


def why_not_this_time(case: Case, answer: Any) -> str:
    """What can be said of one answer, where the others tell of no single mistake."""
    end, spans = case
    if type(answer) not in (int, float):
        return "return a number, in the units of the trace"
    right = exposed_time(end, spans)
    if answer < 0:
        turned = answer == -right
        return "the sign is reversed" if turned else "a time is never negative"
    if right == 0:
        return "all buckets are done before backward ends, so nothing is exposed"
    if answer == spans[-1][1] - end:
        return "that is the end of the bucket that was sent last; the step waits until all are done"
    if answer == right / sum(done - sent for sent, done in spans):
        return "that is a share of the exchange; return the time"
    return ""


EXPOSED = TableExercise(
    "exposed",
    EXPOSED_CASES,
    exposed_time,
    {
        "buckets in flight at the same time are counted twice; the step waits for them together": lambda end, spans: (
            sum(max(0, done - end) for _, done in spans)
        ),
        "that is the end of the bucket that was sent last; the step waits until all are done": lambda end, spans: (
            max(0, spans[-1][1] - end) if spans else 0
        ),
        "that is the end of the first bucket that ends after backward; the step waits until all are done": (
            lambda end, spans: next((done - end for _, done in spans if done > end), 0)
        ),
        "that is the first bucket alone; is there a return inside the loop?": lambda end, spans: (
            max(0, spans[0][1] - end) if spans else None
        ),
        "that is the end of the bucket that is done first; the step waits until all are done": lambda end, spans: max(
            0, min((done for _, done in spans), default=0) - end
        ),
        "that counts only buckets that were sent after backward; one that was sent earlier may still be in flight": (
            lambda end, spans: sum(done - sent for sent, done in spans if sent >= end)
        ),
        "that is the longest bucket's time; what backward hides of it costs no time": lambda end, spans: max(
            (done - sent for sent, done in spans), default=0
        ),
        "that counts from when the first bucket was sent; what backward hides costs no time": lambda end, spans: (
            max((d for _, d in spans), default=0) - min((s for s, _ in spans), default=0)
        ),
        "it is negative when all buckets are done before backward ends; nothing is exposed then": lambda end, spans: (
            max([done - end for _, done in spans], default=0)
        ),
        "that is all the time with a bucket in flight; the part before backward ends costs no time": (
            lambda end, spans: _whole(spans)
        ),
        "that is the sum of the buckets' times; what backward hides costs no time": lambda end, spans: sum(
            done - sent for sent, done in spans
        ),
        "that is the hidden part; the exposed part is what remains after backward": lambda end, spans: (
            _whole(spans) - exposed_time(end, spans)
        ),
        "that counts a bucket that ends after backward from its start; the step waits only from backward_end on": (
            lambda end, spans: sum(done - sent for sent, done in spans if done > end)
        ),
        "that is when the last bucket is done; the step waits from backward_end on": lambda end, spans: max(
            [done for _, done in spans], default=0
        ),
    },
    why_not_this_time,
    exact=False,
)

pack = Exercise(
    "pack",
    judged_by(PACK),
    verifies=f"{len(PACK_CASES)} lists of gradients, on every rank of the pool",
)
exposed = Exercise(
    "exposed",
    judged_by(EXPOSED),
    verifies=f"{len(EXPOSED_CASES)} steps, on every rank of the pool",
)
