"""torch's caching allocator for CUDA, as numbers: which block a request gets, and what is asked of the driver.

The rules are those of its `native` allocator: two pools, the smallest block that fits, the rest split off, free
neighbours joined. No memory is behind it, so one list of requests gives the bytes that a GPU's counters give.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from nbddp.capabilities.simulated_gpus.cards import MIB

ROUNDED = 512  # bytes: sizes of blocks are multiples of it
SMALL, SMALL_SEGMENT = MIB, 2 * MIB  # requests up to a size are cut out of segments of another
MIDDLE, MIDDLE_SEGMENT = 10 * MIB, 20 * MIB  # so are these; a larger one gets a segment of its own
STEP = 2 * MIB  # of which the size of such a segment is a multiple


class Full(Exception):
    """The driver has no segment of so many bytes left."""

    def __init__(self, asked: int):
        super().__init__(asked)
        self.asked = asked


class Block:
    """A part of a segment: bytes, whether it is in use, its neighbours."""

    __slots__ = ("address", "after", "before", "pool", "requested", "size", "stream", "used")

    def __init__(self, pool: BlockPool, address: int, size: int, stream: int):
        self.pool, self.address, self.size, self.stream = pool, address, size, stream
        self.used = False
        self.requested = 0
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def small(self) -> bool:
        """Whether it is of the pool of small blocks."""
        return self.pool.least == ROUNDED

    @property
    def whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is None and self.after is None


@dataclass(slots=True)
class Count:
    """One counter: now, the most since the last reset, and all that came."""

    now: int = 0
    peak: int = 0
    came: int = 0


class Counts:
    """The counters of a pool, or of both."""

    def __init__(self) -> None:
        self.allocation, self.allocated_bytes, self.requested_bytes = Count(), Count(), Count()
        self.segment, self.reserved_bytes = Count(), Count()
        self.inactive_split, self.inactive_split_bytes = Count(), Count()


Pair = tuple[Count, Count]  # a pool's counter and the one of both pools


def add(pair: Pair, n: int) -> None:
    """So much has come."""
    for count in pair:
        count.came += n
        now = count.now = count.now + n
        if now > count.peak:
            count.peak = now


def remove(pair: Pair, n: int) -> None:
    """So much has gone."""
    one, both = pair
    one.now -= n
    both.now -= n


class BlockPool:
    """Free blocks of one kind by stream, each list sorted by size and address."""

    def __init__(self, least: int, both: Counts):
        self.least = least  # bytes that must be left over for a block to be split
        self.counts = mine = Counts()
        self.in_use = [(c.allocation, c.allocated_bytes, c.requested_bytes) for c in (mine, both)]
        self.segments, self.reserved = (mine.segment, both.segment), (mine.reserved_bytes, both.reserved_bytes)
        self.split, self.split_bytes = (
            (mine.inactive_split, both.inactive_split),
            (mine.inactive_split_bytes, both.inactive_split_bytes),
        )
        self._free: dict[int, list[tuple[int, int, Block]]] = {}

    def took(self, size: int, requested: int) -> None:
        """A block is in use: the counters of it in one place, since each tensor comes here."""
        for number, bytes_, asked in self.in_use:
            number.now += 1
            number.came += 1
            if number.now > number.peak:
                number.peak = number.now
            bytes_.now += size
            bytes_.came += size
            if bytes_.now > bytes_.peak:
                bytes_.peak = bytes_.now
            asked.now += requested
            asked.came += requested
            if asked.now > asked.peak:
                asked.peak = asked.now

    def put(self, block: Block) -> None:
        """A block is free."""
        insort(self._free.setdefault(block.stream, []), (block.size, block.address, block))

    def drop(self, block: Block) -> None:
        """A block is not free any more."""
        rows = self._free[block.stream]
        del rows[bisect_left(rows, (block.size, block.address))]

    def smallest(self, size: int, stream: int) -> Block | None:
        """The free block of a stream that fits best."""
        rows = self._free.get(stream)
        at = bisect_left(rows, (size, 0)) if rows else 0
        return rows[at][2] if rows and at < len(rows) else None

    def whole_segments(self) -> list[Block]:
        """Free blocks that are all of their segment."""
        return [row[2] for rows in self._free.values() for row in rows if row[2].whole]


class Allocator:
    """The blocks of one GPU in one process.

    Blocks may be given back by any thread, also while another request is under way: they wait in a queue.

    Args:
        fits: whether the driver has room for a segment of so many bytes.
        changed: called when the reserved bytes have changed.

    Example:
        >>> one = Allocator(lambda size: True)
        >>> block = one.take(1)
        >>> block.size, one.both.reserved_bytes.now
        (512, 2097152)
    """

    def __init__(self, fits: Callable[[int], bool], changed: Callable[[], None] = lambda: None):
        self.both = Counts()
        self.small, self.large = BlockPool(ROUNDED, self.both), BlockPool(SMALL + 1, self.both)
        self.retries = self.failures = self.driver_gave = self.driver_took = self.synchronised = 0
        self._fits, self._changed = fits, changed
        self._address = STEP
        self._firsts: list[Block] = []  # of the segments
        self._lock = threading.Lock()
        self._returned: deque[Block] = deque()

    def take(self, requested: int, stream: int = 0) -> Block:
        """A block for so many bytes. Raises Full."""
        size = rounded(requested)
        with self._lock:
            if self._returned:
                self._settle()
            pool = self.small if size <= SMALL else self.large
            block = pool.smallest(size, stream)
            if block is None:
                block = self._segment(pool, size, stream)
            else:
                pool.drop(block)
                if block.before is not None or block.after is not None:
                    remove(pool.split, 1)
                    remove(pool.split_bytes, block.size)
            if block.size - size >= pool.least:
                split(block, size)
            block.used, block.requested = True, requested
            pool.took(block.size, requested)
        return block

    def give(self, block: Block) -> None:
        """A block is not in use any more. The next request, or the next look at the counters, takes it back."""
        self._returned.append(block)

    def settle(self) -> None:
        """Takes back what waits, unless a request is under way: that one does it, or the next."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def check(self, requested: int, stream: int = 0) -> None:
        """Raises Full if `take` would."""
        size = rounded(requested)
        with self._lock:
            self._settle()
            pool = self.small if size <= SMALL else self.large
            if pool.smallest(size, stream) is None:
                self._make_room(segment(size))

    def release(self) -> None:
        """Returns to the driver each segment of which nothing is in use."""
        with self._lock:
            self._settle()
            self._release()

    def segments(self) -> list[list[Block]]:
        """The blocks of each segment, in the order of their addresses."""
        self.settle()
        with self._lock:
            return [chain(first) for first in self._firsts]

    def _segment(self, pool: BlockPool, size: int, stream: int) -> Block:
        asked = segment(size)
        self._make_room(asked)
        block = Block(pool, self._address, asked, stream)
        self._address += asked + STEP
        self.driver_gave += 1
        self._firsts.append(block)
        add(pool.segments, 1)
        add(pool.reserved, asked)
        self._changed()
        return block

    def _make_room(self, asked: int) -> None:
        if not self._fits(asked):
            self.retries += 1
            self._release()
            if not self._fits(asked):
                self.failures += 1
                raise Full(asked)

    def _settle(self) -> None:
        while self._returned:
            self._free(self._returned.popleft())

    def _free(self, block: Block) -> None:
        pool = block.pool
        block.used = False
        for number, size, requested in pool.in_use:
            number.now -= 1
            size.now -= block.size
            requested.now -= block.requested
        before, after = block.before, block.after
        if after is not None and not after.used:
            join(block, after, after)
        if before is not None and not before.used:
            join(before, block, before)
            block = before
        pool.put(block)
        if block.before is not None or block.after is not None:
            add(pool.split, 1)
            add(pool.split_bytes, block.size)

    def _release(self) -> None:
        self.synchronised += 1
        for pool in (self.large, self.small):
            for block in pool.whole_segments():
                pool.drop(block)
                self._firsts.remove(block)
                self.driver_took += 1
                remove(pool.segments, 1)
                remove(pool.reserved, block.size)
        self._changed()


def split(block: Block, size: int) -> None:
    """Makes of a block one of this size and a free one of the rest."""
    pool, rest = block.pool, block.size - size
    other = Block(pool, block.address + size, rest, block.stream)
    other.before, other.after, block.size, block.after = block, block.after, size, other
    if other.after is not None:
        other.after.before = other
    pool.put(other)
    add(pool.split, 1)
    add(pool.split_bytes, rest)


def chain(first: Block) -> list[Block]:
    """A block and those behind it in its segment."""
    found: list[Block] = [first]
    while found[-1].after is not None:
        found.append(found[-1].after)
    return found


def join(block: Block, after: Block, free: Block) -> None:
    """Makes one block of two neighbours, of which one has been free."""
    pool = block.pool
    pool.drop(free)
    remove(pool.split, 1)
    remove(pool.split_bytes, free.size)
    block.size += after.size
    block.after = after.after
    if block.after is not None:
        block.after.before = block


def rounded(requested: int) -> int:
    """Bytes of the block for a request.

    Example:
        >>> rounded(513)
        1024
    """
    return max(ROUNDED, -(-requested // ROUNDED) * ROUNDED)


def segment(size: int) -> int:
    """Bytes that are asked of the driver for a block that no free one can be."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return MIDDLE_SEGMENT if size < MIDDLE else -(-size // STEP) * STEP
