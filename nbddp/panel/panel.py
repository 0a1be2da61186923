"""`Panel`: a pool's panel in whatever shows it: widgets where there is a front end for them, and always a picture and
words, which stay in a saved notebook.
"""

from __future__ import annotations

from typing import Any

from nbddp.draw.shown import Shown
from nbddp.draw.topology import topology
from nbddp.panel import words
from nbddp.panel.session import Session, session_of
from nbddp.panel.state import State
from nbddp.pool.pool import Pool

WIDGET = "application/vnd.jupyter.widget-view+json"
VERSION = {"version_major": 2, "version_minor": 0}


class PoolPanel:
    """The panel of a pool. All panels of a pool show the same, and each may be shown several times."""

    def __init__(self, pool: Pool):
        self.pool = pool
        self.session: Session = session_of(pool)
        self._view: Any = None

    @property
    def view(self) -> Any:
        """Its widgets. Raises ImportError without ipywidgets."""
        if self._view is None:
            from nbddp.panel.view import View

            self._view = View(self.session)
        return self._view

    @property
    def state(self) -> State:
        return self.session.model.state

    def close(self) -> None:
        """Take the widgets away, wherever they are shown."""
        if self._view is not None:
            self._view.close()
            self._view = None

    def __repr__(self) -> str:
        return words.words(self.state)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        said = repr(self)
        bundle: dict[str, Any] = {"text/plain": said}
        metadata: dict[str, Any] = {}
        if (placed := self.state.placed or self.state.considered.topology) is not None:
            bundle, metadata = Shown(topology(placed).figure, said)._repr_mimebundle_()
        if may_have_widgets():
            bundle[WIDGET] = {**VERSION, "model_id": self.view.widget.model_id}
        return bundle, metadata


def may_have_widgets() -> bool:
    """Whether a front end may be there that shows widgets: not in a terminal's IPython, nor without ipywidgets."""
    from IPython.core.getipython import get_ipython

    if getattr(get_ipython(), "kernel", None) is None:
        return False
    try:
        import ipywidgets  # noqa: F401
    except ImportError:  # not installed, or installed and broken: the picture and the words are there
        return False
    return True


def shown(pool: Pool) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """A pool's rich representation: its panel once it has started, else none but its repr."""
    return PoolPanel(pool)._repr_mimebundle_() if pool.running else None
