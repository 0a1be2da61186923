"""Waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def until(done: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until `done()` is true; what it is. A file that it does not find yet is waited for, too. Raises
    AssertionError after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        with suppress(FileNotFoundError):
            if found := done():
                return found
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)
