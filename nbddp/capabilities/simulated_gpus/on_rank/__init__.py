"""Simulated GPUs inside a rank: `install` makes torch believe that this process has the given cards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbddp.capabilities.simulated_gpus.cards import Card


def install(cards: Sequence[Card]) -> None:
    """Simulate these GPUs in this process. `CUDA_VISIBLE_DEVICES` selects among them, as the driver does.

    Call it before the first use of CUDA and before the first backward. Raises RuntimeError, and has changed nothing,
    if this build of torch is not laid out as known (`probe.unusable` tries that in a child process first).
    """
    from nbddp.capabilities.simulated_gpus.on_rank import study

    study.install(len(cards), cards[0].name if cards else None, cards[0].memory if cards else None)
