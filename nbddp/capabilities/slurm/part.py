"""What a pool says of Slurm: that a job ends soon, before a cell and while one runs; and that there is one to use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbddp.capabilities.slurm.held_jobs import HeldJobs

if TYPE_CHECKING:
    from nbddp.execution.execution import Execution
    from nbddp.pool.state import PoolState


class SlurmPart:
    """`jobs`: those that the pool holds."""

    def __init__(self, pool: PoolState):
        self.jobs = HeldJobs()
        self.holds, self.given_back = self.jobs.words, self.jobs.given_back
        self.released, self.left = self.jobs.release, self.jobs.leave

    def notes(self) -> list[str]:
        return list(filter(None, [self.jobs.reminder()]))

    def run_begins(self, run: Execution) -> None:
        if run.request.is_numbered:
            self.jobs.remind(run.tell)

    def run_ended(self, run: Execution) -> None:
        self.jobs.stop_reminding()
