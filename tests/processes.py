"""Which of some processes run."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def still_running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended, as a zombie has."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it has ended since the last look
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
