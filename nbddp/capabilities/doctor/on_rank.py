"""Which private names of libraries a worker's process lacks."""

from __future__ import annotations

from nbddp.compat import ipykernel, torch
from nbddp.compat.extra import probes
from nbddp.worker.parts import RankWorker


def seams(worker: RankWorker) -> list[str]:
    """Private APIs whose names are missing in this process."""
    names = {**torch.NAMES, **ipykernel.NAMES}
    return [key for key, needed in names.items() if probes.absent(needed)]
