"""Threads of nbddp's on a rank, whose beginning nobody waits for.

`Thread.start` waits until the new thread says that it has begun. Where a program has left no memory, the thread dies
before it does, and whoever has started it waits for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nbddp.compat.clock import clock

BEGINS = 5.0  # seconds in which a thread begins, also on a busy machine


class OwnThread(threading.Thread):
    """A daemon thread that calls `target`. It may never come to that."""

    def __init__(self, name: str, target: Callable[..., object], *args: Any) -> None:
        super().__init__(name=name, target=target, args=args, daemon=True)
        self._over, self._asked = threading.Event(), clock.monotonic()
        with suppress(AttributeError):  # where Python has another way, its own behaviour stays
            self._started.wait = lambda: None  # type: ignore[attr-defined]

    def begin(self) -> bool:
        """False if the program's limits allow no more threads, or no memory for one."""
        try:
            self.start()
        except (RuntimeError, MemoryError):
            return False
        return True

    def has_died_early(self) -> bool:
        """Whether it has not begun, and will not."""
        return self.native_id is None and clock.monotonic() - self._asked > BEGINS

    def run(self) -> None:
        try:
            super().run()
        except MemoryError:  # whose program has left none
            pass
        finally:
            self._over.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for so long until its function has returned. Without a time: only if it has begun, then to its end."""
        if timeout is not None:
            self._over.wait(timeout)
        elif self.is_alive():
            super().join()
