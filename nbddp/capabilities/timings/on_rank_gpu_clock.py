"""Points in time on a GPU, told on the host's clock.

An event says when a stream came to it. Its host time follows from a base: an event on a stream of our own, and the
host's time of that event. The stream has no other work, so the event is done at once. `elapsed_time` is float32
milliseconds: 0.06 ms apart after ten minutes, 8 ms after a day. So a mark is never far from its base. A step that
begins ten seconds after its base gets a new one (1 µs), which all marks of the step share. What has come to pass is
read then, and its events are used again. While a CUDA graph is captured no event may be recorded: who marks asks
`captures` first.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from nbddp.compat.clock import clock

RENEW = 10_000_000_000  # nanoseconds
now = clock.perf_counter_ns


class GpuMark:
    """One point: its event until that has been read, then `at`, nanoseconds of the host's clock."""

    __slots__ = ("at", "base", "event", "host")

    def __init__(self, event: Any, base: Any, host: int) -> None:
        self.event, self.base, self.host, self.at = event, base, host, 0

    def read(self) -> int:
        """Nanoseconds; waits for the stream."""
        if self.event is not None:
            self.event.synchronize()
            self.at = self.host + round(self.base.elapsed_time(self.event) * 1e6)
            self.event = self.base = None
        return self.at


class DeviceClock:
    """The marks of one process, on all of its GPUs."""

    def __init__(self) -> None:
        self._bases: dict[Any, tuple[Any, int]] = {}
        self._streams: dict[Any, Any] = {}
        self._unread: deque[tuple[Any, GpuMark]] = deque()
        self._free: dict[Any, list[Any]] = {}

    def captures(self) -> bool:
        """Whether the current stream records a CUDA graph."""
        import torch

        return bool(torch.cuda.is_current_stream_capturing())

    def mark(self, device: Any) -> GpuMark:
        """Where the current stream of a GPU is to come now."""
        import torch

        return self._mark(device, torch.cuda.current_stream(device))

    def result_of(self, future: Any, device: Any) -> GpuMark | int:
        """When the result of a collective is there that the GPU works at (NCCL's future is done once it is queued).

        Its end is waited for by a stream of our own, so no stream of the program's waits. One that failed ends now: the
        program meets its error where it waits itself.
        """
        import torch

        stream = self._stream(device)
        try:
            with torch.cuda.stream(stream):
                future.wait()
        except Exception:
            return now()
        return self._mark(device, stream)

    def begin(self, device: Any) -> None:
        """A step begins on this GPU."""
        self._read_what_is_past()
        if device in self._bases and now() - self._bases[device][1] > RENEW:
            del self._bases[device]

    def _read_what_is_past(self) -> None:
        """The oldest first."""
        while self._unread:
            device, mark = self._unread.popleft()
            event = mark.event
            try:
                if event is not None and not event.query():
                    self._unread.appendleft((device, mark))
                    return
                mark.read()
            except RuntimeError:  # an error of the program's, which its own next call of CUDA raises
                return
            if event is not None:
                self._free.setdefault(device, []).append(event)

    def _mark(self, device: Any, stream: Any) -> GpuMark:
        base, host = self._base(device)
        free = self._free.get(device)
        event = free.pop() if free else self._event()
        event.record(stream)
        mark = GpuMark(event, base, host)
        self._unread.append((device, mark))
        return mark

    def _base(self, device: Any) -> tuple[Any, int]:
        found = self._bases.get(device)
        if found is None:
            base = self._event()
            base.record(self._stream(device))
            base.synchronize()
            found = self._bases[device] = (base, now())
        return found

    def _event(self) -> Any:
        import torch

        return torch.cuda.Event(enable_timing=True)

    def _stream(self, device: Any) -> Any:
        if device not in self._streams:
            import torch

            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]
