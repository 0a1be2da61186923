"""PyTorch DistributedDataParallel in a notebook: launch it, see it, learn it.

    %load_ext nbddp
    %%ddp --nproc 4
    ... an ordinary torchrun program ...

The same from Python: `with nbddp.Pool(nproc=4) as pool: pool.run(train, cfg)`.
Importing this package imports neither torch nor ipyparallel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbddp.errors import (
    AgentFailed,
    BadInput,
    CellSyntaxError,
    CommandStopped,
    NbddpError,
    PoolError,
    PoolNotRunning,
    RunFailed,
    RunHung,
    RunStopped,
    RunTimedOut,
    SlurmRefused,
    WorkerFailed,
)
from nbddp.protocol.capability import load as _load
from nbddp.protocol.capability import public_names as _names

if TYPE_CHECKING:
    from nbddp.capabilities import *  # noqa: F403  # the names that capabilities add
    from nbddp.execution.values import NotSent, RankValues
    from nbddp.public import Pool

__version__ = "0.1.0"
__all__ = [
    "AgentFailed",
    "BadInput",
    "CellSyntaxError",
    "CommandStopped",
    "NbddpError",
    "NotSent",
    "Pool",
    "PoolError",
    "PoolNotRunning",
    "RankValues",
    "RunFailed",
    "RunHung",
    "RunStopped",
    "RunTimedOut",
    "SlurmRefused",
    "WorkerFailed",
    "load_ipython_extension",
]

_LAZY = {
    "NotSent": "nbddp.execution.values:NotSent", "Pool": "nbddp.public:Pool",
    "RankValues": "nbddp.execution.values:RankValues",
}  # fmt: skip
_ADDED = _names()
_LAZY |= _ADDED
__all__ += _ADDED


if not TYPE_CHECKING:  # a checker has the names above, and refuses others

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'nbddp' has no attribute {name!r}")
        return _load(_LAZY[name])


def __dir__() -> list[str]:
    """What Tab offers: the names of `__all__`, also those that are imported when they are first used."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def load_ipython_extension(shell: Any) -> None:
    """Register the magics and start the node agent in the background: `%load_ext nbddp` calls this.

    - shell (InteractiveShell): IPython's. Its `%unload_ext nbddp` stops the pool and removes the magics.

    Example:

        nbddp.load_ipython_extension(get_ipython())  # as %load_ext nbddp does
    """
    import os

    from nbddp.agent.client import ask

    asked = ask(os.environ)  # a warm process that waits looks at its files while the rest is imported here

    from nbddp.notebook.magics import load

    load(shell, asked)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext nbddp`: end the pool and remove the magics."""
    from nbddp.notebook.magics import unload

    unload(shell)
