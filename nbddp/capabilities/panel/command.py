"""`nbddp.Panel()` and `%ddp panel`: the panel of the notebook's pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbddp.capabilities.panel.panel import PoolPanel
from nbddp.errors import warn_deprecated
from nbddp.notebook.commands import Asked, CommandLine
from nbddp.notebook.magics import standing_pool
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.messages import Metadata, MimeBundle
from nbddp.public import Pool, face, inner

DEPRECATED = ("session", "state", "view")  # names of nbddp 0.1


class Panel:
    """Start, watch and steer a pool with the mouse. A notebook shows the panel where it is a cell's value.

    pool (`nbddp.Pool`): default: the notebook's, which `%%ddp` cells use. Without `%load_ext nbddp` the panel has a
    pool of its own, as `panel.pool`. Outside a notebook, `str(panel)` describes the pool.

    Example:

        panel = nbddp.Panel(pool)
        assert panel.pool is pool
        panel.close()
    """

    def __init__(self, pool: Pool | None = None):
        of = standing_pool() or WorkerPool() if pool is None else inner(pool)
        self._pool = pool if isinstance(pool, Pool) else face(of)
        self._panel = PoolPanel(of)

    @property
    def pool(self) -> Pool:
        """The pool that the panel shows."""
        return self._pool

    def close(self) -> None:
        """Remove the widgets, wherever the panel is shown. The pool stays. The panel may be shown again.

        Example:

            nbddp.Panel(pool).close()
        """
        self._panel.close()

    def __repr__(self) -> str:
        return repr(self._panel)

    def _ipython_display_(self) -> None:
        self._panel._ipython_display_()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[MimeBundle, Metadata]:
        return self._panel._repr_mimebundle_(include, exclude)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in DEPRECATED:
                raise AttributeError(f"nbddp.Panel has no {name!r}; help(nbddp.Panel) lists what it has")
            warn_deprecated(f"nbddp.Panel.{name}", "help(nbddp.Panel) lists what stays", "0.3")
            return getattr(self._panel, name)


def show(asked: Asked, line: CommandLine) -> Panel:
    return Panel(face(asked.pool))
