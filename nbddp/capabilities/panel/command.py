"""`nbddp.Panel()` and `%ddp panel`: the panel of the notebook's pool."""

from __future__ import annotations

from nbddp.capabilities.panel.panel import PoolPanel
from nbddp.notebook.commands import Asked, CommandLine
from nbddp.notebook.magics import standing_pool
from nbddp.pool.pool import WorkerPool
from nbddp.public import Pool, inner


class Panel(PoolPanel):
    """Start, watch and steer a pool with the mouse.

    pool: the notebook's if it is left out, the one that `%%ddp` cells use; without `%load_ext nbddp` a pool of its own,
    as `panel.pool`.

    Example:

        panel = nbddp.Panel(pool)
    """

    def __init__(self, pool: Pool | WorkerPool | None = None):
        super().__init__(standing_pool() or WorkerPool() if pool is None else inner(pool))


def show(asked: Asked, line: CommandLine) -> Panel:
    return Panel(asked.pool)
