"""The part of a rank that has simulated GPUs: installs them before any program, and explains mistakes with devices."""

from __future__ import annotations

import os
from types import FrameType
from typing import TYPE_CHECKING

from nbddp.capabilities.simulated_gpus.cards import cards_of
from nbddp.capabilities.simulated_gpus.mistakes import Placed, explain, placed
from nbddp.capabilities.simulated_gpus.on_rank import install
from nbddp.deadlock.on_rank import call_log

if TYPE_CHECKING:
    from nbddp.errors import Raised
    from nbddp.worker.parts import RankWorker


class SimulatedDevices:
    """Says more of exceptions about devices. `_frames`: of the exception that is read, what its user's frames held."""

    def __init__(self) -> None:
        self._frames: list[list[Placed]] = []

    def values(self, frame: FrameType, line: str) -> list[tuple[str, str]]:
        """Adds nothing to the values of a frame; notes where they are."""
        import torch

        self._frames.append(placed(frame, line, torch))
        return []

    def note(self, raised: Raised) -> str:
        import torch

        frames, self._frames = self._frames, []
        gpus = torch.cuda.device_count()
        return explain(raised, frames, gpus, torch.cuda.current_device() if gpus else 0)


def _share_memory(log: str) -> None:
    """The ranks of a node have their GPUs' memory together: they write what they take in one file of the pool's."""
    name = f"simulated-gpus-{os.environ.get('GROUP_RANK', '0')}"
    os.environ["NBDDP_SIMULATED_GPUS_MEMORY"] = os.path.join(os.path.dirname(log), name)


def part(worker: RankWorker) -> SimulatedDevices:
    """Raises RuntimeError, and has changed nothing, if this torch is not laid out as known."""
    _share_memory(worker.log_path)
    install(cards_of(str(worker.pool_options["simulate_gpus"])))
    call_log.STANDS_FOR["nccl"] = "gloo"
    return SimulatedDevices()
