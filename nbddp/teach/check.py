"""The checks of all exercises: `from nbddp.teach import check; check.gpus_of(gpus_of)`.

Each is an `Exercise`: called with what the learner wrote it prints one line, `ok` or what is wrong and why, and
returns it as an object with `.ok` and `.line`; `hint=True` adds the next hint. This file is the list of
them and no more.
"""

from __future__ import annotations

from nbddp.teach.answer import Answer, Exercise
from nbddp.teach.checks.placement import gpus_of, place_of
from nbddp.teach.checks.restart import Checkpoint
from nbddp.teach.checks.slurm import nodes_of, variables_of
from nbddp.teach.running import on

__all__ = [
    "Answer",
    "Checkpoint",
    "Exercise",
    "gpus_of",
    "nodes_of",
    "on",
    "place_of",
    "variables_of",
]
