"""A run and its attempts: after a failure all processes are new, and where nodes may come and go, those there are."""

from __future__ import annotations

import time

from nbddp.errors import RunFailed, RunHung, WorkerFailed
from nbddp.execution import report
from nbddp.execution.execution import Execution
from nbddp.output.screens import Screen
from nbddp.pool.state import PoolState
from nbddp.protocol.request import Request


def carry_out(life: PoolState, request: Request, screen: Screen) -> Execution:
    """The attempt that ended well. Raises the last one's RunFailed, with all attempts in its report."""
    life.group.need_running()
    life.parts.on("run")
    for launched in life.parts.launched:
        launched(request, life.runs.id)
    if request.max_restarts:
        life.group.source.refuse_renewal(f"--max-restarts {request.max_restarts}")
    began = time.monotonic()
    attempts: list[str] = []
    while True:
        try:
            with life.group.source.watching():  # nodes that come or are to go end it
                return life.runs.run(request, screen, timed_from=began, attempt=len(attempts))
        except RunFailed as error:
            changes = life.runs.last.regrouped if life.runs.last is not None else ""
            if changes:  # no failure, so no attempt
                screen.say(f"{changes}; restarting all workers and the cell")
            else:
                _count(error, attempts, request.max_restarts, screen)
            life.group.source.renew(screen)


def _count(error: RunFailed, attempts: list[str], most: int, screen: Screen) -> None:
    """Note a failed attempt. Raises the error if it is none, or the last one."""
    if not isinstance(error, (WorkerFailed, RunHung)):
        raise error
    attempts.append(str(error))
    if len(attempts) > most:
        if most:
            error.attempts = tuple(attempts)
            error.report = report.attempts_text(attempts, error.report)
            error.painted = report.attempts_text(attempts, error.painted)
        raise error
    screen.say(report.attempt_words(len(attempts), most + 1, attempts[-1]))
