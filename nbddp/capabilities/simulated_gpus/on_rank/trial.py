"""What a child process tries before simulated GPUs are used with a build of torch."""

from __future__ import annotations

from nbddp.capabilities.simulated_gpus.on_rank import study
from nbddp.capabilities.simulated_gpus.probe import FITS


def try_all() -> None:
    """Ends the process with an error, or by a signal, if this build of torch does not fit."""
    study.selftest()
    print(FITS)
