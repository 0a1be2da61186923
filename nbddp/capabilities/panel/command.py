"""`nbddp.Panel()` and `%ddp panel`: the panel of the notebook's pool."""

from __future__ import annotations

from nbddp.capabilities.panel.panel import PoolPanel
from nbddp.notebook.commands import Asked, CommandLine
from nbddp.notebook.magics import standing_pool
from nbddp.pool.pool import Pool


class Panel(PoolPanel):
    """Start, watch and steer a pool with the mouse.

    pool: the notebook's if it is left out, the one that `%%ddp` cells use; without `%load_ext nbddp` a pool of its own,
    as `panel.pool`.
    """

    def __init__(self, pool: Pool | None = None):
        super().__init__(pool or standing_pool() or Pool())


def show(asked: Asked, line: CommandLine) -> Panel:
    return Panel(asked.pool)
