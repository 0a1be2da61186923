"""`torch.cuda.memory_stats` and `memory_snapshot`, from what `memory.py` counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbddp.capabilities.simulated_gpus.on_rank import memory
from nbddp.capabilities.simulated_gpus.on_rank.memory import DeviceMemory, Pool

Counts = Mapping[str, int]  # current, peak, allocated, freed


def _counts(current: int, peak: int, allocated: int) -> Counts:
    return {"current": current, "peak": peak, "allocated": allocated, "freed": allocated - current}


NONE = _counts(0, 0, 0)


def _by_pool(one: DeviceMemory, of_pool: Any, of_all: Counts) -> Mapping[str, Counts]:
    return {"all": of_all, "small_pool": of_pool(one.small), "large_pool": of_pool(one.large)}


def _bytes(pool: Pool) -> Counts:
    return _counts(pool.now, pool.peak, pool.taken)


def _number(pool: Pool) -> Counts:
    return _counts(pool.count, pool.count_peak, pool.count_taken)


def _segments(pool: Pool) -> Counts:
    return _counts(pool.segments, pool.segments, pool.segments)


def _reserved(pool: Pool) -> Counts:
    return _counts(pool.reserved, pool.reserved, pool.reserved)


def _free(pool: Pool) -> Counts:
    return _counts(pool.free, pool.free, pool.free)


def of(index: int) -> Mapping[str, Any]:
    """As the allocator's own table: name → pool → counts."""
    one = memory.of(index)
    both = (one.small, one.large)
    number = _counts(*(sum(getattr(p, n) for p in both) for n in ("count", "count_peak", "count_taken")))
    segments = sum(pool.segments for pool in both)
    taken = sum(pool.taken for pool in both)
    allocated = _by_pool(one, _bytes, _counts(one.now, one.peak, taken))
    unused = one.reserved - one.now
    return {
        "allocation": _by_pool(one, _number, number),
        "active": _by_pool(one, _number, number),
        "segment": _by_pool(one, _segments, _counts(segments, segments, segments)),
        "inactive_split": _by_pool(one, lambda pool: NONE, NONE),
        "allocated_bytes": allocated,
        "active_bytes": allocated,
        "reserved_bytes": _by_pool(one, _reserved, _counts(one.reserved, one.reserved_peak, one.reserved_taken)),
        "inactive_split_bytes": _by_pool(one, _free, _counts(unused, unused, unused)),
        "requested_bytes": {**allocated, "all": _counts(one.requested, one.requested_peak, taken)},
        "oversize_allocations": NONE,
        "oversize_segments": NONE,
        "num_alloc_retries": one.retries,
        "num_ooms": one.failures,
        "num_sync_all_streams": one.retries,
        "num_device_alloc": segments,
        "num_device_free": 0,
        "max_split_size": -1,
    }


def reset_peak(index: int) -> None:
    one = memory.of(index)
    one.peak, one.reserved_peak, one.requested_peak = one.now, one.reserved, one.requested
    for pool in (one.small, one.large):
        pool.peak, pool.count_peak = pool.now, pool.count


def reset_accumulated(index: int) -> None:
    one = memory.of(index)
    one.retries = one.failures = 0
    one.reserved_taken = one.reserved
    for pool in (one.small, one.large):
        pool.taken, pool.count_taken = pool.now, pool.count


def snapshot(*args: Any) -> Mapping[str, Any]:
    """As `torch.cuda.memory._snapshot`: for each GPU a segment with the blocks that are in use."""
    segments = []
    for one in memory.everything():
        mine = [block for block in memory.blocks.values() if block.index == one.index and block.size]
        if mine:
            segments.append(_segment(one, mine))
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False}
    return {"segments": segments, "device_traces": [[] for _ in memory.everything()], "allocator_settings": settings}


def _segment(one: DeviceMemory, blocks: list[memory.Block]) -> Mapping[str, Any]:
    found = [
        {
            "address": block.key,
            "size": block.size,
            "requested_size": block.requested,
            "state": "active_allocated",
            "frames": [],
        }
        for block in sorted(blocks, key=lambda block: block.key)
    ]
    return {
        "device": one.index,
        "address": min(block.key for block in blocks),
        "total_size": one.reserved,
        "allocated_size": one.now,
        "active_size": one.now,
        "requested_size": one.requested,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": found,
    }


def record_history(*args: Any, **kwargs: Any) -> None:
    """A history of allocations is not kept: a snapshot has what is in use."""
