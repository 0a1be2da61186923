"""The events of a run, on one queue. Any thread and a signal's handler may put; one thread takes.

Where something else is to be heard while that thread waits, it sleeps in an `ExtraPoller`, and a byte on a pipe wakes
it.
"""

from __future__ import annotations

import os
import queue
import time
from contextlib import suppress
from typing import Any, Protocol

Event = tuple[str, int, Any]  # what kind, of which rank, and what


class ExtraPoller(Protocol):
    """Something else that is heard while a run waits."""

    def wait(self, descriptor: int, seconds: float | None) -> None:
        """Handle what comes until the descriptor can be read, or the time is over (None: never)."""

    def close(self) -> None:
        """Nothing is heard here any more."""


class Events:
    """The queue. Without an `ExtraPoller` it is a plain one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._poller: ExtraPoller | None = None
        self._ends = (-1, -1)
        self._asleep = False

    def put(self, event: Event) -> None:
        self._queue.put(event)
        if self._asleep:
            with suppress(BlockingIOError):  # it is full: who sleeps wakes by what is there
                os.write(self._ends[1], b".")

    def get_nowait(self) -> Event:
        return self._queue.get_nowait()

    def empty(self) -> bool:
        return self._queue.empty()

    def get(self, timeout: float | None) -> Event:
        """The next event. Raises queue.Empty after `timeout` seconds."""
        if self._poller is None:
            return self._queue.get(timeout=timeout)
        end = None if timeout is None else time.monotonic() + timeout
        self._asleep = True
        try:
            while True:
                with suppress(queue.Empty):
                    return self._queue.get_nowait()
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise queue.Empty
                self._poller.wait(self._ends[0], left)
                with suppress(BlockingIOError):
                    os.read(self._ends[0], 4096)
        finally:
            self._asleep = False

    def hear(self, poller: ExtraPoller) -> None:
        """From here on this is heard as well; nothing happens if something is."""
        if self._poller is not None:
            return
        self._ends = os.pipe()
        for end in self._ends:
            os.set_blocking(end, False)
        self._poller = poller

    def close(self) -> None:
        """Nothing else is heard any more."""
        poller, self._poller = self._poller, None
        if poller is not None:
            poller.close()
            for end in self._ends:
                os.close(end)
