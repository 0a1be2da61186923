"""`torch.cuda.Stream` and `Event`. Work is done at once, so a stream has a name only, and an event the host's time."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from typing import Any

import torch

from nbddp.capabilities.simulated_gpus.on_rank import devices, versions
from nbddp.capabilities.simulated_gpus.on_rank.machine import CUDA

LEAST = -3  # of priorities: torch was compiled for four
_numbers = itertools.count(1)
_current: dict[tuple[int, int], int] = {}  # (thread, device) → the stream's number


def current(index: int) -> int:
    return _current.get((threading.get_ident(), index), 0) if _current else 0


def set_current(index: int, stream: int) -> None:
    _current[threading.get_ident(), index] = stream


class CudaStream(torch.Stream):  # type: ignore[misc]
    """As `torch.cuda.Stream`."""

    def __new__(
        cls,
        device: Any = None,
        priority: int = 0,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int | None = None,
        **more: Any,
    ) -> Any:
        if stream_id is None:
            stream_id = next(_numbers)
            index = torch.cuda._utils._get_device_index(device, optional=True)
            device_index = devices.index_for(torch.device("cuda", index))
        made = super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=CUDA)
        made.__dict__["_priority"] = max(LEAST, min(0, priority))
        return made

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)

    @property
    def _as_parameter_(self) -> Any:
        return ctypes.c_void_p(self.stream_id)

    @property
    def priority(self) -> int:
        return int(self._priority)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, LEAST

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Any:
        index = self.device_index
        self.__dict__.setdefault("_before", []).append((devices.current(), current(index)))
        devices.set_current(index)
        set_current(index, self.stream_id)
        return self

    def __exit__(self, *error: object) -> None:
        device, stream = self._before.pop()
        set_current(self.device_index, stream)
        devices.set_current(device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and (self.stream_id, self.device) == (other.stream_id, other.device)

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device_index))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device=cuda:{self.device_index} cuda_stream={self.stream_id:#x}>"


class AcceleratorStream(torch.Stream):  # type: ignore[misc]
    """As `torch.accelerator.current_stream()`: torch's class, which knows of no capture here."""

    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())


def _is_stream(stream: Any) -> None:
    if stream is not None and not isinstance(stream, torch.Stream):
        raise RuntimeError("expected stream to be a torch.Stream or torch.cuda.Stream object")


AcceleratorStream.__name__ = AcceleratorStream.__qualname__ = "Stream"
CudaStream.__name__ = CudaStream.__qualname__ = "Stream"


class Event(torch.Event):  # type: ignore[misc]
    """As `torch.cuda.Event`."""

    _index: int | None  # the GPU of the first stream that has recorded it

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
        device: Any = None,
    ) -> Any:
        made = super().__new__(cls, device="cuda", enable_timing=enable_timing)
        made.__dict__.update(_timing=enable_timing, _time=None, _index=None)
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        _is_stream(stream)
        index = devices.current() if stream is None else stream.device_index
        if self._index not in (None, index):
            raise RuntimeError(f"Event device {self._index} does not match recording stream's device {index}.")
        self._index = index
        self._time = time.perf_counter()

    def elapsed_time(self, other: Any) -> float:
        if not isinstance(other, Event):
            raise RuntimeError("expected other to be a torch.cuda.Event object")
        if not (self._timing and other._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._time is None or other._time is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if self._index != other._index:
            raise versions.driver_error(versions.NO_HANDLE)
        return float((other._time - self._time) * 1e3)

    @property
    def device(self) -> Any:
        """None before it is recorded: the stream decides."""
        return None if self._index is None else torch.device("cuda", self._index)

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        _is_stream(stream)

    def ipc_handle(self) -> bytes:
        raise versions.driver_error(versions.NO_HANDLE)

    def synchronize(self) -> None: ...

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {'uninitialized' if self._time is None else hex(id(self))}>"


def install() -> None:
    for module in (torch.cuda, torch.cuda.streams):
        module.Stream, module.Event = CudaStream, Event
