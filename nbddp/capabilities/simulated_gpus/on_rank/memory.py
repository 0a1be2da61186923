"""The memory of simulated GPUs: what each storage takes, as torch's caching allocator counts, and the error when full.

The bytes lie in the host's memory. A storage keeps the label cpu in C++. Views that C++ makes take their device from
it, which is right for the twins that CPU kernels work with. `blocks` knows which storages belong to a GPU.

Processes that use the same GPU write into one file what they have reserved, so its memory is one.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from nbddp.agent.process_id import ProcessId
from nbddp.agent.runtime_dir import runtime
from nbddp.capabilities.simulated_gpus.cards import MIB, Card
from nbddp.capabilities.simulated_gpus.on_rank import SHARED, devices, streams, versions
from nbddp.capabilities.simulated_gpus.on_rank.allocator import Allocator, Block, Full
from nbddp.errors import AgentFailed

CONTEXT = 105 * MIB  # what a CUDA context takes before the first tensor, with the kernels that every program loads
CONTEXTS = {(9, 0): 610 * MIB}  # capability → where it was measured: an H100 under driver 580
DRIVER = 9024 << 10  # what the driver keeps for itself besides
CUBLAS = 66 * MIB  # what each handle of cuBLAS takes of the GPU, beside its workspace
EXABYTE = 1 << 60  # more than that is refused in other words
PROCESSES, GPUS = 128, 16  # that the file has room for


class DeviceMemory:
    """What this process has of one GPU."""

    def __init__(self, index: int, card: Card):
        self.index, self.total = index, card.memory
        self.context = CONTEXTS.get(card.capability, CONTEXT)
        self.allowed: int | None = None  # by set_per_process_memory_fraction
        self.libraries = 0  # bytes that libraries have taken of the GPU, not through torch
        self.allocator = Allocator(self._fits, lambda: ledger.write(self.index, self.used))

    def make_room(self, requested: int) -> None:
        """Raises OutOfMemoryError if so many bytes more do not fit, before anything is taken of the host's memory."""
        try:
            self.allocator.check(requested, streams.current(self.index))
        except Full as full:
            raise self._refusal(full.asked) from None

    def take(self, requested: int) -> Block:
        """A block for so many bytes. Raises OutOfMemoryError."""
        try:
            return self.allocator.take(requested, streams.current(self.index))
        except Full as full:
            raise self._refusal(full.asked) from None

    @property
    def used(self) -> int:
        """Bytes of the GPU that this process has, with its context."""
        counts = self.allocator.both.reserved_bytes
        return counts.now + self.context + self.libraries if counts.came else 0

    def free(self) -> int:
        others = sum(size for _, size in ledger.others(self.index))
        return max(0, self.total - others - (self.used or self.context) - DRIVER)

    def _fits(self, size: int) -> bool:
        return size <= self.free() and (
            self.allowed is None or self.allocator.both.reserved_bytes.now + size <= self.allowed
        )

    def _refusal(self, size: int) -> BaseException:
        if size > EXABYTE:
            much: BaseException = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than 1EB memory.")
            return much
        words, both = versions.size, self.allocator.both
        others = "".join(f"Process {pid} has {words(used)} memory in use. " for pid, used in ledger.others(self.index))
        allowed = f"{words(self.allowed)} allowed; " if self.allowed is not None else ""
        unused = both.reserved_bytes.now - both.allocated_bytes.now
        error: BaseException = torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {words(size)}. GPU {self.index} has a total capacity of "
            f"{words(self.total)} of which {words(self.free())} is free. {others}Including non-PyTorch memory, this "
            f"process has {words(self.used or self.context)} memory in use. {allowed}Of the allocated memory "
            f"{words(both.allocated_bytes.now)} is allocated by PyTorch, and {words(unused)} is reserved by PyTorch "
            f"but unallocated.{versions.alloc_conf()}"
        )
        return error


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

    def leave(self) -> None:
        """In a copy of the process that has the row."""
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
        _of.extend(DeviceMemory(i, devices.card(i)) for i in range(devices.count()))
        ledger.begin()


class Owned(weakref.ref[Any]):
    """What a storage has of a GPU. It ends with the storage."""

    __slots__ = ("block", "index", "key", "requested")
    index: int
    key: int
    requested: int
    block: Block | None  # None: another process has allocated it, or it is empty


blocks: dict[int, Owned] = {}  # address of a StorageImpl → what it has


def _ended(owned: Owned) -> None:
    if owned.block is not None:
        _give(owned.index, owned.block)
    if blocks.get(owned.key) is owned:
        del blocks[owned.key]


# called with True for a block that is taken and False before it is given back, the GPU's index and the block
heard: list[Callable[[bool, int, Any], None]] = []


def _take(index: int, requested: int) -> Block:
    """Raises OutOfMemoryError."""
    block = _of[index].take(requested)
    for hear in heard:
        hear(True, index, block)
    return block


def _give(index: int, block: Block) -> None:
    for hear in heard:
        hear(False, index, block)
    _of[index].allocator.give(block)


def adopt(storage: Any, index: int, counted: bool = True) -> None:
    """This storage belongs to cuda:index. counted: this process has allocated it. Raises OutOfMemoryError."""
    if not torch.cuda._initialized:  # finding the layout has used up C++'s own lazy initialisation
        torch.cuda._lazy_init()
    key, requested = storage._cdata, storage.nbytes()
    old = blocks.get(key)
    if old is not None and old.requested == requested:
        return
    if _uncounted and threading.get_ident() in _uncounted:
        counted = False
    block = _take(index, requested) if counted and requested else None
    if old is not None and old.block is not None:  # the storage was resized: its content was copied
        _give(old.index, old.block)
        old.block = None
    owned = Owned(storage, _ended)
    owned.index, owned.key, owned.requested, owned.block = index, key, requested, block
    blocks[key] = owned


_uncounted: set[int] = set()  # threads


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """For what the CPU's way makes and a GPU's kernel does not: storages that are new here take nothing of a GPU."""
    thread = threading.get_ident()
    if thread in _uncounted:
        yield
        return
    _uncounted.add(thread)
    try:
        yield
    finally:
        _uncounted.discard(thread)


def count(tensor: Any, requested: int) -> None:
    """A storage that was not counted takes so many bytes from now on. Raises OutOfMemoryError."""
    if threading.get_ident() in _uncounted:
        return
    owned = blocks.get(tensor.untyped_storage()._cdata)
    if owned is not None and owned.block is None and requested:
        owned.block = _take(owned.index, requested)


def index_of(storage: Any) -> int:
    """The index of the GPU to which a storage belongs, else -1."""
    owned = blocks.get(storage._cdata)
    return -1 if owned is None else owned.index


def make_room(index: int, requested: int) -> None:
    """Raises OutOfMemoryError if so many bytes do not fit on cuda:index."""
    if not torch.cuda._initialized:
        torch.cuda._lazy_init()
    _of[index].make_room(requested)
