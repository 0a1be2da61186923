"""`--trace` of a script that a terminal runs."""

from __future__ import annotations

from pathlib import Path

from nbddp.capabilities.trace.command import trace
from nbddp.capabilities.trace.written import written
from nbddp.errors import BadInput
from nbddp.execution.protocols import IdleRanks


def write(ranks: IdleRanks, file: str) -> str:
    """Write the merged trace of the run that has ended. Returns what was written, or why nothing: the script has run
    all the same."""
    try:
        return str(written(trace(ranks), Path(file)))
    except BadInput as e:
        return str(e)
