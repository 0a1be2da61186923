"""What a pool has of its panels: while a program runs, an open panel is heard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nbddp.execution.events import ExtraPoller

if TYPE_CHECKING:
    from nbddp.execution.execution import Execution
    from nbddp.pool.state import PoolState


class PanelPart:
    """`protocol.pool_parts` says when its methods are called. `beside`: what a run hears while it waits."""

    def __init__(self, pool: Callable[[], PoolState | None]):
        self.beside: Callable[[], ExtraPoller | None] = lambda: None

    def run_begins(self, run: Execution) -> None:
        if run.request.is_program and (beside := self.beside()) is not None:
            run.events.hear(beside)
