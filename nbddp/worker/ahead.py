"""Imports what capabilities have for ranks. A process that forks workers imports this, so that no worker has to.

What an option of the pool asks for is left out: most pools do not have it.
"""

from __future__ import annotations

from nbddp.protocol.capability import load, rows
from nbddp.worker import rank_guard

rank_guard.guard()
for row in rows():
    parts = [part.target for part in row.rank if not part.when.startswith("pool:")]
    for target in (*parts, *row.requests.values(), *row.questions.values()):
        load(target)
