"""The widgets of one pool's ranks: what they say, what stays of them, and what their readers do.

A mirror is a widget in the notebook that stands for one on a rank. It has the id and the state of the rank's widget, so
that the front end finds it after a reload and can move it. What the reader does goes on to the rank, whose answer comes
back as any change does.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nbddp.capabilities.widgets.state import CommContent, WidgetMessage, Widgets, may_end_bar
from nbddp.output.layout import BAR
from nbddp.protocol.codec import Json
from nbddp.protocol.messages import MimeBundle

if TYPE_CHECKING:
    from nbddp.execution.execution import Execution
    from nbddp.pool.state import PoolState


import functools

from nbddp.capabilities.widgets.state import Answer, Mirror, WidgetModel, apart

IDENTITY = ("model_name", "model_module", "model_module_version", "view_name", "view_module", "view_module_version")


class WidgetsPart:
    def __init__(self, pool: PoolState):
        self._pool, self._widgets = pool, Widgets(self._send)
        self._settled: list[MimeBundle] = []  # of the run that is on
        self.display_words, self.display_over = self._widgets.describe, self._widgets.is_over

    def message(self, rank: int, kind: str, content: CommContent, buffers: Sequence[Any]) -> bool:
        self._widgets.take(rank, kind, content, buffers)
        return may_end_bar(kind, content)

    def run_begins(self, run: Execution) -> None:
        self._widgets.begin()

    def display_left(self, data: MimeBundle, rich: bool) -> MimeBundle:
        self._settled.append(data)
        return self._widgets.settled(data, reflect if rich and can_reflect() else None)

    def run_ended(self, run: Execution) -> None:
        settled, self._settled = self._settled, []
        self._widgets.drop_bars(settled)

    def ranks_ended(self, ranks: Collection[int]) -> None:
        self._widgets.forget(ranks)

    def _send(self, rank: int, ident: str, data: WidgetMessage, buffers: Sequence[bytes]) -> None:
        """What a front end has sent to a widget. Of a rank that has ended the widget stays as it was."""
        with suppress(ReferenceError):  # the pool has ended
            if self._widgets.has(ident) and (wire := self._pool.group.wire) is not None:
                wire.tell_kernel(rank, "comm_msg", {"comm_id": ident, "data": data}, buffers, _print_of_callback)


def _print_of_callback(rank: int, kind: str, content: Json) -> None:
    """What a widget's callback prints on a rank; where a callback's print in the notebook itself would go."""
    if kind == "stream":
        out = sys.stderr if content["name"] == "stderr" else sys.stdout
        print(*(f"rank {rank}{BAR}{line}" for line in content["text"].splitlines()), sep="\n", file=out, flush=True)
    elif kind == "error":
        print(f"rank {rank}{BAR}{content['ename']}: {content['evalue']}", file=sys.stderr, flush=True)


# -- widgets that stand for those of ranks ---------------------------------------------------------


def reflect(model: WidgetModel, answer: Answer) -> Mirror:
    """A mirror of a rank's widget; `answer` is given what the front end sends. Raises ImportError without
    ipywidgets."""
    mirror: Mirror = _mirror_class()(model, answer)
    return mirror


def can_reflect() -> bool:
    """Whether ipywidgets is here and works: only the import tells."""
    try:
        _mirror_class()
    except ImportError:
        return False
    return True


@functools.cache
def _mirror_class() -> Any:
    from ipywidgets import Widget

    class Reflection(Widget):  # type: ignore[misc]
        """Its state is the model's, word for word; traits of its own it has none but those that say what it is."""

        def __init__(self, model: WidgetModel, answer: Answer):
            self.model, self.answer = model, answer
            super().__init__(model_id=model.ident)
            self.on_msg(self.custom)

        def open(self) -> None:
            for name in IDENTITY:
                if f"_{name}" in self.model.state:
                    self.set_trait(f"_{name}", self.model.of(name))
            super().open()

        def get_state(self, key: Any = None, drop_defaults: bool = False) -> Json:
            keys = self.model.state if key is None else [key] if isinstance(key, str) else key
            return {k: self.model.state[k] for k in keys if k in self.model.state}

        def set_state(self, sync_data: Json) -> None:
            """The front end has changed something."""
            self.model.state.update(sync_data)
            state, paths, buffers = apart(sync_data)
            self.answer({"method": "update", "state": state, "buffer_paths": paths}, buffers)

        def custom(self, widget: Any, content: Any, buffers: Any) -> None:
            """The front end has sent a message of the widget's own."""
            self.answer({"method": "custom", "content": content}, [bytes(b) for b in buffers or ()])

        def pass_on(self, data: WidgetMessage, buffers: Sequence[bytes]) -> None:
            """What the rank has sent to the front end."""
            if self.comm is not None:
                self.comm.send(data=data, buffers=list(buffers))

    return Reflection
