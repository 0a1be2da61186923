"""A rank's record of data loaders: samplers, digests of batches, and whether fetches drew random numbers.

A fetch happens in the program's process, or in a worker of the loader. A forked worker writes into memory that it
shares with the program's process; of a spawned one nothing is known.
"""

from __future__ import annotations

import mmap
import struct
import time
import weakref
import zlib
from copy import copy
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from nbddp.capabilities.sanitizer import on_rank_digest as digest
from nbddp.capabilities.sanitizer.on_rank_settings import class_numbers, lists, statistics
from nbddp.capabilities.sanitizer.recording import Pass
from nbddp.compat.extra import torch as torch_extra

PASSES = 200
ROWS = 60_000  # of all passes whose digests are kept
BATCHES = 4000
FETCHES = 32  # of each worker that are looked at
WORKERS = 32
GENERATORS = ("torch", "random", "numpy")
SLOT = struct.Struct("<IIII")  # worker + 1, number + 1, generator, digest before


class Data:
    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.open: weakref.WeakKeyDictionary[Any, Pass] = weakref.WeakKeyDictionary()
        self.rows = self.batches = 0
        self.kind = torch_extra.loader_iterator() or object
        self.shared = mmap.mmap(-1, SLOT.size * FETCHES * WORKERS)
        self.fetched = 0
        self.current: Pass | None = None
        self.forked: Pass | None = None
        self.opened: Pass | None = None  # whose iterator is being made: workers are given indices then

    def install(self) -> None:
        self.recorder.wrap(DataLoader, "__iter__", self._iter)
        if "__next__" in vars(self.kind):
            self.recorder.wrap(self.kind, "__next__", self._next)
        fetcher = torch_extra.fetcher_of_maps()
        if fetcher is not None:
            self.recorder.wrap(fetcher, "fetch", self._fetch)
        self.recorder.wrap(DistributedSampler, "__iter__", self._indices)

    def _iter(self, original: Any) -> Any:
        def __iter__(loader: Any) -> Any:
            if not self.recorder.on or len(self.recorder.record.passes) >= PASSES or get_worker_info() is not None:
                return original(loader)
            fact = self._facts(loader)
            self._take_shared()
            if loader.num_workers:
                self.forked = fact
            self.opened = fact
            try:
                found = original(loader)
            finally:
                self.opened = None
            if not isinstance(found, self.kind):
                return found
            self.recorder.models.trained.clear()
            self.recorder.record.passes.append(fact)
            self.open[found] = fact
            return found

        return __iter__

    def _indices(self, original: Any) -> Any:
        def __iter__(sampler: Any) -> Any:
            found = original(sampler)
            fact = self.opened or self.current
            if self.recorder.on and fact is not None and fact.order is None:
                self._order(fact, found)
            return found

        return __iter__

    @digest.safely
    def _order(self, fact: Pass, found: Any) -> None:
        if type(found) is type(iter([])):  # whose copy can be read, so that the sampler's own is left alone
            fact.order = hash(tuple(copy(found)))

    def _facts(self, loader: Any) -> Pass:
        number = self.loaders.setdefault(loader, len(self.loaders))
        before = sum(1 for each in self.recorder.record.passes if each.loader == number)
        fact = Pass(number, before, self.recorder.tick(), self.recorder.place(2), workers=loader.num_workers)
        fact.iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
        sampler = getattr(loader, "sampler", None)
        if not isinstance(sampler, DistributedSampler):
            own = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
            sampler = own if isinstance(own, DistributedSampler) else sampler
        fact.sampler = type(sampler).__name__
        if isinstance(sampler, DistributedSampler):
            fact.replicas, fact.rank, fact.seed = sampler.num_replicas, sampler.rank, sampler.seed
            fact.epoch, fact.shuffles, fact.total = sampler.epoch, bool(sampler.shuffle), sampler.total_size
        else:
            fact.shuffles = fact.sampler == "RandomSampler"
            owner = loader.dataset if fact.iterable else sampler
            epoch = getattr(owner, "epoch", None)
            if type(epoch) is int and callable(getattr(owner, "set_epoch", None)):
                fact.epoch = epoch
        fact.keeps_workers = bool(loader.num_workers and loader.persistent_workers)
        if not fact.iterable and hasattr(loader.dataset, "__len__"):
            fact.length = len(loader.dataset)
            fact.content = self._content(loader.dataset)
        if not before:
            self._settings(fact, loader.dataset)
        return fact

    @digest.safely
    def _settings(self, fact: Pass, dataset: Any) -> None:
        fact.classes, fact.statistics, fact.lists = class_numbers(dataset), statistics(dataset), lists(dataset)

    @digest.safely
    def _content(self, dataset: Any) -> int:
        return content(dataset)

    def _next(self, original: Any) -> Any:
        def __next__(iterator: Any) -> Any:
            fact = self.open.get(iterator) if self.recorder.on else None
            if fact is None:
                return original(iterator)
            models = self.recorder.models
            fact.models |= models.trained
            models.trained.clear()
            self.current = fact
            begin = time.perf_counter()
            try:
                batch = original(iterator)
            except StopIteration:
                fact.ended, fact.whole = self.recorder.tick(), True
                raise
            finally:
                self.current = None
            self._note(fact, batch, time.perf_counter() - begin)
            return batch

        return __next__

    @digest.safely
    def _note(self, fact: Pass, batch: Any, waited: float) -> None:
        fact.ended = self.recorder.tick()
        if self.batches >= BATCHES:
            return
        self.batches += 1
        fact.waits.append(round(waited, 6))
        found = [each for each in digest.tensors_in(batch) if type(each) is torch.Tensor]
        rows = digest.rows_of(found) if found else None
        if rows is None:
            return
        fact.sizes.append(rows.numel())
        fact.shapes.append(next(tuple(each.shape[1:]) for each in found if each.dim()))
        self.recorder.later(fact.batches, "append", digest.of_batch(rows))
        if self.rows < ROWS and digest.tells_rows_apart(found):
            self.rows += rows.numel()
            self.recorder.later(fact.rows, "extend", rows)

    # -- random numbers --------------------------------------------------------------------

    def _fetch(self, original: Any) -> Any:
        def fetch(fetcher: Any, index: Any) -> Any:
            if not self.recorder.on or self.fetched >= FETCHES:
                return original(fetcher, index)
            self._see_order(index)
            before = digest.generators()
            try:
                return original(fetcher, index)
            finally:
                self._fetched(before, digest.generators())

        return fetch

    @digest.safely
    def _see_order(self, index: Any) -> None:
        """Whether a sampler of the program, which has an epoch, gives its indices in another order than their own."""
        fact = self.current
        if fact is not None and fact.epoch is not None and fact.replicas is None and isinstance(index, list):
            fact.shuffles = fact.shuffles or any(a > b for a, b in pairwise(index))

    @digest.safely
    def _fetched(self, before: dict[str, int], after: dict[str, int]) -> None:
        info = get_worker_info()
        number, self.fetched = self.fetched, self.fetched + 1
        used = next((name for name in GENERATORS if name in before and before[name] != after.get(name)), None)
        if used is None:
            return
        if info is None:
            if self.current is not None:
                self.current.random_before.append((0, number, used, before[used]))
        elif info.id < WORKERS:
            slot = SLOT.size * (info.id * FETCHES + number)
            SLOT.pack_into(self.shared, slot, info.id + 1, number + 1, GENERATORS.index(used), before[used])

    def _take_shared(self) -> None:
        """What workers have written goes to the pass that forked them."""
        if self.forked is None or len(self.forked.random_before):
            return
        for slot in range(FETCHES * WORKERS):
            worker, number, generator, before = SLOT.unpack_from(self.shared, slot * SLOT.size)
            if worker:
                self.forked.random_before.append((worker, number - 1, GENERATORS[generator], before))
        self.shared[:] = bytes(len(self.shared))

    def close(self) -> None:
        if self.current is None:
            self._take_shared()
        for fact in self.recorder.record.passes:
            if not fact.whole:
                fact.models |= self.recorder.models.trained


# -- what a data set holds -------------------------------------------------------------------------
#
# A digest of lists of files, arrays and tensors with an entry for each sample. With it two passes, or two ranks, are
# known to have the same samples, whatever is drawn at random for them.

ENTRIES = 64  # of each list or array that are looked at, evenly spread
DEEPEST = 4  # data sets within each other
PLAIN = (str, bytes, int, float, bool, type(None), np.generic)
UNKNOWN = b""


def content(dataset: Any, depth: int = 0) -> int:
    """0 if it is not known: nothing in the data set has its length, or an entry is of another type."""
    if depth >= DEEPEST or not hasattr(dataset, "__dict__"):
        return 0
    try:
        length = len(dataset)
    except TypeError:
        return 0
    if isinstance(dataset, torch.utils.data.Subset):
        inner, chosen = content(dataset.dataset, depth + 1), _entries(dataset.indices)
        return zlib.crc32(chosen, inner) if inner and chosen else 0
    found = 0
    for name, value in sorted(vars(dataset).items()):
        for each in value if name == "tensors" and isinstance(value, tuple) else (value,):
            if isinstance(each, (list, tuple, np.ndarray, torch.Tensor, range)) and _length(each) == length > 1:
                part = _entries(each)
                if part == UNKNOWN:
                    return 0
                found = zlib.crc32(name.encode() + part, found)
    return found


def _length(value: Any) -> int:
    return len(value) if not isinstance(value, (np.ndarray, torch.Tensor)) or value.ndim else 0


def _entries(values: Any) -> bytes:
    step = max(1, len(values) // ENTRIES)
    parts = [_entry(values[i]) for i in range(0, len(values), step)]
    return UNKNOWN if UNKNOWN in parts else b"|".join(parts)


def _entry(value: Any) -> bytes:
    """The bytes of an entry; UNKNOWN if it is no plain value: its text may stay while what it holds changes."""
    if isinstance(value, PLAIN):
        return repr(value).encode(errors="replace")
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout is not torch.strided or value.requires_grad:
            return UNKNOWN
        row = value.reshape(-1)
        return repr((tuple(value.shape), row[:: max(1, row.numel() // ENTRIES)].tolist())).encode()
    if isinstance(value, np.ndarray) and value.dtype != object:
        flat = value.reshape(-1)
        return repr((value.shape, flat[:: max(1, flat.size // ENTRIES)].tolist())).encode()
    if isinstance(value, (list, tuple)) and len(value) <= ENTRIES:
        parts = [_entry(each) for each in value]
        return UNKNOWN if UNKNOWN in parts else b"(" + b",".join(parts) + b")"
    return UNKNOWN
