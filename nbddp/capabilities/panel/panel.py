"""`Panel`: a pool's panel in any front end. It shows widgets if the front end has them, and always a picture and words,
which stay in a saved notebook.
"""

from __future__ import annotations

import atexit
import functools
from datetime import datetime
from typing import Any
from uuid import uuid4

from nbddp.capabilities.panel import state as panel_state
from nbddp.capabilities.panel.curves import Curve
from nbddp.capabilities.panel.document import kept
from nbddp.capabilities.panel.page import understudy
from nbddp.capabilities.panel.plan import on_paper
from nbddp.capabilities.panel.session import Session, session_of
from nbddp.capabilities.panel.state import State, Timeline
from nbddp.capabilities.topology.figure import draw_topology
from nbddp.figures import widget_support
from nbddp.figures.figure import DescribedFigure
from nbddp.launch.topology import Topology
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.messages import Metadata, MimeBundle

SAVED = "picture of the panel"


def saved_at(at: datetime) -> str:
    """The first line of a picture, since a saved notebook shows it when the pool is long gone."""
    return f"{SAVED}, taken {at:%Y-%m-%d %H:%M}; run %ddp panel for the pool as it is now"


class PoolPanel:
    """The panel of a pool. All panels of a pool show the same, and each may be shown several times."""

    def __init__(self, pool: WorkerPool):
        self.pool = pool
        self.session: Session = session_of(pool)
        self._view: Any = None
        self._outputs: list[tuple[Any, str, str]] = []  # where it is shown: publisher, display, and its understudy's
        self._leave: Any = None
        self._drawn: Topology | None = None  # the pool as the picture has it
        self._said: tuple[MimeBundle, Metadata] = {}, {}
        self._kept: tuple[Curve, Timeline | None] | None = None  # of the last run, what a saved notebook shows
        self._curves = ""  # the same as HTML, of the last run that had steps

    @property
    def view(self) -> Any:
        """Its widgets. Raises ImportError without ipywidgets."""
        if self._view is None:
            from nbddp.capabilities.panel.view import View

            self._view = View(self.session)
        return self._view

    @property
    def state(self) -> State:
        return self.session.model.state

    def close(self) -> None:
        """Take the widgets away, wherever they are shown."""
        if self._leave is not None:
            self._leave()
            self._leave = None
            atexit.unregister(self._last)
        if self._view is not None:
            self._view.close()
            self._view = None

    def _ipython_display_(self) -> None:
        """Show it, with a picture that a saved notebook keeps. With a newer picture the front end makes the panel anew,
        which drops the keyboard's focus. So it comes when the reader runs another cell, and has the focus there."""
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        if shell is None:
            print(repr(self))
            return
        data, metadata = self._repr_mimebundle_()
        self._drawn = self.state.placed
        self._outputs.append((shell.display_pub, uuid4().hex, uuid4().hex))
        self._publish(data, metadata, update=False)
        if self._leave is None:
            shell.events.register("pre_run_cell", self._renew)
            self._leave = functools.partial(shell.events.unregister, "pre_run_cell", self._renew)
            atexit.register(self._last)

    def _renew(self, info: Any = None) -> None:
        """Publish the picture of the pool as it is, if it is another; else what is kept of the last run, if that is,
        which leaves the panel alone. A pool that has started meanwhile would be stopped before `_last`, which may take
        longer than a front end waits for the notebook kernel's end."""
        atexit.unregister(self._last)
        atexit.register(self._last)
        if self.state.placed != self._drawn:
            self._drawn = self.state.placed
            self._publish(*self._repr_mimebundle_())
        elif widget_support.WIDGET in self._said[0] and self.state.curve.drawn and self._shows() != self._kept:
            self._publish(*self._said, panel=False)

    def _shows(self) -> tuple[Curve, Timeline | None]:
        return self.state.curve, self.state.step

    def _of_last_run(self) -> str:
        """The curve and the chosen step of the last run that had steps, as HTML."""
        if self.state.curve.drawn:
            self._kept, self._curves = self._shows(), kept(self.state)
        return self._curves

    def _last(self) -> None:
        """The notebook kernel ends: the picture and the words alone, or a front end looks for widgets that are gone."""
        data, metadata = self._repr_mimebundle_()
        if "text/html" in data and widget_support.WIDGET in data:
            data["text/html"] += self._of_last_run()
        self._publish({kind: shown for kind, shown in data.items() if kind != widget_support.WIDGET}, metadata)

    def _publish(self, data: MimeBundle, metadata: Metadata, update: bool = True, panel: bool = True) -> None:
        """update: wherever it is shown; else in the newest place. panel: that too, not only what stands in for it. The
        widgets carry the picture that is shown once they are gone. The page may be closed before the notebook kernel
        ends, and then nothing can be taken back."""
        self._said = data, metadata
        has_widgets = widget_support.WIDGET in data and "image/png" in data
        after = {"text/plain": ""}
        if has_widgets:
            width = metadata["image/png"]["width"]
            words = data["text/plain"].replace(SAVED, saved_at(datetime.now()), 1)
            after["text/html"] = understudy(data["image/png"], width, words, self._of_last_run())
        for publisher, ident, other in self._outputs if update else self._outputs[-1:]:
            if panel:
                publisher.publish(data, metadata, transient={"display_id": ident}, update=update)
            if update or has_widgets:
                publisher.publish(after, transient={"display_id": other}, update=update)

    def __repr__(self) -> str:
        if self.state.program and self.pool.current is None:  # it has ended since the last look
            self.session.model.change(lambda state: panel_state.seen(state, state.ranks, "", 0))
        return self.state.describe()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[MimeBundle, Metadata]:
        said = f"{SAVED}: {self!r}"  # before the widgets, which show the same state
        bundle: MimeBundle = {"text/plain": said}
        metadata: Metadata = {}
        state = self.state
        placed = state.placed or state.considered.topology or on_paper(state.plan, state.place)
        if placed is not None:
            bundle, metadata = DescribedFigure(draw_topology(placed).figure, said)._repr_mimebundle_()
            bundle["text/html"] = f"<div>{saved_at(datetime.now())}</div>{bundle['text/html']}"
        if widget_support.may_be_shown():
            bundle |= widget_support.view_of(self.view.widget)
        elif "text/html" in bundle:
            bundle["text/html"] += self._of_last_run()
        return bundle, metadata


def shown(pool: WorkerPool, include: Any = None, exclude: Any = None) -> tuple[MimeBundle, Metadata] | None:
    """A pool's rich representation: its panel once it has started, else none but its repr."""
    return PoolPanel(pool)._repr_mimebundle_() if pool.running else None
