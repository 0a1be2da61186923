"""The part of a worker and the request of `--sanitize`. What records is imported by a run under the option."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from nbddp.protocol import pickling
from nbddp.worker.parts import RankWorker

RECORDER = "nbddp.capabilities.sanitizer.on_rank_recorder"


def part(worker: RankWorker) -> Any:
    from nbddp.capabilities.sanitizer.on_rank_recorder import SanitizerRecorder

    return SanitizerRecorder(worker)


def sanitized(worker: RankWorker, buffers: Sequence[Any]) -> list[bytes]:
    """What the last program under `--sanitize` left; None if none has run here."""
    record = worker.parts["sanitizer"].record if RECORDER in sys.modules else None
    return [pickling.pack_answer(record if record is not None and record.run else None)]
