"""The names that a learner's function uses from the notebook, and which of them cannot be sent to the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from nbddp.lessons.framework.answer import Wrong
from nbddp.protocol import pickling


def refuse_unsendable(function: Callable[..., Any]) -> None:
    """Raises Wrong if the function uses a name of the notebook whose value cannot be sent, and says which."""
    taken = inspect.getclosurevars(function)
    for name, value in {**taken.globals, **taken.nonlocals}.items():
        if inspect.ismodule(value) or inspect.isfunction(value) or inspect.isclass(value):
            continue
        try:
            pickling.pack(value)
        except Exception as error:
            called, why = function.__name__, pickling.reason(error)
            raise Wrong(
                f"{called} uses {name}, which cannot be sent to the ranks ({why}); create it inside {called}"
            ) from error
