"""What a pool says of Slurm: that a job ends soon, before a cell and while one runs; and that there is one to use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nbddp.capabilities.slurm.host_source import offer

if TYPE_CHECKING:
    from nbddp.execution.execution import Execution
    from nbddp.pool.state import PoolState


class SlurmPart:
    """`protocol.pool_parts` says when its methods are called."""

    def __init__(self, pool: Callable[[], PoolState | None]):
        self._pool = pool

    def notes(self) -> list[str]:
        pool = self._pool()
        return [] if pool is None else list(filter(None, [pool.elsewhere.reminder()]))

    def offers(self) -> list[str]:
        return list(filter(None, [offer()]))

    def run_begins(self, run: Execution) -> None:
        pool = self._pool()
        if pool is not None and run.request.is_numbered:
            pool.elsewhere.remind(run.tell)

    def run_ended(self, run: Execution) -> None:
        pool = self._pool()
        if pool is not None:
            pool.elsewhere.stop_reminding()
