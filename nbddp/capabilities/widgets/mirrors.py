"""Widgets in the notebook that stand for widgets on ranks.

A mirror has the id and the state of the rank's widget, so that the front end finds it after a reload and can move it.
What the reader does goes on to the rank, whose answer comes back as any change does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from nbddp.capabilities.widgets.state import Mirror, WidgetModel, apart

Answer = Callable[[dict[str, Any], Sequence[bytes]], None]
IDENTITY = ("model_name", "model_module", "model_module_version", "view_name", "view_module", "view_module_version")


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

        def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
            keys = self.model.state if key is None else [key] if isinstance(key, str) else key
            return {k: self.model.state[k] for k in keys if k in self.model.state}

        def set_state(self, sync_data: dict[str, Any]) -> None:
            """The front end has changed something."""
            self.model.state.update(sync_data)
            state, paths, buffers = apart(sync_data)
            self.answer({"method": "update", "state": state, "buffer_paths": paths}, buffers)

        def custom(self, widget: Any, content: Any, buffers: Any) -> None:
            """The front end has sent a message of the widget's own."""
            self.answer({"method": "custom", "content": content}, [bytes(b) for b in buffers or ()])

        def pass_on(self, data: dict[str, Any], buffers: Sequence[bytes]) -> None:
            """What the rank has sent to the front end."""
            if self.comm is not None:
                self.comm.send(data=data, buffers=list(buffers))

    return Reflection
