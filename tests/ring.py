"""The ring all-reduce, message by message: what the closed form of `cost` is tested against.

Each rank cuts its buffer into as many chunks as there are ranks. In n - 1 steps every rank sends a chunk to its
right neighbour, which adds its own, and in n - 1 more the finished chunks go round (Patarasuk and Yuan
2009). Events are taken in the order of their time: nothing is known here of how long the whole should take.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from nbddp.capabilities.forecast.cost import Link


@dataclass(frozen=True)
class Message:
    """One chunk from `rank` to its right neighbour. start, end: seconds; `parts` are the ranks whose numbers are in
    the chunk as it is sent; the first n - 1 steps reduce, the rest gather."""

    rank: int
    step: int
    chunk: int
    bytes: float
    start: float
    end: float
    parts: frozenset[int]


@dataclass(frozen=True)
class Ring:
    """A simulated all-reduce: its messages in the order in which they arrive, when each rank was done (seconds), and
    `held[rank][chunk]`, the ranks whose numbers are in that chunk in the end."""

    messages: tuple[Message, ...]
    finished: tuple[float, ...]
    held: tuple[tuple[frozenset[int], ...], ...]

    @property
    def duration(self) -> float:
        """Seconds from time 0 until the last rank was done."""
        return max(self.finished)


def simulate(count: float, links: Sequence[Link], starts: Sequence[float] | None = None) -> Ring:
    """All-reduce `count` bytes on `len(links)` ranks.

    links[r] leads from rank r to rank r + 1; it carries one message at a time. starts[r] is when rank r calls the
    all-reduce, in seconds; its link carries nothing before, and what reaches it earlier waits there.
    """
    n = len(links)
    begin = list(starts) if starts is not None else [0.0] * n
    held = [[frozenset({r}) for _ in range(n)] for r in range(n)]
    sent, received = [0] * n, [0] * n
    free = list(begin)  # when a rank's link can take its next message
    finished = list(begin)
    events: list[tuple[float, int, int, Message | None]] = []  # None: the link of the rank is free again
    messages: list[Message] = []

    def send(rank: int, at: float) -> None:
        """Start the rank's next message, if it has what it must send."""
        step = sent[rank]
        if step >= 2 * (n - 1) or step > received[rank]:
            return
        chunk, link = (rank - step) % n, links[rank]
        start = max(at, free[rank])
        end = start + link.latency + count / n / link.bandwidth
        sent[rank], free[rank] = step + 1, end
        message = Message(rank, step, chunk, count / n, start, end, held[rank][chunk])
        heapq.heappush(events, (end, rank, step, message))
        heapq.heappush(events, (end, rank, step + 2 * n, None))

    def arrive(message: Message) -> int:
        """The right neighbour takes the message; who that is."""
        messages.append(message)
        right = (message.rank + 1) % n
        own = held[right][message.chunk] if message.step < n - 1 else frozenset()
        held[right][message.chunk] = message.parts | own
        received[right] += 1
        return right

    for rank in range(n):
        send(rank, begin[rank])
    while events:
        at, rank, _, message = heapq.heappop(events)
        who = rank if message is None else arrive(message)
        finished[who] = max(finished[who], at)
        send(who, at)
    return Ring(tuple(messages), tuple(finished), tuple(tuple(h) for h in held))
