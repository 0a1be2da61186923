"""Imports what capabilities have for ranks. A process that forks workers imports this, so that no worker has to."""

from __future__ import annotations

from nbddp.protocol.capability import load, rows
from nbddp.worker import rank_guard

rank_guard.guard()
for row in rows():
    for target in (*(part.target for part in row.rank), *row.requests.values(), *row.questions.values()):
        load(target)
