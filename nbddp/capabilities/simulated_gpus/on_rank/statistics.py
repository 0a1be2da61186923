"""`torch.cuda.memory_stats` and `memory_snapshot`, from what `allocator.py` counts."""

from __future__ import annotations

import sys
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from nbddp.capabilities.simulated_gpus.on_rank import memory, torch_cuda
from nbddp.capabilities.simulated_gpus.on_rank.allocator import Allocator, Block, Count

NAMES = {  # of torch's table → of Counts
    "allocation": "allocation",
    "segment": "segment",
    "active": "allocation",
    "inactive_split": "inactive_split",
    "allocated_bytes": "allocated_bytes",
    "reserved_bytes": "reserved_bytes",
    "active_bytes": "allocated_bytes",
    "inactive_split_bytes": "inactive_split_bytes",
    "requested_bytes": "requested_bytes",
}
NONE = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}


Facts = Mapping[str, Any]


def of(index: int) -> Facts:
    """As the allocator's own table: name → pool → counts."""
    one = _allocator(index)
    return {
        "num_alloc_retries": one.retries,
        "num_ooms": one.failures,
        "max_split_size": -1,
        "num_sync_all_streams": one.synchronised,
        "num_device_alloc": one.driver_gave,
        "num_device_free": one.driver_took,
        **{name: _by_pool(one, kind) for name, kind in NAMES.items()},
        "oversize_allocations": NONE,
        "oversize_segments": NONE,
    }


def _by_pool(one: Allocator, kind: str) -> Mapping[str, Mapping[str, int]]:
    pools = {"all": one.both, "small_pool": one.small.counts, "large_pool": one.large.counts}
    return {pool: _counted(getattr(counts, kind)) for pool, counts in pools.items()}


def _counted(count: Count) -> Mapping[str, int]:
    return {"current": count.now, "peak": count.peak, "allocated": count.came, "freed": count.came - count.now}


def _allocator(index: int) -> Allocator:
    if not 0 <= index < len(memory.everything()):
        raise RuntimeError("Invalid device argument \t: did you call init?")
    one = memory.of(index).allocator
    one.settle()
    return one


def _counts(index: int) -> list[Count]:
    one = _allocator(index)
    return [count for counts in (one.both, one.small.counts, one.large.counts) for count in vars(counts).values()]


def reset_peak(index: int) -> None:
    for count in _counts(index):
        count.peak = count.now


def reset_accumulated(index: int) -> None:
    one = _allocator(index)
    one.retries = one.failures = one.driver_gave = one.driver_took = one.synchronised = 0
    for count in _counts(index):
        count.came = count.now


def snapshot(*args: Any) -> Facts:
    """As `torch.cuda.memory._snapshot`: for each GPU its segments with their blocks."""
    segments = [_segment(one.index, chain) for one in memory.everything() for chain in one.allocator.segments()]
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False}
    traces = [[*_history[0].of[one.index]] if _history else [] for one in memory.everything()]
    return {"segments": segments, "device_traces": traces, "allocator_settings": settings}


def _segment(index: int, chain: list[Block]) -> Facts:
    first, used = chain[0], [block for block in chain if block.used]
    allocated = sum(block.size for block in used)
    return {
        "device": index,
        "address": first.address,
        "total_size": sum(block.size for block in chain),
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(block.requested for block in used),
        "stream": first.stream,
        "segment_type": "small" if first.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [_block(block) for block in chain],
    }


def _block(block: Block) -> Facts:
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested,
        "state": "active_allocated" if block.used else "inactive",
        "frames": [],
    }


class History:
    """What was allocated and freed since somebody asked for it, the newest of each GPU, as torch's snapshots tell it.
    most: entries of each GPU. frames: whether an allocation has those of Python."""

    def __init__(self, most: int, frames: bool) -> None:
        self.of: dict[int, deque[Mapping[str, Any]]] = defaultdict(lambda: deque(maxlen=most))
        self._frames = frames

    def hear(self, taken: bool, index: int, block: Block) -> None:
        about = {"addr": block.address, "size": block.size, "stream": block.stream, "time_us": time.time_ns() // 1000}
        frames = _frames() if taken and self._frames else []
        for action in ("alloc",) if taken else ("free_requested", "free_completed"):
            self.of[index].append({"action": action, **about, "frames": frames})


_history: list[History] = []  # at most one


class HistoryFrame(TypedDict):
    """As torch's snapshots have it."""

    filename: str
    name: str
    line: int


def _frames() -> list[HistoryFrame]:
    """Python's frames, the innermost first."""
    walked = traceback.walk_stack(sys._getframe(4))
    return [{"filename": f.f_code.co_filename, "name": f.f_code.co_name, "line": line} for f, line in walked]


def record_history(enabled: str | bool | None = "all", context: str | None = "all", *more: Any) -> None:
    """As `torch._C._cuda_record_memory_history`: None ends it. `more`: what stacks have, and how many entries are
    kept."""
    for old in _history:
        memory.heard.remove(old.hear)
    _history.clear()
    if enabled:
        most = more[1] if len(more) > 1 and isinstance(more[1], int) else sys.maxsize
        _history.append(History(most, context not in (None, "state")))
        memory.heard.append(_history[0].hear)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {  # of torch._C
    "_cuda_memoryStats": of,
    "_cuda_resetPeakMemoryStats": reset_peak,
    "_cuda_resetAccumulatedMemoryStats": reset_accumulated,
    "_cuda_memorySnapshot": snapshot,
    "_cuda_isHistoryEnabled": lambda: bool(_history),
    "_cuda_record_memory_history": record_history,
    "_cuda_record_memory_history_legacy": record_history,
    "_accelerator_getDeviceStats": of,
    "_accelerator_resetPeakStats": reset_peak,
    "_accelerator_resetAccumulatedStats": reset_accumulated,
}


def install() -> None:
    torch_cuda.put(FUNCTIONS)
