"""Lesson 04: the chunk that a rank sends in a step of the ring (on symbols), and the ring all-reduce (on tensors).

A schedule is judged by carrying it out on symbols, so every one that ends right is right, in whatever order it sends.
An all-reduce is run on four, three and two ranks, also with lengths that the ranks do not divide. Its first input is
made so that each number of the answer says how often each rank's part is in it. That shows the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from random import Random
from typing import Any

from nbddp.errors import RankStatus, RunHung, WorkerFailed
from nbddp.launch.topology import counted, rank_words
from nbddp.lessons.framework.answer import OK, Exercise, Wrong, mismatch, not_written
from nbddp.lessons.framework.async_work import Misused
from nbddp.lessons.framework.on_rank import seeded
from nbddp.lessons.framework.run_check import grouped, on_ranks, tabulated
from nbddp.lessons.framework.tables import Outcome, nothing, raised, unwritten
from nbddp.lessons.framework.worlds import make_world
from nbddp.lessons.l04_collectives.on_rank import BASE, RingSum, all_reduced
from nbddp.lessons.l04_collectives.simulation import (
    Parts,
    Schedule,
    complete,
    faults,
    follow,
    letters,
    part,
    simulate,
)
from nbddp.output.screens import NullScreen

# -- the schedule, on symbols ------------------------------------------------------------------

WORLDS = (4, 3, 2)  # most ranks first: mistakes are plainest there
CASES = tuple((rank, step, n) for n in WORLDS for rank in range(n) for step in range(2 * (n - 1)))
RULES: Mapping[str, Callable[[int, int, int], int]] = {
    "every step sends the same chunk, so nothing that arrives is ever passed on; let the chunk change with the step": (
        lambda r, s, n: r
    ),
    "that goes through the chunks in the other direction; rank - 1 sends you chunk rank - 1 first, then rank - 2": (
        lambda r, s, n: (r + s) % n
    ),
    "the second half starts over with the rank's own chunk, which is incomplete there; continue to count down": (
        lambda r, s, n: (r - s % (n - 1)) % n
    ),
    "all ranks send the same chunk; each must begin with a different one": lambda r, s, n: s % n,
    "there are world_size chunks, so take % world_size, not % (world_size - 1)": lambda r, s, n: (r - s) % (n - 1),
}
STILL = next(iter(RULES))


def judge_schedule(outcomes: Sequence[Outcome]) -> str:
    """The line for the outcome of each of CASES."""
    early = unwritten("chunk_to_send", outcomes)
    if early:
        return early
    table = {}
    for case, (kind, value) in zip(CASES, outcomes, strict=True):
        if kind != "value":
            return f"{_call(case)} {raised(value)}"
        if value is None:
            return f"{_call(case)} is None; {nothing(value)}, but each of the {2 * (case[2] - 1)} steps sends a chunk"
        if type(value) is not int or not 0 <= value < case[2]:
            return f"{_call(case)} is {value!r}, but {case[2]} ranks have chunks 0 to {case[2] - 1}" + _modulo(
                case, value
            )
        table[case] = value
    known = next((w for w, rule in RULES.items() if all(table[c] == rule(*c) for c in CASES)), "")
    known = known or (STILL if all(table[r, s, n] == table[r, 0, n] for r, s, n in CASES) else "")
    lines = (_fails(n, lambda r, s, n: table[r, s, n]) for n in WORLDS)
    line = next(filter(None, lines), "")
    return f"{line}{': ' * bool(known)}{known}" if line else OK


def _call(case: tuple[int, int, int]) -> str:
    return f"chunk_to_send{case}"


def _modulo(case: tuple[int, int, int], value: Any) -> str:
    wraps = type(value) is int and value % case[2] == follow(*case)
    return ": apply % world_size" if wraps else ""


def _fails(n: int, rule: Callable[[int, int, int], int]) -> str:
    """Where the rule first goes wrong on `n` ranks; empty if all chunks are complete in the end."""
    steps = simulate(n, Schedule(rule, n - 1, 2 * (n - 1)))
    if not any(True for _ in faults(steps[-1].after)):
        return ""
    before = tuple((part(r, n),) * n for r in range(n))
    for s, step in enumerate(steps):
        for m in step.messages:
            own = before[m.receiver][m.chunk]
            sent = f"on {n} ranks, step {s}: rank {m.sender} sends chunk {m.chunk} ({letters(m.parts)})"
            if step.adds and any(a and b for a, b in zip(own, m.parts, strict=True)):
                return f"{sent} to rank {m.receiver}, which has {letters(own)} in it already"
            if not step.adds and not complete(m.parts):
                return f"{sent}, which is incomplete, and nothing is added after this"
        before = step.after
    chunk, what, ranks = next(iter(faults(steps[-1].after)))
    return f"on {n} ranks, chunk {chunk} is incomplete at the end on {rank_words(ranks)}: {what}"


chunk_to_send = Exercise(
    "chunk_to_send",
    tabulated(CASES, lambda found: judge_schedule(found[0]), ranks=[0]),
    verifies="your schedule was simulated on 4, 3 and 2 ranks, and every rank ends with every sum",
)

# -- the all-reduce, on tensors ----------------------------------------------------------------

TENSORS = ((4, 12), (4, 5), (3, 7), (2, 5), (3, 2))  # ranks, numbers
LARGEST = 50  # of the whole numbers that are given
PASSED_ON = "send the chunk that has just arrived, (rank - step) % world_size, and receive the left neighbour's"


@dataclass(frozen=True)
class Segment:
    """Numbers `start` to `stop` - 1 of the answers, which have the same parts: `parts[rank]`."""

    start: int
    stop: int
    parts: tuple[Parts, ...]

    def describe(self) -> str:
        """`x[3]`, `x[0:3]`."""
        return f"x[{self.start}]" if self.stop == self.start + 1 else f"x[{self.start}:{self.stop}]"


class Brought(RingSum):
    given: Sequence[float]


def judge_sums(size: int, length: int, found: Mapping[int, Brought]) -> str:
    """The line for what the ranks brought."""
    if all(f["digits"] is None for f in found.values()):
        return not_written("ring_all_reduce")
    line = next((w for r in sorted(found) if (w := _misshapen(r, length, found[r]))), "")
    line = (
        line
        or _mixed(found)
        or diagnose(size, [found[r]["digits"] for r in range(size)])
        or _misplaced(found)
        or _not_a_ring(found)
    )
    return f"{counted(size, 'rank')}, {counted(length, 'number')}: {line}" if line else OK


def _misshapen(rank: int, length: int, found: Brought) -> str:
    for answer in (found["digits"], found["numbers"]):
        if answer is None:
            return f"rank {rank} returned None, other ranks a value"
        if not isinstance(answer, list) or not all(type(v) in (int, float) for v in answer):
            return f"rank {rank} returned {_shape(answer)}; return the sum in the shape of x"
        if len(answer) != length:
            return f"rank {rank} returned {counted(len(answer), 'number')}; return the whole sum, in the shape of x"
    return ""


def _shape(answer: Any) -> str:
    """What was returned in place of a tensor of one dimension, and what was probably forgotten."""
    if type(answer) in (int, float):
        return "a single number: all ranks' x are added up, number by number, not the numbers of x"
    if isinstance(answer, list) and all(isinstance(v, list) for v in answer):
        return "several tensors, or one of two dimensions: torch.cat(chunks) joins chunks"
    return "no tensor of one dimension"


def _mixed(found: Mapping[int, Brought]) -> str:
    """What is wrong with the dtypes of messages; empty if they agree."""
    for rank, brought in sorted(found.items()):
        sent, received = (sorted(set(d)) for d in brought["dtypes"])
        if sent and received and sent != received:
            return (
                f"rank {rank} sends {' and '.join(sent)} and receives into {' and '.join(received)}; the buffer needs "
                "the dtype of the message, as torch.empty_like(chunk) has it"
            )
    return ""


def diagnose(size: int, digits: Sequence[Sequence[float]]) -> str:
    """What is wrong with the answers to BASE ** rank, `digits[rank]`; empty if every rank has every part once."""
    total = sum(BASE**r for r in range(size))
    if all(v == total for row in digits for v in row):
        return ""
    if all(abs(v * size - total) < 1e-3 * total for row in digits for v in row):
        return "every number is the sum divided by the world size: an all-reduce sums, and does not divide"
    if any(v != int(v) or not 0 <= v < BASE**size for row in digits for v in row):
        return (
            "some numbers are not sums of the ranks' numbers: only add what has arrived (wait() for an irecv), and "
            "start from x"
        )
    segments = list(segments_of(size, digits))
    rank, where = next((r, s) for r in range(size) for s in segments if not complete(s.parts[r]))
    return f"rank {rank}, {where.describe()}: {_gap(where.parts[rank])}; {_why(size, segments)}"


def segments_of(size: int, digits: Sequence[Sequence[float]]) -> Iterator[Segment]:
    """The answers, cut where the parts change on any rank."""
    columns = [tuple(_parts(size, int(row[i])) for row in digits) for i in range(len(digits[0]))]
    start = 0
    for parts, same in groupby(columns):
        stop = start + len(list(same))
        yield Segment(start, stop, parts)
        start = stop


def _parts(size: int, value: int) -> Parts:
    return tuple(value // BASE**r % BASE for r in range(size))


def _gap(parts: Parts) -> str:
    """`rank 3's part is missing`, `rank 0's part is in it twice`."""
    lacking = [r for r, count in enumerate(parts) if not count]
    if lacking:
        one = len(lacking) == 1
        return f"{rank_words(lacking)}'s part is missing" if one else f"the parts of {rank_words(lacking)} are missing"
    rank = next(r for r, count in enumerate(parts) if count > 1)
    return f"rank {rank}'s part was added {'twice' if parts[rank] == 2 else f'{parts[rank]} times'}"


def _why(size: int, segments: Sequence[Segment]) -> str:
    """The mistake that leaves such segments behind."""
    ready = [sum(map(complete, s.parts)) for s in segments]
    if all(
        set(s.parts[r][:r] + s.parts[r][r + 1 :]) == {0} and s.parts[r][r] > 1 for s in segments for r in range(size)
    ):
        return "every rank has only its own numbers, more than once: what the others have must be sent and received"
    if any(count > 1 for s in segments for parts in s.parts for count in parts):
        if all(ready):
            return "in the last world_size - 1 steps the arriving chunk is complete: replace yours, do not add"
        return f"a chunk was added that had that part in it already: {PASSED_ON}"
    if all(not count for s in segments for parts in s.parts for count in parts):
        return "nothing was added to anything: start from what is in x, not from zeros"
    if all(s.parts[r] == part(r, size) for s in segments for r in range(size)):
        return "every rank returned its own x: return the sum"
    if all(sum(map(bool, parts)) == 1 for s in segments for parts in s.parts):
        return (
            "the received chunk replaced yours, and nothing was added. Receive into a separate buffer, then "
            "add it to the chunk in the first world_size - 1 steps"
        )
    if all(len(set(s.parts)) == 1 and sum(s.parts[0]) == size - 1 for s in segments):
        return "the adding stopped one step too early: the first world_size - 1 steps add"
    if all(count == 1 for count in ready):
        return "each chunk is complete on one rank only, as after a reduce-scatter: world_size - 1 more steps copy it"
    if all(count == size - 1 for count in ready):
        return "each chunk reached all ranks but one: the second half takes world_size - 1 steps"
    return f"a wrong chunk was sent or received: {PASSED_ON}"


def _misplaced(found: Mapping[int, Brought]) -> str:
    right = [sum(column) for column in zip(*(f["given"] for f in found.values()), strict=True)]
    for rank, brought in sorted(found.items()):
        if brought["numbers"] != right:
            at = next(i for i, (a, b) in enumerate(zip(brought["numbers"], right, strict=True)) if a != b)
            why = "the sums are right but in another order" if sorted(brought["numbers"]) == sorted(right) else (
                "a chunk was added to a different chunk"
            )  # fmt: skip
            return f"rank {rank}, x[{at}]: " + mismatch(f"{right[at]:g}", f"{brought['numbers'][at]:g}", why)
    return ""


def _not_a_ring(found: Mapping[int, Brought]) -> str:
    """The fault of a right sum that no ring has made; empty if a ring has."""
    size = len(found)
    used = sorted({name for f in found.values() for name in f["collectives"]})
    if used:
        return f"the sum is right, but {', '.join(used)} computed it; use only send and recv (or isend, irecv)"
    for rank, brought in sorted(found.items()):
        to = sorted({receiver for receiver, _ in brought["sent"]})
        if len(to) > 1 or (to and to[0] not in ((rank + 1) % size, (rank - 1) % size)):
            return f"the sum is right, but rank {rank} sends to {rank_words(to)}; in a ring each rank has one receiver"
        if len(brought["sent"]) > 2 * (size - 1):
            return f"the sum is right, but took {len(brought['sent'])} steps; a ring needs {2 * (size - 1)}"
        count = sum(n for _, n in brought["sent"])
        most = 2 * (size - 1) * -(-len(brought["given"]) // size)
        if count > most:
            return (
                f"the sum is right, but rank {rank} sent {counted(count, 'number')} where {2 * (size - 1)} chunks are "
                f"{most}: send chunks, not all of x"
            )
    return ""


def sums_judge(function: Callable[..., Any]) -> str:
    with grouped(at_least=max(WORLDS)):
        return next((line for case in TENSORS if (line := _sums(function, *case)) != OK), OK)


def numbers(size: int, length: int) -> list[list[float]]:
    """What each rank is given besides: whole numbers without a pattern, whose sums float32 holds exactly."""
    chance = Random(1000 * size + length)
    return [[float(chance.randrange(-LARGEST, LARGEST)) for _ in range(length)] for _ in range(size)]


def _sums(function: Callable[..., Any], size: int, length: int) -> str:
    given = numbers(size, length)
    on_ranks(make_world, size, screen=NullScreen())
    try:
        brought: list[RingSum] = on_ranks(seeded, all_reduced, function, given)[:size]
    except Wrong as wrong:
        said = _misused(wrong.__cause__)
        if said:
            raise Wrong(f"{counted(size, 'rank')}, {counted(length, 'number')}: {said}") from wrong
        advice = stopped_because(wrong.__cause__, size, length)
        raise Wrong(f"{counted(size, 'rank')}, {counted(length, 'number')}: {wrong}{advice}") from wrong
    return judge_sums(size, length, {r: {**brought[r], "given": given[r]} for r in range(size)})


def _misused(cause: BaseException | None) -> str:
    """The sentence of a `Misused` that ended the run; empty if something else did."""
    last = cause.cause.chain[-1] if isinstance(cause, WorkerFailed) and cause.cause.chain else None
    return last.message if last is not None and last.type == Misused.__name__ else ""


def stopped_because(cause: BaseException | None, size: int, length: int) -> str:
    """The cause and the advice, after the sentence about the end of the run."""
    if isinstance(cause, RunHung):
        ended = [s.rank for s in cause.states if s.rank < size and s.status == RankStatus.FINISHED]
        if ended:
            return f"; {rank_words(ended)} took fewer steps: all ranks must send and receive equally often"
        return (
            "; the ranks wait in a circle: a send ends only when its receiver receives, so all block if all send "
            "(or receive) first. Start the send with isend, then recv, then wait for the send; send to one "
            "neighbour and receive from the other"
        )
    if isinstance(cause, WorkerFailed) and size != max(WORLDS) and length > size:
        return f"; {max(WORLDS)} ranks succeeded: is {max(WORLDS)} written where dist.get_world_size() belongs?"
    if isinstance(cause, WorkerFailed) and length % size:
        return (
            f"; {counted(length, 'number')} make {size} chunks of different sizes: cut with x.tensor_split(world_size) "
            "and receive each chunk into a buffer of its own size"
        )
    return ""


ring_all_reduce = Exercise(
    "ring_all_reduce",
    sums_judge,
    verifies="sums on real ranks in worlds of 4, 3 and 2, also of lengths that the ranks do not divide",
)
