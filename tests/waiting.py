"""Waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(done: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until `done()` is true. Raises AssertionError after so many seconds."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)
