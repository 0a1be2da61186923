"""A rank's record of reads that wait for a GPU: a number of the loss, and `torch.cuda.synchronize`.

A read counts where the program itself makes it in training: of the loss before its backward, or of one number after it.
What an evaluation or a rollout reads is not counted, nor what torch or a library reads, nor a wait by a clock's side.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from nbddp.capabilities.sanitizer import on_rank_digest as digest
from nbddp.capabilities.sanitizer.recording import HostRead

# Tensor.to is left alone: subclasses of Tensor find their own methods by it
READS = ("item", "tolist", "cpu", "__float__", "__int__", "__bool__", "__repr__", "__format__")
SHOWN = {"__repr__": "print", "__format__": "f-string", "__float__": "float()", "__int__": "int()", "__bool__": "if"}
CLOCKS = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "elapsed_time", "timeit"}
PLACES = 64
WAITS = 64  # of each place that are timed


class HostReads:
    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.found: dict[int, HostRead] = {}
        self.early: dict[int, list[float]] = {}  # reads of what may be the loss, until its backward decides
        self.names: dict[int, str] = {}
        self.trained = False  # whether a backward came since the last forward
        self.simulated = False

    def install(self) -> None:
        self.simulated = bool(self.recorder.worker.pool_options.get("simulate_gpus"))
        for name in READS:
            self.recorder.wrap(torch.Tensor, name, lambda original, name=name: self._read(original, name), graphs=True)
        self.recorder.wrap(torch.cuda, "synchronize", self._synchronize, graphs=True)

    def _read(self, original: Any, name: str) -> Any:
        compiling = torch.compiler.is_compiling

        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling() or not tensor.is_cuda or not self.recorder.on or tensor.numel() != 1:
                return original(tensor, *args, **kwargs)
            early = not self.trained
            if not torch.is_grad_enabled() or (early and not tensor.requires_grad):
                return original(tensor, *args, **kwargs)
            return self._timed(name, early, lambda: original(tensor, *args, **kwargs))

        return read

    def _synchronize(self, original: Any) -> Any:
        compiling = torch.compiler.is_compiling

        def synchronize(*args: Any, **kwargs: Any) -> Any:
            if compiling() or not self.recorder.on or not torch.cuda.is_initialized() or _by_a_clock():
                return original(*args, **kwargs)
            return self._timed("torch.cuda.synchronize", False, lambda: original(*args, **kwargs))

        return synchronize

    def _timed(self, name: str, early: bool, do: Callable[[], Any]) -> Any:
        frame = sys._getframe(2)
        own = threading.get_ident() == self.recorder.thread and self.recorder.is_programs(frame.f_code.co_filename)
        began = time.perf_counter()
        found = do()
        if own:
            self._note(name, early, time.perf_counter() - began)
        return found

    @digest.safely
    def _note(self, name: str, early: bool, waited: float) -> None:
        place = self.recorder.place(3)
        self.names.setdefault(place, SHOWN.get(name, name))
        if early:
            self.early.setdefault(place, []).append(waited)
        else:
            self._add(place, waited)

    def _add(self, place: int, waited: float) -> None:
        record = self.recorder.record
        fact = self.found.get(place)
        if fact is None:
            if len(self.found) >= PLACES:
                return
            fact = self.found[place] = HostRead(self.names[place], place, simulated=self.simulated)
            record.reads.append(fact)
        fact.count += 1
        step = max(record.step_counts.values(), default=0)
        if step != fact.last_step:
            fact.last_step, fact.steps = step, fact.steps + 1
        fact.since = fact.since or time.perf_counter()
        fact.seconds = time.perf_counter() - fact.since
        if len(fact.waits) < WAITS and not self.simulated:
            fact.waits.append(round(waited, 6))

    # -- what models tell ------------------------------------------------------------------

    def forward_begins(self) -> None:
        self.trained = False

    def backward_begins(self) -> None:
        """A place that read once since the last backward may have read the loss; one that read often did not."""
        self.trained = True
        for place, waits in self.early.items():
            if len(waits) == 1:
                self._add(place, waits[0])
        self.early = {}

    def close(self) -> None:
        pass


def _by_a_clock() -> bool:
    """Whether the function that synchronizes also asks for the time: then it measures."""
    return not CLOCKS.isdisjoint(sys._getframe(2).f_code.co_names)
