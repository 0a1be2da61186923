"""`nbddp.Pool.run_script`: a script or module on every rank, as torchrun runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbddp.capabilities.scripts import command
from nbddp.capabilities.scripts.logs import given
from nbddp.protocol.request import HANG_AFTER, SHUTDOWN

if TYPE_CHECKING:
    from nbddp.pool.pool import WorkerPool


def run_script(
    pool: WorkerPool,
    script: str,
    *words: str,
    module: bool = False,
    keep: bool = False,
    logs: str | None = None,
    max_restarts: int = 0,
    hang_after: float | None = HANG_AFTER,
    timeout: float | None = None,
    shutdown_timeout: float = SHUTDOWN,
) -> None:
    """Run a script (or a module) on every rank as torchrun does, in new processes that end with it.

    - script (str): its path, or a module's name; words (str): its arguments.
    - module (bool): `script` is a module, as in `python -m` (default False).
    - keep (bool): use the existing processes, and keep the script's variables there (default False).
    - logs (str): folder of log files, as `%ddp run --log-dir` writes them (default: no files).
    - max_restarts (int): how many times a failure restarts the workers and the script (default 0).
    - hang_after (float): seconds before a deadlock is ended (default 5); None: it is never ended.
    - timeout (float): seconds that the script may take (default: any time).
    - shutdown_timeout (float): seconds that ranks have to clean up when the script is stopped (default 30).

    Raises BadInput if there is no such file, or a RunFailed: WorkerFailed, RunStopped, RunHung or RunTimedOut.

    Example:

        pool.run_script("train.py", "--epochs", "1", timeout=600.0)
    """
    command.run_script(
        pool, script, *words, module=module, keep=keep, logs=given(logs), max_restarts=max_restarts,
        hang_after=hang_after, timeout=timeout, shutdown_timeout=shutdown_timeout,
    )  # fmt: skip
