"""`--env` on a rank that lives."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from nbddp.worker.parts import RankWorker


def environment(worker: RankWorker, buffers: Sequence[Any], *, variables: Mapping[str, str | None]) -> list[bytes]:
    """Variables that a living process can take; None takes one away."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return []
