"""Simulated GPUs inside a rank: `install` makes torch believe that this process has the given cards.

A tensor of a simulated GPU is torch's own, with the device cuda:i and CUDA's dispatch keys, for C++ too. Its bytes lie
in the host's memory, and kernels registered for CUDA's keys call those of the CPU. docs/explanation/simulated_gpus.md
explains the parts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module

from nbddp.capabilities.simulated_gpus import cards as known
from nbddp.capabilities.simulated_gpus.cards import Card

PARTS = (  # modules of this folder with a function `install`, in this order
    "streams", "torch_cuda", "statistics", "graphs", "generators", "storages", "old_types",
    "data_parallel", "refusals", "extensions", "cuda_only", "nested", "operators", "nccl", "processes",
)  # fmt: skip
AGAIN = "NBDDP_SIMULATED_GPUS"  # what a spawned process is to have, as it is typed: 4xT4
SHARED = "NBDDP_SIMULATED_GPUS_MEMORY"  # the file in which processes write what they take; children inherit it
_installed: tuple[Card, ...] | None = None


def install(cards: Sequence[Card]) -> None:
    """Simulates these GPUs, those of the machine, in this process. `CUDA_VISIBLE_DEVICES` selects among them as the
    driver does: when CUDA is first used.

    Call it before the first backward, and before CUDA is used. Raises RuntimeError, and nothing has been changed, if
    this build of torch is not laid out as known. `probe.unusable` tries that in a child process first.
    """
    global _installed
    if _installed is not None:
        if tuple(cards) != _installed:
            raise RuntimeError("this process simulates other GPUs already; they last as long as the process")
        return
    from nbddp.capabilities.simulated_gpus.on_rank import devices, machine

    machine.find_layout()
    devices.have(cards)
    machine.install_hooks()
    for part in PARTS:
        import_module(f"{__name__}.{part}").install()
    _installed = tuple(cards)


def again() -> None:
    """In a process that one with simulated GPUs has spawned."""
    asked = os.environ.get(AGAIN)
    if asked:
        install(known.cards_of(asked))
