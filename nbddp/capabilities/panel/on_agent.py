"""How much of a machine its workers use, at little cost: CPU time and memory of each, and how busy the GPUs are.

A worker's memory is its proportional share of pages. Linux adds that up page by page, in milliseconds. So it is read
only for the ranks that the owner names; CPU time and resident pages cost microseconds. NVML stays open once it was
asked, since to open it takes longer than to ask.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypedDict

import psutil
import pynvml

from nbddp.agent import hardware
from nbddp.agent.process_id import ProcessId
from nbddp.agent.server import WORKER, NodeAgent, Peer
from nbddp.capabilities.gpus import on_agent as devices
from nbddp.protocol.codec import Message


class WorkerUse(TypedDict, total=False):
    cpu: float  # seconds so far
    resident: int  # bytes
    memory: int  # bytes, with its share of pages that others have too


def use(agent: NodeAgent, peer: Peer, message: Message) -> Message:
    """What the workers use of this machine, and the seconds of CPU that it took to find out. memory: ranks whose memory
    is wanted too, which costs more."""
    gpus, pids = agent.part(_opened)
    began = time.thread_time()
    found = pids.of([c for c in agent.children.values() if c.kind == WORKER], message["memory"])
    took = time.thread_time() - began
    return {"workers": found, "took": took, "gpus": gpus.use(), "why": gpus.why}


def _opened(agent: NodeAgent) -> tuple[Gpus, WorkerPids]:
    return Gpus(), WorkerPids()


class WorkerPids:
    """The workers among an agent's children, whose pids are their own until it has waited for them: each is found
    once."""

    def __init__(self) -> None:
        self._found: dict[ProcessId, psutil.Process] = {}

    def of(self, workers: Iterable[Any], memory: Collection[int]) -> dict[int, WorkerUse]:
        """Rank → what it uses; with `memory` for these ranks. Empty once the process has ended."""
        named = {child.rank: ProcessId(child.pid, child.started) for child in workers}
        self._found = {identity: p for identity, p in self._found.items() if identity in named.values()}
        return {rank: self._of(identity, rank in memory) for rank, identity in named.items()}

    def _of(self, identity: ProcessId, memory: bool) -> WorkerUse:
        process = self._found.get(identity) or identity.process()
        if process is None:
            return {}
        self._found[identity] = process
        try:
            with process.oneshot():  # its files are read once
                if process.status() == psutil.STATUS_ZOMBIE:
                    return {}
                times, resident = process.cpu_times(), process.memory_info().rss
        except psutil.NoSuchProcess:
            return {}
        found: WorkerUse = {"cpu": times.user + times.system, "resident": resident}
        if memory:
            found["memory"] = hardware.memory_of(process)
        return found


class Gpus:
    """The GPUs that CUDA sees, by index, as `%ddp topology` numbers them. `why`: the reason if NVML fails, or empty."""

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

    def use(self) -> dict[int, dict[str, int | None]]:
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
