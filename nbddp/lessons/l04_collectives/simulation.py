"""Lesson 04's explorer: the ring all-reduce on symbols. Which rank's part is in which chunk, step by step.

A part is the numbers of one rank in one chunk, written as the rank's letter: rank 0's is A, rank 1's B. A chunk on a
rank is counts of parts. So a program that adds a part twice, or leaves one out, shows it for any numbers. The steps are
those of Patarasuk and Yuan (2009): n - 1 that add, n - 1 that pass on what is complete. Pure: imports only
`nbddp.launch.topology` and what that may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nbddp.launch.topology import rank_words

LETTERS = "ABCDEFGH"
RING, SHORT, OWN, ADDING = (
    "ring all-reduce",
    "stops adding one step early",
    "always sends its own chunk",
    "adds to the end",
)
PROGRAMS = (RING, SHORT, OWN, ADDING)

Parts = tuple[int, ...]  # counts of parts, by the rank they are from
Grid = tuple[tuple[Parts, ...], ...]  # [rank][chunk]


@dataclass(frozen=True)
class Message:
    """A chunk on its way from `sender` to `receiver`, with the parts that are in it."""

    sender: int
    receiver: int
    chunk: int
    parts: Parts


@dataclass(frozen=True)
class RingStep:
    """One step: the messages of all ranks, by sender, whether what arrives is added, and the chunks thereafter."""

    messages: tuple[Message, ...]
    adds: bool
    after: Grid


@dataclass(frozen=True)
class Schedule:
    """A program for every rank: `chunk(rank, step, n)` is sent to the right neighbour in `step`, counted from 0; in
    the first `adding` of `steps` steps what arrives is added, in the others it replaces."""

    chunk: Callable[[int, int, int], int]
    adding: int
    steps: int


def schedule(program: str, n: int) -> Schedule:
    """One of the explorer's programs on `n` ranks."""
    adding = {SHORT: n - 2, ADDING: 2 * (n - 1)}.get(program, n - 1)
    steps = adding if program == ADDING else adding + n - 1
    return Schedule((lambda r, s, n: r) if program == OWN else follow, adding, steps)


def follow(rank: int, step: int, n: int) -> int:
    """The ring's rule: a rank begins with its own chunk, and then sends on what has just arrived."""
    return (rank - step) % n


def simulate(n: int, made: Schedule) -> tuple[RingStep, ...]:
    """The steps on `n` ranks. Raises IndexError for a chunk that is none of 0 to n - 1."""
    held: list[list[Parts]] = [[part(r, n)] * n for r in range(n)]
    steps = []
    for s in range(made.steps):
        sent = tuple(_message(r, made.chunk(r, s, n), held) for r in range(n))
        adds = s < made.adding
        for m in sent:
            mine = held[m.receiver][m.chunk]
            held[m.receiver][m.chunk] = tuple(a + b for a, b in zip(mine, m.parts, strict=True)) if adds else m.parts
        steps.append(RingStep(sent, adds, tuple(map(tuple, held))))
    return tuple(steps)


def _message(sender: int, chunk: int, held: Sequence[Sequence[Parts]]) -> Message:
    if not 0 <= chunk < len(held):
        raise IndexError(chunk)
    return Message(sender, (sender + 1) % len(held), chunk, held[sender][chunk])


def part(rank: int, n: int) -> Parts:
    """The part of one rank alone."""
    return tuple(int(r == rank) for r in range(n))


def complete(parts: Parts) -> bool:
    """Whether every rank's part is there once."""
    return all(count == 1 for count in parts)


def letters(parts: Parts) -> str:
    """`ABD`; where a part is there more than once `2A B D`; `nothing`."""
    counted = [f"{count if count > 1 else ''}{LETTERS[r]}" for r, count in enumerate(parts) if count]
    return (" " if max(parts, default=0) > 1 else "").join(counted) or "nothing"


def faults(grid: Grid) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """(chunk, what is wrong with it, the ranks on which it is), chunk by chunk."""
    for chunk in range(len(grid)):
        found: dict[str, list[int]] = {}
        for rank, row in enumerate(grid):
            if not complete(row[chunk]):
                found.setdefault(fault(row[chunk]), []).append(rank)
        yield from ((chunk, words, tuple(ranks)) for words, ranks in found.items())


def fault(parts: Parts) -> str:
    """`it lacks D`, `it has A twice`, `it has A 3 times and lacks D`."""
    words = []
    for count in sorted({c for c in parts if c > 1}):
        which = "".join(LETTERS[r] for r, c in enumerate(parts) if c == count)
        words.append(f"{which} {'twice' if count == 2 else f'{count} times'}")
    lacking = "".join(LETTERS[r] for r, c in enumerate(parts) if c == 0)
    return "it " + " and ".join(
        [*(["has " + ", ".join(words)] if words else []), *([f"lacks {lacking}"] * bool(lacking))]
    )


@dataclass(frozen=True)
class RingState:
    """A program on `ranks` ranks, looked at after `step` of its steps (0: before the first)."""

    program: str
    ranks: int
    step: int
    steps: tuple[RingStep, ...]

    @property
    def last(self) -> RingStep | None:
        """The step that has just been taken."""
        return self.steps[self.step - 1] if self.step else None

    @property
    def grid(self) -> Grid:
        """The chunks now: [rank][chunk]."""
        n = self.ranks
        return self.last.after if self.last else tuple((part(r, n),) * n for r in range(n))

    @property
    def done(self) -> bool:
        return self.step == len(self.steps)

    def heading(self) -> str:
        """`after step 3 of 6: the received chunk was added to the local one`."""
        if self.last is None:
            return f"before the first of {len(self.steps)} steps"
        return f"after step {self.step} of {len(self.steps)}: {self.did()}"

    def did(self) -> str:
        """What the ranks did with the chunk that they received."""
        added = self.last is not None and self.last.adds
        return "the received chunk was added to the local one" if added else "the received chunk replaced the local one"

    def verdict(self) -> str:
        """How many chunks are complete; at the end, whether the program is right, and what is wrong if not."""
        n = self.ranks
        if not self.done:
            ready = sum(complete(parts) for row in self.grid for parts in row)
            return f"complete so far: {ready} of {n * n}"
        wrong = list(faults(self.grid))
        if not wrong:
            return f"right: every rank has every chunk complete, {LETTERS[:n]}"
        bad = sum(len(ranks) for _, _, ranks in wrong)
        chunk, what, ranks = wrong[0]
        return f"wrong: {bad} of {n * n} chunks are incomplete, such as chunk {chunk} on {rank_words(ranks)} ({what})"

    def describe(self) -> str:
        n = self.ranks
        rows = [["", *(f"chunk {c}" for c in range(n))]]
        rows += [[f"rank {r}", *map(letters, row)] for r, row in enumerate(self.grid)]
        widths = [max(len(row[i]) for row in rows) for i in range(n + 1)]
        table = ["  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        sent = [f"sent: {', '.join(_sent(m) for m in self.last.messages)}"] if self.last else []
        return "\n".join([f"{self.program}, {self.heading()}", *sent, *table, self.verdict()])


def _sent(message: Message) -> str:
    return f"chunk {message.chunk} from rank {message.sender} to {message.receiver}"


def simulate_ring(ranks: int = 4, step: int = 0, program: str = RING) -> RingState:
    """The explorer's picture. Past the last step nothing changes any more."""
    steps = simulate(ranks, schedule(program, ranks))
    return RingState(program, ranks, min(step, len(steps)), steps)
