"""The part of a rank that has simulated GPUs: it installs them before any program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbddp.capabilities.simulated_gpus.cards import cards_of
from nbddp.capabilities.simulated_gpus.on_rank import install
from nbddp.deadlock.on_rank import call_log

if TYPE_CHECKING:
    from nbddp.worker.parts import RankWorker


class SimulatedDevices:
    """Says more of exceptions about devices."""


def part(worker: RankWorker) -> SimulatedDevices:
    """Raises RuntimeError, and has changed nothing, if this torch is not laid out as known."""
    install(cards_of(str(worker.pool_options["simulate_gpus"])))
    call_log.STANDS_FOR["nccl"] = "gloo"
    return SimulatedDevices()
