"""How much of a machine its workers use, at little cost: CPU time and memory of each, and how busy the GPUs are.

A worker's memory is its proportional share of pages, which the kernel adds up page by page in milliseconds, so it is
asked for only of the ranks that the owner names; CPU time and resident pages cost microseconds. NVML stays open once it
was asked, since to open it takes longer than to ask.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import psutil
import pynvml

from nbddp.agent import devices, hardware
from nbddp.agent.identity import Identity


def of_worker(pid: int, started: float, memory: bool) -> dict[str, Any]:
    """`cpu`: seconds so far; `resident`: bytes; `memory`: bytes, with its share of pages that others have too, if
    wanted. Empty once the process has ended."""
    process = Identity(pid, started).process()
    if process is None:
        return {}
    try:
        times, resident = process.cpu_times(), process.memory_info().rss
    except psutil.NoSuchProcess:
        return {}
    found: dict[str, Any] = {"cpu": times.user + times.system, "resident": resident}
    return {**found, "memory": hardware.memory_of(process)} if memory else found


def of_workers(workers: Iterable[Any], memory: Collection[int]) -> dict[int, dict[str, Any]]:
    """The same by rank, of children of an agent's. memory: the ranks of which that is wanted."""
    return {child.rank: of_worker(child.pid, child.started, child.rank in memory) for child in workers}


class Gpus:
    """The GPUs that CUDA sees, by index, as `%ddp topology` numbers them. `why`: why NVML tells nothing, or empty."""

    def __init__(self, env: Mapping[str, str] = os.environ):
        self.why = ""
        self._handles: dict[int, Any] = {}
        try:
            found = devices.visible(devices.all_gpus(), env)
            if found:
                pynvml.nvmlInit()
            for facts in found:
                if "position" in facts:
                    self._handles[facts["index"]] = pynvml.nvmlDeviceGetHandleByIndex(facts["position"])
        except pynvml.NVMLError as e:
            self.why = str(e)

    def use(self) -> dict[int, dict[str, Any]]:
        """Index → `busy` (percent of the last moments) and `memory` (bytes in use); None for what NVML refuses."""
        return {index: {"busy": _busy(handle), "memory": _memory(handle)} for index, handle in self._handles.items()}


def _busy(handle: Any) -> int | None:
    try:
        return int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except pynvml.NVMLError:
        return None


def _memory(handle: Any) -> int | None:
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except pynvml.NVMLError:
        return None
