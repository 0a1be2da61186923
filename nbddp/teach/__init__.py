"""For learners and teachers. `explore` shows an idea under sliders, and `predict` asks a question before a result.
`check` tests an answer on real ranks, and `grade` marks a folder of answers.
Importing this package imports none of them.

Example:

    from nbddp.teach import explore
    print(explore.layout())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["check", "explore", "grade", "predict"]


if TYPE_CHECKING:
    from nbddp.teach import check, explore, grade, predict
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'nbddp.teach' has no attribute {name!r}; it has {', '.join(__all__)}")
        return importlib.import_module(f"nbddp.teach.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
