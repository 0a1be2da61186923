"""What learners and teachers use: `explore` shows an idea under sliders, `check` runs an answer, `grade` marks a folder
of answers. What they gather is in `nbddp.lessons`. Importing this package imports nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["check", "explore", "grade", "predict"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'nbddp.teach' has no attribute {name!r}; it has {', '.join(__all__)}")
        return importlib.import_module(f"nbddp.teach.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
