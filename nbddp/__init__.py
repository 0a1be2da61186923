"""PyTorch DistributedDataParallel in a notebook: launch it, see it, learn it.

    %load_ext nbddp
    %%ddp --nproc 4
    ... an ordinary torchrun program ...

The same from Python: `with nbddp.Pool(nproc=4) as pool: pool.run(train, cfg)`.
Importing this package imports neither torch nor ipyparallel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbddp.errors import BadInput, NbddpError, PoolError, RunFailed, RunHung, RunStopped, RunTimedOut, WorkerFailed

if TYPE_CHECKING:
    from nbddp.front.panel import Panel
    from nbddp.plan.slurm import Slurm
    from nbddp.pool.pool import Pool
    from nbddp.run.values import NotSent, RankValues

__version__ = "0.1.0"
__all__ = [
    "BadInput",
    "NbddpError",
    "NotSent",
    "Panel",
    "Pool",
    "PoolError",
    "RankValues",
    "RunFailed",
    "RunHung",
    "RunStopped",
    "RunTimedOut",
    "Slurm",
    "WorkerFailed",
    "load_ipython_extension",
    "unload_ipython_extension",
]

_LAZY = {
    "NotSent": "nbddp.run.values", "Panel": "nbddp.front.panel", "Pool": "nbddp.pool.pool",
    "RankValues": "nbddp.run.values", "Slurm": "nbddp.plan.slurm",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'nbddp' has no attribute {name!r}")
    import importlib

    found = getattr(importlib.import_module(_LAZY[name]), name)
    if name == "Pool":
        found.shown = _shown
    return found


def _shown(pool: Any) -> Any:
    """A pool's rich representation, from a room that pools do not know."""
    from nbddp.panel.panel import shown

    return shown(pool)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext nbddp`: register the magics and start the node agent in the background."""
    import os

    from nbddp.agent.handle import Agent

    asked = Agent.ask(os.environ)  # a warm process that waits looks at its files while the rest is imported here

    from nbddp.front.magics import load

    __getattr__("Pool")  # a pool of the magics shows itself as one that is made here
    load(shell, asked)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext nbddp`: end the pool and remove the magics."""
    from nbddp.front.magics import unload

    unload(shell)
