"""The memory of simulated GPUs: what each storage takes, as torch's caching allocator counts, and the error when full.

The bytes lie in the host's memory. A storage keeps the label cpu in C++: views that C++ makes take their device from
it, and these are right for the twins that CPU kernels work with. `blocks` knows which storages belong to a GPU.

Processes that use the same GPU write into one file what they have reserved, so its memory is one.
"""

from __future__ import annotations

import atexit
import fcntl
import mmap
import os
import struct
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nbddp.agent.process_id import ProcessId
from nbddp.agent.runtime_dir import runtime
from nbddp.capabilities.simulated_gpus.on_rank import devices, versions
from nbddp.capabilities.simulated_gpus.on_rank.versions import MIB
from nbddp.errors import AgentFailed

CONTEXT = 105 * MIB  # what a CUDA context takes before the first tensor
ROUNDED = 512  # bytes: sizes of blocks are multiples of it
SMALL, SMALL_SEGMENT = MIB, 2 * MIB  # blocks up to a size come from segments of another
LARGE, LARGE_SEGMENT = 10 * MIB, 20 * MIB  # so do these; larger ones have their own segment
STEP = 2 * MIB  # of which the size of such a segment is a multiple
SHARED = "NBDDP_SIMULATED_GPUS_MEMORY"  # the file in which processes write; children inherit it
PROCESSES, GPUS = 128, 16  # that the file has room for


@dataclass
class Pool:
    """Blocks of one kind, small or large: bytes, and how many there are."""

    now: int = 0
    peak: int = 0
    taken: int = 0  # since the start
    returned: int = 0
    count: int = 0
    count_peak: int = 0
    count_taken: int = 0
    segments: int = 0
    reserved: int = 0
    free: int = 0  # reserved, and in no block


@dataclass
class DeviceMemory:
    """What this process has of one GPU."""

    index: int
    total: int
    now: int = 0
    peak: int = 0
    requested: int = 0
    requested_peak: int = 0
    reserved: int = 0
    reserved_peak: int = 0
    reserved_taken: int = 0
    reserved_returned: int = 0
    retries: int = 0
    failures: int = 0
    allowed: int = 0  # by set_per_process_memory_fraction; 0: all
    small: Pool = field(default_factory=Pool)
    large: Pool = field(default_factory=Pool)

    def add(self, n: int, requested: int) -> None:
        """A block of n bytes. Raises OutOfMemoryError."""
        pool = self.small if n <= SMALL else self.large
        if pool.free < n:
            self._grow(pool, n)
        pool.free -= n
        pool.now += n
        pool.taken += n
        pool.count += 1
        pool.count_taken += 1
        if pool.now > pool.peak:
            pool.peak = pool.now
        if pool.count > pool.count_peak:
            pool.count_peak = pool.count
        self.now += n
        self.requested += requested
        if self.now > self.peak:
            self.peak = self.now
        if self.requested > self.requested_peak:
            self.requested_peak = self.requested

    def remove(self, n: int, requested: int) -> None:
        pool = self.small if n <= SMALL else self.large
        pool.free += n
        pool.now -= n
        pool.returned += n
        pool.count -= 1
        self.now -= n
        self.requested -= requested

    def make_room(self, requested: int) -> None:
        """Raises OutOfMemoryError if so many bytes more do not fit, before anything is taken of the host's memory."""
        n = rounded(requested)
        pool = self.small if n <= SMALL else self.large
        if pool.free < n and not self._fits(segment(n)):
            self.release_cached()
            if not self._fits(segment(n)):
                self._refuse(segment(n))

    def release_cached(self) -> None:
        """Returns to the GPU what is reserved and in no block."""
        for pool, step in ((self.small, SMALL_SEGMENT), (self.large, STEP)):
            kept = -(-pool.now // step) * step
            self.reserved_returned += pool.reserved - kept
            pool.reserved, pool.free = kept, kept - pool.now
            pool.segments = min(pool.segments, -(-kept // step))
        self.reserved = self.small.reserved + self.large.reserved
        ledger.write(self.index, self.used)

    @property
    def used(self) -> int:
        """Bytes of the GPU that this process has, with its context."""
        return self.reserved + CONTEXT if self.reserved_taken else 0

    def free(self) -> int:
        others = sum(size for _, size in ledger.others(self.index))
        return max(0, self.total - others - (self.used or CONTEXT))

    def _fits(self, size: int) -> bool:
        return size <= self.free() and not 0 < self.allowed < self.reserved + size

    def _grow(self, pool: Pool, n: int) -> None:
        size = segment(n)
        if not self._fits(size):
            self.retries += 1
            self.release_cached()
            if not self._fits(size):
                self._refuse(size)
        pool.reserved += size
        pool.free += size
        pool.segments += 1
        self.reserved += size
        self.reserved_taken += size
        if self.reserved > self.reserved_peak:
            self.reserved_peak = self.reserved
        ledger.write(self.index, self.used)

    def _refuse(self, size: int) -> None:
        self.failures += 1
        words = versions.size
        others = "".join(f"Process {pid} has {words(used)} memory in use. " for pid, used in ledger.others(self.index))
        allowed = f"{words(self.allowed)} allowed; " if self.allowed else ""
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {words(size)}. GPU {self.index} has a total capacity of "
            f"{words(self.total)} of which {words(self.free())} is free. {others}Including non-PyTorch memory, this "
            f"process has {words(self.used or CONTEXT)} memory in use. {allowed}Of the allocated memory "
            f"{words(self.now)} is allocated by PyTorch, and {words(self.reserved - self.now)} is reserved by PyTorch "
            f"but unallocated.{versions.alloc_conf()}"
        )


def rounded(n: int) -> int:
    return -(-n // ROUNDED) * ROUNDED


def segment(n: int) -> int:
    """Bytes that the allocator asks of the driver for a block of n bytes."""
    if n <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if n < LARGE else -(-n // STEP) * STEP


class Ledger:
    """What the processes of a machine have of its simulated GPUs: a file of rows, pid, its start, and bytes by GPU."""

    ROW = struct.Struct(f"<Qd{GPUS}Q")

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._path: Path | None = None
        self._row = 0

    def begin(self) -> None:
        """Takes a row in the file that this process and its siblings share. Without a place for it, each is alone."""
        try:
            named = os.environ.get(SHARED)
            self._path = Path(named) if named else runtime() / f"simulated-gpus-{os.getppid()}"
            with os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                os.truncate(file.fileno(), self.ROW.size * PROCESSES)
                self._map = mmap.mmap(file.fileno(), self.ROW.size * PROCESSES)
                self._row = next((n for n in range(PROCESSES) if not self._lives(n)), 0)
                me = ProcessId.of(os.getpid())
                self.ROW.pack_into(self._map, self._row * self.ROW.size, me.pid, me.started, *[0] * GPUS)
                fcntl.flock(file, fcntl.LOCK_UN)  # the map keeps the file open
        except (OSError, AgentFailed):
            self._map = None
            return
        os.environ[SHARED] = str(self._path)
        atexit.register(self.end)

    def end(self) -> None:
        """The row is free; the last process removes the file."""
        if self._map is None or devices.forked:
            return
        self.ROW.pack_into(self._map, self._row * self.ROW.size, 0, 0.0, *[0] * GPUS)
        if self._path and not any(self._lives(n) for n in range(PROCESSES)):
            self._path.unlink(missing_ok=True)
        self._map = None

    def write(self, index: int, used: int) -> None:
        if self._map is not None:
            at = self._row * self.ROW.size + 16 + 8 * devices.physical(index)
            struct.pack_into("<Q", self._map, at, used)

    def others(self, index: int) -> list[tuple[int, int]]:
        """(pid, bytes) of the other processes that use this GPU."""
        if self._map is None:
            return []
        gpu, found = devices.physical(index), []
        for n in range(PROCESSES):
            pid, _, *used = self.ROW.unpack_from(self._map, n * self.ROW.size)
            if pid and n != self._row and used[gpu] and self._lives(n):
                found.append((pid, used[gpu]))
        return found

    def _lives(self, row: int) -> bool:
        assert self._map is not None
        pid, started, *_ = self.ROW.unpack_from(self._map, row * self.ROW.size)
        return bool(pid) and ProcessId(pid, started).alive()


ledger = Ledger()
_of: list[DeviceMemory] = []


def of(index: int) -> DeviceMemory:
    return _of[index]


def everything() -> list[DeviceMemory]:
    return _of


def begin() -> None:
    """CUDA is in use from now on."""
    devices.freeze()
    if not _of:
        _of.extend(DeviceMemory(i, devices.card(i).memory) for i in range(devices.count()))
        ledger.begin()


class Block(weakref.ref[Any]):
    """The memory of one storage. It ends with the storage."""

    __slots__ = ("index", "key", "requested", "size")
    index: int
    key: int
    requested: int
    size: int


blocks: dict[int, Block] = {}  # address of a StorageImpl → its block


def _ended(block: Block) -> None:
    if block.size:
        _of[block.index].remove(block.size, block.requested)
    if blocks.get(block.key) is block:
        del blocks[block.key]


def adopt(storage: Any, index: int, counted: bool = True) -> None:
    """This storage belongs to cuda:index. counted: this process has allocated it. Raises OutOfMemoryError."""
    if not torch.cuda._initialized:  # finding the layout has used up C++'s own lazy initialisation
        torch.cuda._lazy_init()
    key, requested = storage._cdata, storage.nbytes()
    n = rounded(requested) if counted else 0
    old = blocks.get(key)
    if old is not None:
        if old.requested == requested:
            return
        if old.size:  # the storage was resized
            _of[old.index].remove(old.size, old.requested)
        old.size = old.requested = 0
    if n:
        _of[index].add(n, requested)
    block = Block(storage, _ended)
    block.index, block.key, block.requested, block.size = index, key, requested, n
    blocks[key] = block


def index_of(storage: Any) -> int:
    """The index of the GPU to which a storage belongs, else -1."""
    block = blocks.get(storage._cdata)
    return -1 if block is None else block.index


def make_room(index: int, requested: int) -> None:
    """Raises OutOfMemoryError if so many bytes do not fit on cuda:index."""
    if not torch.cuda._initialized:
        torch.cuda._lazy_init()
    _of[index].make_room(requested)
