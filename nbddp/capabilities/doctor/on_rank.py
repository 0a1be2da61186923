"""Which private names of libraries a worker's process lacks."""

from __future__ import annotations

from nbddp.compat import ipykernel
from nbddp.compat.extra import probes
from nbddp.compat.extra import torch as torch_extra
from nbddp.worker.parts import RankWorker


def seams(worker: RankWorker) -> list[str]:
    """Private APIs whose names are missing in this process."""
    names = {**torch_extra.NAMES, **ipykernel.NAMES}
    return [key for key, needed in names.items() if probes.absent(needed)]
