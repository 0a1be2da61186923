"""Keeps what gloo prints while it connects out of the ranks' output.

gloo as torch 2.8 to 2.10 ship it prints two lines whenever a group is made: `[Gloo] Rank 0 is connected to 3 peer
ranks.` They say only that the call will succeed. They differ from rank to rank, so no cell with an init would fold to
one line. They go to descriptor 1 past Python, which leads nowhere meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from nbddp.compat import torch as torch_compat


class GlooSilencer:
    """Descriptor 1 leads nowhere while any thread is inside `connecting`; where gloo is silent nothing is done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._stdout = -1

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        if not torch_compat.gloo_reports_connections():
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._stdout = os.dup(1)
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)
                os.close(null)

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                os.dup2(self._stdout, 1)
                os.close(self._stdout)
