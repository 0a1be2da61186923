"""What a pool says of Slurm: that a job ends soon, before a cell and while one runs; and that there is one to use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbddp.capabilities.slurm.host_source import offer

if TYPE_CHECKING:
    from nbddp.execution.execution import Execution
    from nbddp.pool.state import PoolState


class SlurmPart:
    def __init__(self, pool: PoolState):
        self._pool = pool

    def notes(self) -> list[str]:
        return list(filter(None, [self._pool.elsewhere.reminder()]))

    def offers(self) -> list[str]:
        return list(filter(None, [offer()]))

    def run_begins(self, run: Execution) -> None:
        if run.request.is_numbered:
            self._pool.elsewhere.remind(run.tell)

    def run_ended(self, run: Execution) -> None:
        self._pool.elsewhere.stop_reminding()
